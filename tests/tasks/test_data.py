import math

import numpy as np
import polars as pl
import pytest
import torch

from fvc_lib.metrics.calibration import expected_calibration_error, probabilities
from fvc_lib.services.errors import DataError
from fvc_lib.tasks.video.data import (
    ClipDataset,
    ClipRow,
    class_weights,
    clip_rows,
    prior_logit,
    require_clips,
    rows_fingerprint,
    without_missing_originals,
)

ROWS = (ClipRow("a", 0, 0), ClipRow("a", 1, 0), ClipRow("b", 0, 1))


def test_rows_are_originals_and_copies_in_the_order_of_the_ids():
    videos = pl.DataFrame({"video_id": ["b", "a"], "label": ["fake", "real"]})
    assert clip_rows(videos) == (ClipRow("a", 0, 0), ClipRow("b", 0, 1))
    assert clip_rows(videos, 1) == (*ROWS, ClipRow("b", 1, 1))


def test_a_sample_is_the_clip_as_stored(tiny_training):
    data = ClipDataset(tiny_training.store, [ClipRow("video00003", 1, 1)])
    sample = data[0]
    assert (len(data), data.classes, sample.sample_id) == (1, (1,), "video00003#1")
    assert sample.tensors["frames"].dtype == torch.uint8
    assert sample.tensors["frames"].numpy().tolist() == tiny_training.store.read("video00003", 1).tolist()
    assert sample.tensors["label"].item() == 1.0
    sample.tensors["frames"].zero_()  # a copy: the stored clip is not touched
    assert tiny_training.store.read("video00003", 1).any()


def test_class_weights_even_out_the_classes_and_average_to_one():
    real, fake = class_weights(ROWS)
    assert 2 * real == 1 * fake
    assert 2 * real + fake == pytest.approx(3)


def test_the_prior_makes_the_score_of_a_network_trained_for_equal_classes_a_probability():
    """A perfect network says log-likelihood ratios, as equal classes teach them; four videos in five are fake."""
    generator = np.random.default_rng(0)
    labels = (np.arange(20_000) % 5 > 0).astype(np.int64)
    values = generator.normal(2.0 * labels, 1.0)  # log N(2, 1) / N(0, 1) = 2 x - 2
    logits = 2 * values - 2
    rows = [ClipRow(str(number), 0, int(label)) for number, label in enumerate(labels)]
    shift = prior_logit(rows, "loss")
    assert shift == pytest.approx(math.log(4))
    assert prior_logit(rows, "sampler") == shift
    assert prior_logit(rows, "none") == 0
    assert expected_calibration_error(labels, probabilities(logits, 1.0)) > 0.1
    assert expected_calibration_error(labels, probabilities(logits + shift, 1.0)) < 0.01


def test_one_class_is_refused():
    with pytest.raises(DataError, match="got 2 real and 0 fake clips"):
        class_weights(ROWS[:2])


def test_missing_clips_are_named(tiny_training):
    rows = [ClipRow("video00003", 1, 1), ClipRow("video00003", 7, 1), ClipRow("gone", 0, 1)]
    with pytest.raises(DataError, match=r"2 clips are not in the clip store: video00003#7, gone#0\. Run 03_aug"):
        require_clips(tiny_training.store, rows)


def test_videos_without_an_original_are_told_apart(tiny_training):
    videos = pl.DataFrame({"video_id": ["zzz", "video00003", "aaa"]})
    usable, missing = without_missing_originals(videos, tiny_training.store)
    assert usable["video_id"].to_list() == ["video00003"]
    assert missing == ("aaa", "zzz")


def test_the_fingerprint_sees_labels_parts_copies_and_settings(tiny_training):
    store = tiny_training.store
    other_store = tiny_training.with_config(augmentations=("noise",))
    prints = {
        rows_fingerprint(store, [("train", ROWS), ("test", ())]),
        rows_fingerprint(store, [("train", ROWS[:2]), ("test", ROWS[2:])]),
        rows_fingerprint(store, [("train", (*ROWS[:2], ClipRow("b", 0, 0)))]),
        rows_fingerprint(store, [("train", (*ROWS[:2], ClipRow("b", 1, 1)))]),
        rows_fingerprint(other_store.store, [("train", ROWS), ("test", ())]),
    }
    assert len(prints) == 5
    assert rows_fingerprint(store, [("train", ROWS), ("test", ())]) in prints
