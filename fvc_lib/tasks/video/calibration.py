"""The choice of epoch, temperature and threshold on training groups, and the record of these choices.

The record is a file next to the weights. It is written before the outer fold is opened, that is, before the labels of
the test videos are read. If an attempt is killed after that, the next attempt uses the same record and does not choose
again.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from pydantic import TypeAdapter, ValidationError

from fvc_lib.metrics.calibration import fit_temperature, probabilities
from fvc_lib.metrics.classification import FloatArray, IntArray, balanced_accuracy, check_labels, decide, log_loss
from fvc_lib.metrics.operating_points import operating_point, threshold_at
from fvc_lib.services.atomic_files import write_json
from fvc_lib.services.records.digests import undamaged_content

SELECTION = "selection.json"  # in the folder of a training's checkpoints
MIN_GROUPS = 5  # groups of each label without which nothing is calibrated
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selection:
    """The epoch, temperature and threshold of one training, with their quality on the videos that chose them.

    The videos that choose are the inner validation part. With ``RunConfig.cross_fits`` they are all training videos,
    with held-out logits. A model on features is a classical classifier that sees measured features of a video instead
    of its frames.

    Attributes:
        num_epochs: number of trained epochs; 0 for a model on features.
        best_epoch: 1-based, the epoch with the lowest inner validation loss; 0: no epoch was chosen.
        validation_loss: loss of the best epoch, or of the held-out logits; weighted as in training.
        prior_logit: log(fakes / reals), which is added to the logits before the temperature to undo class balancing
            (``data.prior_logit``); 0 without balancing.
        temperature: divisor of the logits (``metrics.calibration.fit_temperature``).
        log_loss: log loss of the calibrated probabilities, in nats per video.
        log_loss_uncalibrated: log loss at a temperature of 1, in nats per video.
        threshold: the lowest calibrated probability that is called fake, chosen for the operating point.
        balanced_accuracy: balanced accuracy at the threshold; None if a class is missing.
        num_videos, num_groups, num_real, num_fake: how many videos choose, how many groups they have, and how many of
            the videos are real and fake.
        fewest_groups: number of training groups with a real video, or with a fake one, whichever is smaller. Below
            ``MIN_GROUPS`` nothing is calibrated: the temperature is 1, and the threshold 0.5.
        operating_point: the goal that the threshold was chosen for, such as ``best`` or ``fpr=0.01``
            (``metrics.operating_points``).
        settings: the chosen settings of a model on features, by name; empty for a network.
        num_candidates: the number of settings that a model on features could choose from; 0 for a network.
    """

    num_epochs: int
    best_epoch: int
    validation_loss: float
    prior_logit: float
    temperature: float
    log_loss: float
    log_loss_uncalibrated: float
    threshold: float
    balanced_accuracy: float | None
    num_videos: int
    num_groups: int
    num_real: int
    num_fake: int
    fewest_groups: int
    operating_point: str = "best"
    settings: dict[str, float] = field(default_factory=dict)
    num_candidates: int = 0

    @property
    def is_calibrated(self) -> bool:
        """Whether there were enough groups of each label to choose a temperature and a threshold."""
        return self.fewest_groups >= MIN_GROUPS

    @property
    def is_held_out(self) -> bool:
        """Whether the choices were made on held-out logits of all training videos.

        Otherwise they were made on an inner validation part.
        """
        return not self.best_epoch

    @property
    def base_rate(self) -> float | None:
        """The share of fakes for which the scores are calibrated; None if they are not, or if a class is missing."""
        has_both = self.num_real and self.num_fake
        return self.num_fake / self.num_videos if has_both and self.is_calibrated else None

    def table(self) -> pl.DataFrame:
        """Return a table for people, one row each for the epoch (or settings), the temperature and the threshold.

        Columns, all text: ``chosen`` (what was chosen), ``value`` (its value), ``by`` (the criterion) and ``reached``
        (the criterion's value).
        """
        calibrated = f"{self.log_loss:.4f} nats per video (at a temperature of 1: {self.log_loss_uncalibrated:.4f})"
        accuracy = "undefined" if self.balanced_accuracy is None else f"{self.balanced_accuracy:.4f}"
        aim = operating_point(self.operating_point).says
        first = ("epoch", f"{self.best_epoch} of {self.num_epochs}", "lowest loss")
        if self.num_candidates:
            first = ("settings", settings_text(self.settings), f"lowest held-out loss of {self.num_candidates}")
        elif self.is_held_out:
            first = ("epoch", f"none of {self.num_epochs}", "last weights; reached is the held-out loss")
        likely = "likelihood, held back where videos are few"
        if not self.is_calibrated:
            likely = aim = too_few_groups(self.fewest_groups)
        rows = [
            (*first, f"{self.validation_loss:.4f}"),
            ("temperature", f"{self.temperature:.4g}", likely, calibrated),
            ("threshold", f"{self.threshold:.4f}", aim, accuracy),
        ]
        return pl.DataFrame(rows, schema=["chosen", "value", "by", "reached"], orient="row")


def too_few_groups(fewest: int) -> str:
    """Return text that says why nothing was calibrated: a label has only ``fewest`` training groups."""
    return f"not calibrated: a label has {fewest} training groups, fewer than {MIN_GROUPS}"


def settings_text(settings: Mapping[str, float]) -> str:
    """Return settings as text, such as ``leaves 3, rounds 40``.

    Without settings there was nothing to choose, and the text is ``the only ones``.
    """
    return ", ".join(f"{name} {value:g}" for name, value in settings.items()) or "the only ones"


@dataclass(frozen=True)
class RecordedSelection:
    """A selection, the fold and weights that it belongs to, and how often the outer fold was opened.

    To open the outer fold means to read the labels of its test videos. ``record_selection`` writes the record.

    Attributes:
        selection: the choices and their values.
        clips: fingerprint of the fold's clips, labels and parts. Only a fold with this fingerprint accepts the record.
        weights: hex SHA-256 of the weights that the selection is for.
        openings: how often trainings in this folder opened the outer fold, this training included.
        earlier: how many earlier openings of the outer fold were for another selection. Above 0, the test labels may
            have influenced the choices, and the leakage audit fails. A damaged record counts as another selection.
    """

    selection: Selection
    clips: str
    weights: str
    openings: int = 1
    earlier: int = 0

    def sentence(self) -> str:
        """Return a text for people: how many videos chose, and how often the outer fold's labels were read."""
        chosen = self.selection
        on = "training videos, held out in turn," if chosen.is_held_out else "inner validation videos"
        uncalibrated = "" if chosen.is_calibrated else f" {too_few_groups(chosen.fewest_groups).capitalize()}."
        return (
            f"Chosen on {chosen.num_videos} {on} of {chosen.num_groups} groups ({chosen.num_real} "
            f"real, {chosen.num_fake} fake) and recorded before the outer fold's labels were opened. Openings "
            f"by this training: {self.openings}, for other selections: {self.earlier}; 05_kfold_results counts "
            f"trainings that were replaced.{uncalibrated}"
        )


def select(
    labels: npt.ArrayLike,
    logits: npt.ArrayLike,
    num_groups: int,
    *,
    fewest_groups: int,
    validation_loss: float,
    prior_logit: float = 0.0,
    point: str = "best",
    num_epochs: int = 0,
    best_epoch: int = 0,
    **settings: Any,
) -> Selection:
    """Choose temperature and threshold on the given videos, and return them with their quality on these videos.

    If the videos are of one class, the threshold is 0.5. With fewer than ``MIN_GROUPS`` groups of a label the threshold
    is 0.5 and the temperature 1.

    Args:
        labels: int (N,) of the videos that choose; 1 is fake, 0 is real.
        logits: float (N,), with ``prior_logit`` added.
        num_groups: number of groups of these videos.
        fewest_groups: number of training groups with a real video, or with a fake one, whichever is smaller.
        validation_loss: loss of the chosen epoch or settings; only recorded.
        prior_logit: number that ``logits`` already include; only recorded.
        point: the operating point that the threshold is chosen for (``metrics.operating_points``).
        num_epochs: number of trained epochs of a network; only recorded.
        best_epoch: 1-based epoch that the engine chose by the inner validation loss, or 0; only recorded.
        settings: for a model on features, the arguments ``settings`` and ``num_candidates``; see ``Selection``.

    Raises:
        ValueError: there is no video, or a logit is not finite.
    """
    checked = check_labels(labels)
    is_calibrated = fewest_groups >= MIN_GROUPS
    temperature = fit_temperature(checked, logits) if is_calibrated else 1.0
    scores = probabilities(logits, temperature)
    has_both = checked.min() != checked.max()
    threshold = 0.5
    if has_both and is_calibrated:  # tables hold no threshold above 1
        threshold = min(1.0, threshold_at(operating_point(point), checked, scores))
    loss = log_loss(checked, scores)
    uncalibrated_loss = log_loss(checked, probabilities(logits, 1.0))
    accuracy = balanced_accuracy(checked, decide(scores, threshold)) if has_both else None
    return Selection(
        num_epochs=num_epochs,
        best_epoch=best_epoch,
        validation_loss=validation_loss,
        prior_logit=prior_logit,
        temperature=temperature,
        log_loss=loss,
        log_loss_uncalibrated=uncalibrated_loss,
        threshold=threshold,
        balanced_accuracy=accuracy,
        num_videos=checked.size,
        num_groups=num_groups,
        num_real=int((checked == 0).sum()),
        num_fake=int((checked == 1).sum()),
        operating_point=point,
        fewest_groups=fewest_groups,
        **settings,
    )


def held_out_loss(labels: IntArray, logits: FloatArray, weights: FloatArray) -> float:
    """Return the weighted mean cross-entropy of N videos, in nats.

    ``logits`` (N,) are log odds of fake; ``labels`` (N,) are 1 for fake and 0 for real.
    """
    return float(np.average(np.logaddexp(0, np.where(labels == 1, -logits, logits)), weights=weights))


def record_selection(folder: Path, made: RecordedSelection) -> RecordedSelection:
    """Write ``made`` to ``selection.json`` in the training's ``folder``, and return the record as written.

    If the folder already has a record of the same fold, weights and operating point, that record's selection stays, and
    only its number of openings grows. So a resumed attempt cannot choose differently, even if it rounds differently. If
    the folder has a record of another selection, or a damaged one, ``earlier`` grows and a warning is logged.
    """
    path, before = folder / SELECTION, read_selection(folder)
    record = made
    if before is None and path.exists():
        record = replace(made, openings=2, earlier=1)
    elif before is not None:
        record = replace(made, openings=before.openings + 1, earlier=before.earlier)
        points = {before.selection.operating_point, made.selection.operating_point}
        if (before.clips, before.weights) == (made.clips, made.weights) and len(points) == 1:
            record = replace(record, selection=before.selection)
        elif before.selection != made.selection:
            record = replace(record, earlier=before.earlier + 1)
    if record.earlier > (before.earlier if before else 0):
        _logger.warning(
            "%s: is damaged, or of other weights: the outer fold was opened before for another selection, so the "
            "leakage audit will not pass. Train the fold in a new run.", path
        )  # fmt: skip
    write_json(path, asdict(record))
    return record


def read_selection(folder: Path) -> RecordedSelection | None:
    """Return the selection that is recorded in a folder of checkpoints; None if it is missing or unreadable."""
    try:
        return TypeAdapter(RecordedSelection).validate_json(undamaged_content(folder / SELECTION))
    except (OSError, ValidationError):
        return None
