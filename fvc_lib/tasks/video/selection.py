"""The choice of epoch, temperature and threshold on the inner validation part, and the record of it.

The record is a file next to the weights, on disk before the outer fold is opened. If an attempt is killed after that,
the next one uses the same record: nothing is chosen twice.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy.typing as npt
import polars as pl
from pydantic import TypeAdapter, ValidationError

from fvc_lib.metrics.calibration import fit_temperature, probabilities
from fvc_lib.metrics.classification import balanced_accuracy, check_labels, decide, log_loss
from fvc_lib.metrics.operating_points import operating_point, threshold_at
from fvc_lib.services.atomic_files import read_json_object, write_json
from fvc_lib.services.records.digests import undamaged_content
from fvc_lib.services.run_paths import RunPaths

if TYPE_CHECKING:
    from fvc_lib.engine.training_state import EpochRecord

SELECTION = "selection.json"  # in the folder of a training's checkpoints
_DAMAGED = "selection_damaged.json"  # an unreadable record, renamed
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selection:
    """The choices of one training, and their values on the inner validation part.

    Attributes:
        num_epochs: number of trained epochs; 0 for a model on features.
        best_epoch: 1-based, the epoch with the lowest inner validation loss; 0 for a model on features.
        validation_loss: loss of that epoch or model, weighted as in training.
        prior_logit: added to the network's logits before the temperature (``data.prior_logit``); not chosen.
        temperature: divisor of the logits (``metrics.calibration.fit_temperature``).
        log_loss: nats per video, of the calibrated probabilities.
        log_loss_uncalibrated: the same at a temperature of 1.
        threshold: of the calibrated probability, at the operating point.
        balanced_accuracy: at the threshold; None if the part has one class.
        num_videos, num_groups, num_real, num_fake: sizes of the inner validation part.
        operating_point: the aim of the threshold (``metrics.operating_points``).
        settings: the chosen settings of a model on features.
        num_candidates: the number of settings to choose from.
        num_real_at_one: reals with a score of 1 that are called fake although the operating point allows none: no
            threshold is above 1.
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
    operating_point: str = "best"
    settings: dict[str, float] = field(default_factory=dict)
    num_candidates: int = 0
    num_real_at_one: int = 0

    @property
    def is_resolved(self) -> bool:
        """Whether the inner validation part has enough reals for the requested false positive rate."""
        return operating_point(self.operating_point).is_resolved_by(self.num_real)

    def table(self) -> pl.DataFrame:
        """Return one row per choice: ``chosen value among by reached``."""
        calibrated = f"{self.log_loss:.4f} nats per video (at a temperature of 1: {self.log_loss_uncalibrated:.4f})"
        accuracy = "undefined" if self.balanced_accuracy is None else f"{self.balanced_accuracy:.4f}"
        likelihood = "likelihood, held back where videos are few"
        first = ("epoch", f"{self.best_epoch}", f"{self.num_epochs} trained", "lowest loss")
        if self.num_candidates:
            what = settings_text(self.settings)
            first = ("settings", what, f"{self.num_candidates} candidates", "lowest loss over inner folds of groups")
        rows = [
            (*first, f"{self.validation_loss:.4f}"),
            ("temperature", f"{self.temperature:.4g}", "0.05 to 20", likelihood, calibrated),
            ("threshold", f"{self.threshold:.4f}", "all of 0 to 1", self._aim(), accuracy),
        ]
        return pl.DataFrame(rows, schema=["chosen", "value", "among", "by", "reached"], orient="row")

    def _aim(self) -> str:
        says = operating_point(self.operating_point).says
        if self.num_real_at_one:
            return f"{says}, which is not kept: {self.num_real_at_one} reals with a score of 1 are called fake"
        return says if self.is_resolved else f"{says}, which {self.num_real} reals cannot resolve: none was"


def settings_text(settings: Mapping[str, float]) -> str:
    """Return a text such as ``leaves 3, rounds 40``."""
    return ", ".join(f"{name} {value:g}" for name, value in settings.items()) or "the only ones"


@dataclass(frozen=True)
class RecordedSelection:
    """A selection that is on disk.

    Attributes:
        selection: the selection.
        clips: fingerprint of the fold's clips, labels and parts; the record opens this fold alone.
        weights: hex SHA-256 of the weights that the selection is for.
        openings: number of times that the outer fold was opened in this training's folder, this time included.
        earlier: number of other selections that the fold was opened for before.
        is_complete: False if an earlier record could not be read, so that openings are missing from the counts.
    """

    selection: Selection
    clips: str
    weights: str
    openings: int = 1
    earlier: int = 0
    is_complete: bool = True

    def sentence(self) -> str:
        """Return a sentence on the part that chose, and on the openings of the outer fold."""
        chosen = self.selection
        opened = "were opened once, after this was recorded"
        if not self.is_complete:
            opened = "were opened before by a selection whose record is damaged"
        elif self.earlier:
            opened = f"were opened {self.openings} times; weights were lost in between, and this was chosen again"
        elif self.openings > 1:
            opened = f"were opened {self.openings} times, each after this was recorded: an attempt died in between"
        return (
            f"Chosen on {chosen.num_videos} inner validation videos of {chosen.num_groups} groups ({chosen.num_real} "
            f"real, {chosen.num_fake} fake); the outer fold's labels {opened}."
        )


