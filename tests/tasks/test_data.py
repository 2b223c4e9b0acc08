"""Clips as samples: rows, weights and priors, several clips of one video, and what identifies a fold."""

import itertools
import math

import numpy as np
import polars as pl
import pytest
import torch

from fvc_lib.corpus.folds import TrainingRows
from fvc_lib.engine.loading import load_batches
from fvc_lib.metrics.calibration import expected_calibration_error, probabilities
from fvc_lib.services.checkpoint_files import BEST, load_weights
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import FOLDS, PREDICTIONS, read_table, write_table
from fvc_lib.tasks.video.data import (
    ClipDataset,
    ClipRow,
    class_weights,
    clip_rows,
    fold_clips,
    prior_logit,
    with_counterparts,
)
from fvc_lib.tasks.video.training import fold_training, train_fold
from fvc_lib.video.wavelet_bands import BandSwap, with_bands_of
from tests.kits.training import ScoredTables, draw_clip

ROWS = (ClipRow("a", 0, 0), ClipRow("a", 1, 0), ClipRow("b", 0, 1))
CLIPS = 3


def test_class_weights_even_out_the_classes_and_average_to_one():
    real, fake = class_weights(ROWS)
    assert (2 * real, 2 * real + fake) == (fake, pytest.approx(3))
    with pytest.raises(DataError, match="got 2 real and 0 fake clips"):
        class_weights(ROWS[:2])


def test_the_prior_makes_the_score_of_a_network_trained_for_equal_classes_a_probability():
    """A perfect network gives log-likelihood ratios, as equal classes teach them; four videos in five are fake."""
    labels = (np.arange(20_000) % 5 > 0).astype(np.int64)
    logits = 2 * np.random.default_rng(0).normal(2.0 * labels, 1.0) - 2  # log N(2, 1) / N(0, 1) = 2 x - 2
    rows = [ClipRow(str(number), 0, int(label)) for number, label in enumerate(labels)]
    shift = prior_logit(rows, "loss")
    assert [shift, prior_logit(rows, "none")] == pytest.approx([math.log(4), 0])
    assert expected_calibration_error(labels, probabilities(logits, 1.0)) > 0.1
    assert expected_calibration_error(labels, probabilities(logits + shift, 1.0)) < 0.01


def test_the_fingerprint_sees_labels_parts_copies_and_settings(tiny_training):
    folds = read_table(tiny_training.paths.folds, FOLDS)
    other_labels = folds.with_columns(label=pl.when(pl.col("fold") == 0).then(pl.lit("real")).otherwise("label"))

    def fingerprint(table=folds, fold=0, **changes):
        tiny = tiny_training.with_config(**changes)
        return fold_clips(TrainingRows(table), tiny_training.store, tiny.config, fold).fingerprint

    prints = {fingerprint(), fingerprint(other_labels), fingerprint(fold=1), fingerprint(augmentations_per_video=0)}
    assert len(prints) == 4
    assert fingerprint(epochs=9) == fingerprint()


# Wavelet bands of the real that a fake was made from


def test_a_fake_takes_bands_of_its_real_by_seed_and_epoch_and_no_other_clip_does(tiny_training):
    folds = read_table(tiny_training.paths.folds, FOLDS)
    clips = fold_clips(TrainingRows(folds), tiny_training.store, tiny_training.config, 0)
    fakes, reals = (sorted({row.video_id for row in clips.train if row.label == label}) for label in (1, 0))
    pair = {fakes[0]: "pair", reals[0]: "pair", fakes[1]: "other", reals[1]: "other"}
    index = ScoredTables.index(
        folds,
        group_id=[pair.get(video, video) for video in folds["video_id"]],
        num_frames=[30 + (video == fakes[1]) for video in folds["video_id"]],  # not made from it frame by frame
    )
    rows = with_counterparts(clips, index).train
    assert {(row.video_id, row.augmentation_index, row.counterpart) for row in rows if row.counterpart} == {
        (fakes[0], 0, reals[0])
    }
    assert rows == clips.train  # the held-out logits of a row are found by it
    plain, swapped = (ClipDataset(tiny_training.store, rows, bands=bands, seed=3) for bands in (0.0, 0.5))
    place = next(number for number, row in enumerate(rows) if row.counterpart)
    fake, real = (tiny_training.store.read(video, 0) for video in (fakes[0], reals[0]))
    wanted = [with_bands_of(fake, real, BandSwap(*kinds)) for kinds in itertools.product((False, True), repeat=2)]
    seen = set()
    for epoch in range(12):
        before, after = (data.at_epoch(epoch).__getitems__(range(len(rows))) for data in (plain, swapped))
        same = (before.tensors["frames"] == after.tensors["frames"]).flatten(1).all(1)
        assert same[torch.arange(len(rows)) != place].all()
        found = after.tensors["frames"][place].numpy()
        seen.add(next(number for number, frames in enumerate(wanted) if np.array_equal(frames, found)))
    assert seen == {0, 1, 2, 3}
    with pytest.raises(DataError, match="wavelet_bands"):
        with_counterparts(clips, ScoredTables.index(folds, num_frames=list(range(1, folds.height + 1))))


