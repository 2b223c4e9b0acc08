"""A selection on record, for tests that open a seal."""

from __future__ import annotations

from fvc_lib.tasks.video.calibration import RecordedSelection, Selection
from fvc_lib.tasks.video.data import FoldClips


def recorded_selection(clips: FoldClips) -> RecordedSelection:
    """Of ``clips``, with made-up values: the threshold and temperature of ``conftest``'s predictions."""
    chosen = Selection(
        num_epochs=3, best_epoch=2, validation_loss=0.5, prior_logit=0.0, temperature=2.0, log_loss=0.4,
        log_loss_uncalibrated=0.4, threshold=0.5, balanced_accuracy=0.9, num_videos=8, num_groups=4, num_real=4,
        num_fake=4,
    )  # fmt: skip
    return RecordedSelection(chosen, clips.fingerprint, "0" * 64)