@dataclass(frozen=True)
class EarlierOpenings:
    """Openings of outer folds before a run's present trainings.

    Attributes:
        replaced: trainings of this run that opened their outer fold with other weights and were then replaced.
        forked_from: the run that this one was forked from; empty without.
        unknown: replaced trainings whose record cannot be read.
    """

    replaced: int = 0
    forked_from: str = ""
    unknown: int = 0


def select(
    history: "Sequence[EpochRecord]",
    best_epoch: int,
    labels: npt.ArrayLike,
    logits: npt.ArrayLike,
    num_groups: int,
    *,
    prior_logit: float = 0.0,
    point: str = "best",
) -> Selection:
    """Choose temperature and threshold for the weights of ``best_epoch``.

    Args:
        history: the training's epochs.
        best_epoch: 1-based; the engine chose it by the inner validation loss.
        labels: int (N,) of the inner validation videos; 1 is fake.
        logits: float (N,), with ``prior_logit`` added.
        num_groups: groups of these videos.
        prior_logit: recorded with the selection.
        point: the operating point.

    Raises:
        ValueError: no video, or a logit that is not finite.
    """
    chosen = select_calibration(
        labels, logits, num_groups, prior_logit=prior_logit, point=point,
        validation_loss=history[best_epoch - 1].validation["loss"],
    )  # fmt: skip
    return replace(chosen, num_epochs=len(history), best_epoch=best_epoch)


def select_calibration(
    labels: npt.ArrayLike,
    logits: npt.ArrayLike,
    num_groups: int,
    *,
    validation_loss: float,
    prior_logit: float = 0.0,
    point: str = "best",
) -> Selection:
    """Choose temperature and threshold of a model without epochs; arguments and errors as in ``select``."""
    checked = check_labels(labels)
    temperature = fit_temperature(checked, logits)
    scores = probabilities(logits, temperature)
    has_both = checked.min() != checked.max()
    threshold = threshold_at(operating_point(point), checked, scores) if has_both else 0.5
    at_one = 0
    if threshold > 1:  # no real may be called fake, but tables hold no threshold above 1
        threshold, at_one = 1.0, int((scores[checked == 0] >= 1).sum())
    return Selection(
        num_epochs=0,
        best_epoch=0,
        validation_loss=validation_loss,
        prior_logit=prior_logit,
        temperature=temperature,
        log_loss=log_loss(checked, scores),
        log_loss_uncalibrated=log_loss(checked, probabilities(logits, 1.0)),
        threshold=threshold,
        balanced_accuracy=balanced_accuracy(checked, decide(scores, threshold)) if has_both else None,
        num_videos=checked.size,
        num_groups=num_groups,
        num_real=int((checked == 0).sum()),
        num_fake=int((checked == 1).sum()),
        operating_point=point,
        num_real_at_one=at_one,
    )


def record_selection(folder: Path, found: RecordedSelection) -> RecordedSelection:
    """Write ``found`` to the training's ``folder``, and return the record that counts.

    A record of the same weights stays: an attempt after a killed one cannot choose differently, even if it rounds
    differently. An unreadable record is renamed, and later records are never complete again.
    """
    path, kept = folder / SELECTION, found
    before = read_selection(folder)
    if before is None and os.path.lexists(path):
        kept = replace(found, openings=2, is_complete=False)
        aside = path.with_name(_DAMAGED)
        path.replace(aside)
        _logger.warning(
            "%s: was damaged and is now %s. Earlier openings of the outer fold are unknown, so the leakage audit will "
            "not pass; train the fold in a new run.",
            path, aside.name,
        )  # fmt: skip
    elif before is not None:
        kept = replace(found, openings=before.openings + 1, earlier=before.earlier, is_complete=before.is_complete)
        same_point = before.selection.operating_point == found.selection.operating_point
        if same_point and (before.clips, before.weights) == (found.clips, found.weights):
            kept = replace(kept, selection=before.selection)
        elif before.selection != found.selection:
            kept = replace(kept, earlier=before.earlier + 1)
            _logger.warning("%s: the outer fold was opened before for a selection of other weights", path)
    write_json(path, asdict(kept))
    return kept


def read_selection(folder: Path) -> RecordedSelection | None:
    """Return the record in a folder of checkpoints; None if it is missing or unreadable."""
    try:
        return TypeAdapter(RecordedSelection).validate_json(undamaged_content(folder / SELECTION))
    except (OSError, ValidationError):
        return None


def earlier_openings(paths: RunPaths, num_folds: int) -> EarlierOpenings:
    """Return the openings of outer folds before the run's present selections."""
    replaced, unknown = 0, 0
    for fold in range(num_folds):
        folder = paths.fold_checkpoints(fold)
        now = read_selection(folder)
        aside = sorted(paths.superseded.glob(f"*/{folder.relative_to(paths.root)}"))
        before = [found for found in map(read_selection, aside) if found is not None]
        replaced += sum(now is None or found.weights != now.weights for found in before)
        unreadable = [place for place in aside if os.path.lexists(place / SELECTION) and read_selection(place) is None]
        unknown += len(unreadable)
        for place in unreadable:
            _logger.warning("%s: cannot be read; it may have opened this fold", place / SELECTION)
    forked_from = read_json_object(paths.run_json).get("forked_from", "")
    return EarlierOpenings(replaced, forked_from if isinstance(forked_from, str) else "", unknown)
