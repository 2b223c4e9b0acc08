"""What is chosen for a training (epoch, temperature, threshold) on its inner validation videos, and the record of it.

The record is a file beside the weights, written and synced before the outer fold is opened. An attempt that was
killed after that leaves it, and the next one takes it as it stands: nothing is chosen twice.
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
_DAMAGED = "selection_damaged.json"  # what was found in its place and could not be read
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selection:
    """All that was chosen for one training, and at which value on the inner validation part."""

    num_epochs: int  # that were trained, and could be chosen; 0 of a model on features
    best_epoch: int  # 1-based, the one of the lowest inner validation loss; likewise
    validation_loss: float  # of that epoch, or model, weighted as in training
    prior_logit: float  # added to the network's logits first (``data.prior_logit``); no choice, but part of the score
    # That logits are divided by (``metrics.calibration.fit_temperature``; few videos move it little).
    temperature: float
    log_loss: float  # in nats per video, of the calibrated probabilities
    log_loss_uncalibrated: float  # the same at a temperature of 1
    threshold: float  # of the calibrated probability, at the operating point
    balanced_accuracy: float | None  # at the threshold; None where the part has one class
    num_videos: int  # of the inner validation part; and its groups, its real and its fake videos
    num_groups: int
    num_real: int
    num_fake: int
    operating_point: str = "best"  # what the threshold was asked for (``metrics.operating_points``)
    # Of a model on features what was chosen in place of an epoch, and how many there were to choose from.
    settings: dict[str, float] = field(default_factory=dict)
    num_candidates: int = 0
    # Reals with a score of 1, where the point would call none fake: no threshold lies above 1, so they are.
    num_real_at_one: int = 0

    @property
    def is_resolved(self) -> bool:
        """Whether the inner validation part has reals enough for the share of false alarms that was asked for."""
        return operating_point(self.operating_point).is_resolved_by(self.num_real)

    def table(self) -> pl.DataFrame:
        """One row per choice: ``chosen value among by reached``."""
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
    """``leaves 3, rounds 40``."""
    return ", ".join(f"{name} {value:g}" for name, value in settings.items()) or "the only ones"


@dataclass(frozen=True)
class RecordedSelection:
    """A selection that is on the disk."""

    selection: Selection
    clips: str  # fingerprint of the fold's clips, labels and parts; only that fold's seal opens for it
    weights: str  # hex SHA-256 of the weights that were judged
    openings: int = 1  # how often the outer fold was opened in this training's folder, this time included
    earlier: int = 0  # other selections that it had been opened for before, whose weights were lost
    # Whether the record before this one could be read, if there was one; where not, the outer fold was opened more
    # often than is counted here, and for what is not known.
    is_complete: bool = True

    def sentence(self) -> str:
        """On what was chosen, and when the outer fold was opened."""
        chosen = self.selection
        opened = "were opened once, after this was on the disk"
        if not self.is_complete:
            opened = "had been opened before, for what is not known: the record of it was damaged"
        elif self.earlier:
            opened = f"were opened {self.openings} times, before and after weights were lost and this was chosen anew"
        elif self.openings > 1:
            opened = f"were opened {self.openings} times, each after this was on the disk: an attempt died in between"
        return (
            f"Chosen on {chosen.num_videos} inner validation videos of {chosen.num_groups} groups ({chosen.num_real} "
            f"real, {chosen.num_fake} fake); the outer fold's labels {opened}."
        )


@dataclass(frozen=True)
class EarlierOpenings:
    """What a run's own records of its trainings do not know: outer folds that had been looked at before."""

    # Trainings of this run that had opened their outer fold, for other weights, and were then replaced.
    replaced: int = 0
    # The run that this one was made from, whose results may have been seen; empty where there is none.
    forked_from: str = ""
    # Trainings of this run that were replaced and have left a record that cannot be read: whether they had opened their
    # outer fold, and for which weights, is not known.
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
    """Choose temperature and threshold for the weights of ``best_epoch`` (1-based).

    The engine chose that epoch of ``history`` by the inner validation loss. ``labels`` int (N,) are of the inner
    validation videos, 1 is fake; ``logits`` float (N,) what those weights say of them, ``prior_logit`` added. Without
    a video, or with a logit that is not finite, a ``ValueError`` is raised.
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
    """Choose temperature and threshold of what has no epochs; arguments and errors as of ``select``."""
    checked = check_labels(labels)
    temperature = fit_temperature(checked, logits)
    scores = probabilities(logits, temperature)
    has_both = checked.min() != checked.max()
    threshold = threshold_at(operating_point(point), checked, scores) if has_both else 0.5
    at_one = 0
    if threshold > 1:  # not one real may be called fake; tables hold no threshold above 1
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
    """Put ``found`` into the training's ``folder`` and on the disk; what is there of the same weights stays as it is.

    So an attempt that comes after one that was killed cannot choose otherwise than the one that had seen the outer
    fold, also where it computes with other rounding. A record that is there and cannot be read says that the fold was
    opened, and no more: it is kept aside, and what comes after it is never called complete again.
    """
    path, kept = folder / SELECTION, found
    before = read_selection(folder)
    if before is None and os.path.lexists(path):
        kept = replace(found, openings=2, is_complete=False)
        aside = path.with_name(_DAMAGED)
        path.replace(aside)
        _logger.warning(
            "%s: was damaged, so how often the outer fold was opened before, and for which weights, is not known; kept "
            "as %s. The leakage audit will not pass; training the fold anew from its folds on, in a new run, would.",
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
    """The record in the folder of a training's checkpoints; None where there is none, or none that can be read."""
    try:
        return TypeAdapter(RecordedSelection).validate_json(undamaged_content(folder / SELECTION))
    except (OSError, ValidationError):
        return None


def earlier_openings(paths: RunPaths, num_folds: int) -> EarlierOpenings:
    """Which outer folds of the run in ``paths`` had been opened before the selections that it has now."""
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
            _logger.warning("%s: cannot be read; whether this fold was opened by it is not known", place / SELECTION)
    forked_from = read_json_object(paths.run_json).get("forked_from", "")
    return EarlierOpenings(replaced, forked_from if isinstance(forked_from, str) else "", unknown)
