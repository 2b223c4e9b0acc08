import math

from fvc_lib.engine.checkpoint import EpochRecord
from fvc_lib.engine.oom import MicroBatchChange
from fvc_lib.tasks.video.training import FoldOutcome, TrainingSummary, outcome_from_json, outcome_to_json
from tests.kits.selection_kit import recorded_selection


class Clips:
    fingerprint = "f"


def test_an_outcome_with_an_epoch_that_was_not_finite_can_be_read_back():
    history = (
        EpochRecord(1, 0.1, math.nan, {"loss": math.inf, "roc_auc": math.nan}),
        EpochRecord(2, 0.1, 0.5, {"loss": 0.4, "roc_auc": 0.75}),
    )
    training = TrainingSummary(
        history=history, best_epoch=2, temperature=1.0, threshold=0.5, recorded=recorded_selection(Clips), steps=8,
        nonfinite_steps=1, micro_batch=4, micro_batch_schedule=(MicroBatchChange(0, 4),), inexact_because=(),
        seconds=1.5,
    )  # fmt: skip
    outcome = FoldOutcome(
        fold=0, model="m", num_parameters=3, device="cpu", num_train_videos=4, num_train_clips=8,
        num_validation_videos=2, num_test_videos=2, missing_videos=(), training=training, control=None,
        predicted_peak_bytes=None, peak_rss_bytes=1, peak_device_bytes=None, fingerprint="f",
    )  # fmt: skip
    text = outcome_to_json(outcome)
    assert '"NaN"' in text
    again = outcome_from_json(text)
    assert again.training.history[1] == history[1]
    assert again.training.recorded == training.recorded
    first = again.training.history[0]
    assert math.isnan(first.train_loss)
    assert math.isnan(first.validation["roc_auc"])
    assert first.validation["loss"] == math.inf