# Several clips of one video: training draws one, testing averages all, and a result stays one row per video


@pytest.fixture
def several(tiny_training):
    """The tiny run with three clips of each video, each drawn for itself."""
    tiny = tiny_training.with_config(clips_per_video=CLIPS, epochs=1, shuffled_label_control=False)
    folds = read_table(tiny.paths.folds, FOLDS)
    some = folds.filter((pl.col("fold") == 0) | (pl.col("label") == "fake") | (pl.int_range(pl.len()) % 3 > 0))
    write_table(some, FOLDS, tiny.paths.folds)  # fewer reals than fakes train
    for video_id, label in read_table(tiny.paths.folds, FOLDS).select("video_id", "label").iter_rows():
        for number in (0, 1):
            clips = [draw_clip(f"{video_id}/{clip}", number, label == "fake") for clip in range(CLIPS)]
            tiny.store.write(video_id, number, np.concatenate(clips))
    tiny.note_clips()
    return tiny


def clip_of(sample_id):
    return int(sample_id.partition("@")[2] or 0)


def test_training_draws_one_clip_of_each_row_by_seed_row_and_epoch_alone(several):
    rows = clip_rows(read_table(several.paths.folds, FOLDS), 1)
    data = ClipDataset(several.store, rows, clips=CLIPS, draws=True, seed=3)
    assert len(data) == len(rows)
    drawn = {}
    for epoch in range(3):
        order, now, seen = np.random.default_rng(epoch).permutation(len(rows)).tolist(), data.at_epoch(epoch), []
        for size, workers in ((7, 0), (5, 2 * (not epoch))):
            batches = [order[start : start + size] for start in range(0, len(order), size)]
            loaded = load_batches(now, batches, num_workers=workers)
            seen.append({name for batch in loaded for name in batch.sample_ids})
        assert seen[0] == seen[1]
        assert {name.partition("@")[0] for name in seen[0]} == {row.clip_id for row in rows}
        drawn[epoch] = seen[0]
        sample, row = now[order[0]], rows[order[0]]
        first = 4 * clip_of(sample.sample_id)
        stored = several.store.read(row.video_id, row.augmentation_index)[first : first + 4]
        assert sample.tensors["frames"].numpy().tolist() == stored.tolist()
    assert drawn[0] != drawn[1]
    shares = np.bincount([clip_of(name) for names in drawn.values() for name in names], minlength=CLIPS)
    assert shares.min() > 0.2 * shares.sum()


def test_a_result_is_one_row_per_video_with_the_mean_of_its_clips_logits(several, list_log):
    outcome = train_fold(several.paths, several.config, 0, metric_log=list_log())
    predictions = read_table(several.paths.predictions(0), PREDICTIONS)
    tested = read_table(several.paths.folds, FOLDS).filter(fold=0).sort("video_id")
    assert predictions["video_id"].to_list() == tested["video_id"].to_list()
    task = fold_training(several.paths, several.config, 0).task
    model = task.build_model().eval()
    model.load_state_dict(load_weights(several.paths.fold_checkpoints(0) / BEST))
    prior = outcome.training.selection.prior_logit
    assert prior == prior_logit(task.training_data.rows, "loss") > 0
    for video_id, logit in predictions.select("video_id", "logit").iter_rows():
        clips = torch.from_numpy(np.array(several.store.read(video_id, 0))).reshape(CLIPS, 4, 3, 24, 24)
        with torch.inference_mode():
            assert logit == pytest.approx(model(clips).double().mean().item() + prior, abs=1e-5)
    parts = [
        {part[number].sample_id.partition("#")[0] for number in range(len(part))}
        for part in (task.training_data, task.validation_data)
    ]
    assert not parts[0] & parts[1]
    assert len(task.validation_data) == CLIPS * len(parts[1])
