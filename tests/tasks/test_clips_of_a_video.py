"""Several clips of one video: training draws one, testing averages all, and a result stays one row per video."""

import numpy as np
import polars as pl
import pytest
import torch

from fvc_lib.engine.loading import load_batches
from fvc_lib.services.checkpoint_files import BEST, load_weights
from fvc_lib.services.tables import FOLDS, PREDICTIONS, read_table
from fvc_lib.tasks.video.data import ClipDataset, clip_rows
from fvc_lib.tasks.video.task import BinaryScores
from fvc_lib.tasks.video.training import fold_training, train_fold
from tests.kits.training import draw_clip

CLIPS = 3


@pytest.fixture
def several(tiny_training):
    """The tiny run with three clips of each video, each drawn for itself."""
    tiny = tiny_training.with_config(clips_per_video=CLIPS, epochs=1, shuffled_label_control=False)
    for video_id, label in read_table(tiny.paths.folds, FOLDS).select("video_id", "label").iter_rows():
        for number in (0, 1):
            clips = [draw_clip(f"{video_id}/{clip}", number, label == "fake") for clip in range(CLIPS)]
            tiny.store.write(video_id, number, np.concatenate(clips))
    tiny.note_clips()
    return tiny


def test_training_draws_one_clip_of_each_row_by_seed_row_and_epoch_alone(several):
    rows = clip_rows(read_table(several.paths.folds, FOLDS), 1)
    data = ClipDataset(several.store, rows, clips=CLIPS, draws=True, seed=3)
    assert len(data) == len(data.classes) == len(rows)
    drawn = {}
    for epoch in range(6):
        order = np.random.default_rng(epoch).permutation(len(rows)).tolist()
        now = data.at_epoch(epoch)
        batches = [
            list(
                load_batches(now, [order[start : start + size] for start in range(0, len(order), size)], num_workers=n)
            )
            for size, n in ((7, 0), (5, 2))
        ]
        one, other = ({name for each in some for name in each.sample_ids} for some in batches)
        assert one == other
        assert {name.partition("@")[0] for name in one} == {row.clip_id for row in rows}
        drawn[epoch] = one
        sample = now[order[0]]
        clip = int(sample.sample_id.partition("@")[2] or 0)
        row = rows[order[0]]
        stored = several.store.read(row.video_id, row.augmentation_index)[4 * clip : 4 * clip + 4]
        assert sample.tensors["frames"].numpy().tolist() == stored.tolist()
    assert drawn[0] != drawn[1]
    assert {name for each in drawn.values() for name in each} > drawn[0]
    assert ClipDataset(several.store, rows, clips=CLIPS, draws=True, seed=4)[0].tensors["frames"].shape == (
        4,
        3,
        24,
        24,
    )
    shares = np.bincount([int(n.partition("@")[2] or 0) for each in drawn.values() for n in each], minlength=CLIPS)
    assert shares.min() > 0.2 * shares.sum()


def test_a_result_is_one_row_per_video_with_the_mean_of_its_clips_logits(several, list_log):
    outcome = train_fold(several.paths, several.config, 0, metric_log=list_log())
    predictions = read_table(several.paths.predictions(0), PREDICTIONS)
    tested = read_table(several.paths.folds, FOLDS).filter(pl.col("fold") == 0).sort("video_id")
    assert predictions["video_id"].to_list() == tested["video_id"].to_list()
    training = fold_training(several.paths, several.config, 0)
    task = training.networks[0].task
    model = task.build_model()
    model.load_state_dict(load_weights(several.paths.fold_checkpoints(0) / BEST))
    model.eval()
    prior = outcome.training.selection.prior_logit
    for video_id, logit in predictions.select("video_id", "logit").iter_rows():
        clips = torch.from_numpy(np.array(several.store.read(video_id, 0))).reshape(CLIPS, 4, 3, 24, 24)
        with torch.inference_mode():
            assert logit == pytest.approx(model(clips).double().mean().item() + prior, abs=1e-5)


def test_all_clips_of_a_video_play_one_part(several):
    task = fold_training(several.paths, several.config, 0).networks[0].task
    parts = [
        {task_data[number].sample_id.partition("#")[0] for number in range(len(task_data))}
        for task_data in (task.training_data, task.validation_data)
    ]
    assert not parts[0] & parts[1]
    assert len(task.validation_data) == CLIPS * len(parts[1])


def test_scores_average_the_clips_of_a_video_wherever_batches_and_ranks_end():
    logits, labels = torch.arange(12.0).double(), torch.tensor([0, 0, 0, 1, 1, 1] * 2)
    one, other = BinaryScores(3), BinaryScores(3)
    one.add([str(n) for n in range(5)], {"logits": logits[:5], "labels": labels[:5]})
    other.add([str(n) for n in range(5, 12)], {"logits": logits[5:], "labels": labels[5:]})
    one.add_document(other.to_document())
    assert one.logits.tolist() == [1, 4, 7, 10]
    assert one.labels.tolist() == [0, 1, 0, 1]
    assert one.compute()["roc_auc"] == 0.75
