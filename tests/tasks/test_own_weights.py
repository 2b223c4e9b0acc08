"""Going on from an own run: with which weights, what the record says, and that no fold's weights see its test."""

import shutil

import numpy as np
import polars as pl
import pytest
from torch import nn

from fvc_lib.command_line.run_command import trouble_of_choice
from fvc_lib.corpus.copies.perceptual_hash import perceptual_hash
from fvc_lib.corpus.folds import split_for_fold
from fvc_lib.detectors.listing import cost_of
from fvc_lib.detectors.network import PictureTrunk, weights_path
from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.checkpoint_files import BEST
from fvc_lib.services.errors import LeakageError, UsageError
from fvc_lib.services.registry import DETECTORS, DetectorSpec
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import FOLDS, INDEX, PREDICTIONS, read_table, write_table
from fvc_lib.tasks.video import own_weights
from fvc_lib.tasks.video.data import read_fold
from fvc_lib.tasks.video.own_weights import weights_to_go_on_from
from fvc_lib.tasks.video.training import fold_training, train_fold
from tests.kits.training import TinyTraining


def begin(tiny, tables, folds=None, **columns):
    """The files that a run has once it is begun and indexed."""
    folds = read_table(tiny.paths.folds, FOLDS) if folds is None else folds
    write_table(folds, FOLDS, tiny.paths.folds)
    write_table(tables.index(folds, **columns), INDEX, tiny.paths.index)
    write_text(tiny.paths.params_yaml, tiny.config.to_yaml())
    write_text(tiny.paths.run_json, "{}")
    return tiny


@pytest.fixture
def finished(tiny_training, tables, list_log):
    """A run whose fold 0 is trained, and its outcome."""
    tiny = begin(tiny_training.with_config(epochs=1, shuffled_label_control=False), tables)
    return tiny, train_fold(tiny.paths, tiny.config, 0, metric_log=list_log())


def going_on(finished, tables, folds=None, config=None, **columns):
    """Another run that goes on from it."""
    tiny = finished[0]
    paths = RunPaths(tiny.paths.root.parent / "run_1")
    more = {**(config or {}), "model_weights": str(tiny.paths.root)}
    folds = read_table(tiny.paths.folds, FOLDS) if folds is None else folds
    return begin(TinyTraining(paths, tiny.with_config(**more).config), tables, folds, **columns)


def weights_for(run, fold=0):
    split = split_for_fold(
        read_table(run.paths.folds, FOLDS), fold,
        inner_validation_share=run.config.inner_validation_share, seed=run.config.seed,
    )  # fmt: skip
    return weights_to_go_on_from(run.paths, run.config, fold, frozenset(split.validation["video_id"]))


def renamed(folds):
    return folds.with_columns(video_id="other" + pl.col("video_id"), group_id="other" + pl.col("group_id"))


def test_a_fold_begins_with_the_best_weights_of_the_same_fold_and_its_control_does_not(finished, tables, list_log):
    tiny, before = finished
    run = going_on(finished, tables, config={"shuffled_label_control": True})
    run.note_clips()
    after = train_fold(run.paths, run.config, 0, metric_log=list_log())
    assert after.training.initial_weights == before.training.best_weights
    assert after.control.initial_weights == before.training.initial_weights
    assert after.network.weights == f"run_0, fold 0 ({tiny.paths.fold_checkpoints(0) / BEST})"
    assert len(after.network.weights_sha256) == 64
    assert "Weights from run_0, fold 0" in after.sentence()


def test_the_run_counts_by_its_weights_and_not_by_where_it_lies(finished, tables):
    tiny, _ = finished
    run = going_on(finished, tables)
    tiny.paths.status_json.write_text("{}")
    assert run.with_config().config.config_hash == run.config.config_hash
    moved = tiny.paths.root.rename(tiny.paths.root.parent / "elsewhere")
    assert run.with_config(model_weights=str(moved)).config.training_values() == run_values(run, tiny, moved)


def run_values(run, tiny, moved):
    moved.rename(tiny.paths.root)
    values = run.config.training_values()
    tiny.paths.root.rename(moved)
    return values


def test_another_split_of_the_same_corpus_is_refused_and_counted(finished, tables):
    assert weights_for(going_on(finished, tables)) is not None
    folds = read_table(finished[0].paths.folds, FOLDS)
    turned = folds.with_columns(fold=(pl.col("fold") + 1) % 3)
    with pytest.raises(LeakageError, match=r"weights of fold 0 of run_0 have seen videos like 12 of those that test"):
        weights_for(going_on(finished, tables, turned))
    with pytest.raises(LeakageError, match=r"like 0 of those that test fold 0 here and [1-9]\d* of those that choose"):
        weights_for(going_on(finished, tables, config={"seed": 3}))


def test_another_corpus_is_searched_for_the_same_contents_and_near_duplicates(finished, tables):
    folds = read_table(finished[0].paths.folds, FOLDS)
    index = read_table(finished[0].paths.index, INDEX)
    others = renamed(folds)
    assert weights_for(going_on(finished, tables, others)) is not None
    in_test = others["fold"].to_list().index(0)
    contents = tables.index(others)["content_sha256"].to_list()
    contents[in_test] = index["content_sha256"][folds["fold"].to_list().index(1)]
    with pytest.raises(LeakageError, match="like 2 of those that test"):  # its group has two
        weights_for(going_on(finished, tables, others, content_sha256=contents))
    coarse = np.random.default_rng(0).integers(20, 235, (3, 3, 8, 8)).astype(np.float64)
    look = perceptual_hash(np.kron(coarse, np.ones((8, 8))).astype(np.uint8))
    hashes = [look if place == in_test else None for place in range(folds.height)]
    seen = [look if fold == 1 else None for fold in folds["fold"]]
    write_table(tables.index(folds, perceptual_hash=seen), INDEX, finished[0].paths.index)
    with pytest.raises(LeakageError, match="like 2 of those that test"):
        weights_for(going_on(finished, tables, others, perceptual_hash=hashes))
    off = going_on(finished, tables, others, config={"near_duplicate_bits": 0}, perceptual_hash=hashes)
    assert weights_for(off) is not None


def test_a_group_member_that_takes_no_part_connects_a_tested_video_with_a_seen_one(finished, tables):
    folds = read_table(finished[0].paths.folds, FOLDS)
    index = read_table(finished[0].paths.index, INDEX)
    others = renamed(folds)
    first = others["fold"].to_list().index(0)
    contents = tables.index(others)["content_sha256"].to_list()
    contents[first] = index["content_sha256"][folds["fold"].to_list().index(1)]
    run = going_on(finished, tables, others, content_sha256=contents)
    without = others.filter(pl.int_range(pl.len()) != first)  # the protocol leaves it out, its group has one more
    write_table(without, FOLDS, run.paths.folds)
    with pytest.raises(LeakageError, match="like 1 of those that test"):
        weights_for(run)


def test_what_a_run_itself_went_on_from_counts_as_well(finished, tables, list_log):
    folds = read_table(finished[0].paths.folds, FOLDS)
    middle = going_on(finished, tables, renamed(folds))
    middle.paths.fold_checkpoints(0).parent.mkdir(parents=True)
    finished[0].paths.fold_checkpoints(0).rename(middle.paths.fold_checkpoints(0))
    copied = finished[0].paths.fold_checkpoints(0)
    copied.mkdir()
    for path in middle.paths.fold_checkpoints(0).iterdir():
        if path.is_file():
            (copied / path.name).write_bytes(path.read_bytes())
    last = TinyTraining(RunPaths(middle.paths.root.parent / "run_2"), middle.config)
    last = last.with_config(model_weights=str(middle.paths.root))
    assert weights_for(begin(last, tables, folds)).built_with == ""
    with pytest.raises(LeakageError, match="of run_1 have seen"):
        weights_for(begin(last, tables, folds.with_columns(fold=(pl.col("fold") + 1) % 3)))


def test_what_cannot_be_gone_on_from_is_refused_in_words(finished, tables, tmp_path):
    tiny, _ = finished
    run = going_on(finished, tables)
    with pytest.raises(UsageError, match="fold 1 of run_0 is not finished"):
        weights_for(run, 1)
    with pytest.raises(UsageError, match=r"run_0 has model 'frame_cnn' and here 'r2plus1d_small'"):
        weights_for(going_on(finished, tables, config={"model": "r2plus1d_small"}))
    for path in (tiny.paths.fold_checkpoints(0), tiny.paths.fold_checkpoints(0) / BEST):
        with pytest.raises(UsageError, match="of one fold, or one part, of a run, and may have seen"):
            weights_path(str(path))
    link = tmp_path / "weights.safetensors"
    link.symlink_to(tiny.paths.fold_checkpoints(0) / BEST)
    with pytest.raises(UsageError, match=f"may have seen what tests another. Give the run: {tiny.paths.root}"):
        weights_path(str(link))
    with pytest.raises(UsageError, match="in task video alone"):
        weights_path(str(tiny.paths.root))


class Pooled(nn.Module):
    """A convolution, a norm, a mean and a line."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3, 2), nn.GroupNorm(2, 8)
        self.line = nn.Linear(8, 8)

    def forward(self, images):
        return self.line(self.norm(self.convolution(images)).abs().mean((2, 3)))


@pytest.fixture
def from_scratch(tiny_training, tables, list_log, monkeypatch):
    """As ``finished``, of a published network that trains its head alone, here begun without its weights."""
    spec = DetectorSpec(
        "tiny_trunk", "test", "none", "none", 4, 24, "none", micro_batch=5, tune="head",
        build_trunk=lambda _: PictureTrunk(Pooled(), 8),
    )  # fmt: skip
    DETECTORS.names()
    monkeypatch.setitem(DETECTORS._items, "tiny_trunk", spec)
    changes = {"epochs": 1, "shuffled_label_control": False, "model": "tiny_trunk"}
    tiny = begin(tiny_training.with_config(**changes), tables)
    return tiny, train_fold(tiny.paths, tiny.config, 0, metric_log=list_log())


@pytest.mark.parametrize("tune", ["", "norms"])
def test_model_and_control_train_the_same_after_a_run_from_scratch(from_scratch, tables, tune):
    run = going_on(from_scratch, tables, config={"shuffled_label_control": True, "tune": tune})
    run.note_clips()
    built = [each.task.build_model() for each in fold_training(run.paths, run.config, 0).networks]
    model, control = ({name for name, p in each.named_parameters() if p.requires_grad} for each in built)
    assert model == control
    assert ("trunk.network.convolution.weight" in model) == (tune == "")
    assert trouble_of_choice(run.config.model_dump(mode="json")) == ""


def test_a_network_that_went_on_from_a_run_has_its_size_and_speed_measured(from_scratch, tables):
    costs = cost_of(going_on(from_scratch, tables).config.model_dump(mode="json"))
    assert costs["num_parameters"] == costs["num_trained"] == sum(p.numel() for p in Pooled().parameters()) + 9 + 16
    assert costs["milliseconds_per_clip"] > 0


def test_effort_after_effort_on_a_run_without_it_is_refused(from_scratch, tables, list_log):
    """The residual would be held to a part of what the first run began with, not of what it had learned."""
    effort = going_on(from_scratch, tables, config={"tune": "effort:2"})
    effort.note_clips()
    train_fold(effort.paths, effort.config, 0, metric_log=list_log())
    paths = RunPaths(effort.paths.root.parent / "run_2")
    last = TinyTraining(paths, effort.with_config(model_weights=str(effort.paths.root)).config)
    with pytest.raises(UsageError, match="run_1 was trained with tune effort on the weights of a run without it"):
        weights_for(begin(last, tables, read_table(effort.paths.folds, FOLDS)))


def test_what_a_run_on_shuffled_labels_has_seen_follows_its_own_split(finished, tables):
    tiny = begin(finished[0].with_config(shuffle_labels=True), tables)
    trained, validation = (set(part["video_id"]) for part in _seen_parts(tiny))
    _, clips, _ = read_fold(tiny.paths, tiny.config, 0)
    assert trained == {row.video_id for row in clips.train}
    assert validation == {row.video_id for row in clips.validation}
    whole = begin(tiny.with_config(shuffle_labels=False), tables)
    assert validation != set(_seen_parts(whole)[1]["video_id"])  # or the test could not fail


def _seen_parts(tiny):
    found = own_weights._seen(tiny.paths, tiny.config, 0)
    return found.trained, found.chosen_on


OWN = """
import torch
from torch import nn

class Net(nn.Module):
    num_features = 8

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(6, 8)

    def forward(self, frames):
        colours = frames.float().mean((3, 4)) / 255
        return torch.relu(self.line(torch.cat([colours, colours.square()], dim=2)))
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["effort", "cell", "run"])
def test_two_ranks_train_as_one_process_does(kind, tiny_training, tables, list_log, tmp_path, monkeypatch):
    """What ranks must build anew by themselves: split weights, a cell's network, and a run's that is gone on from."""
    values = {"epochs": 1, "learning_rate": 1e-4, "memory_preflight": False, "shuffled_label_control": False}
    first = begin(tiny_training.with_config(**values), tables)
    if kind == "run":
        train_fold(first.paths, first.config, 0, metric_log=list_log())
        run = going_on((first,), tables)
    else:
        monkeypatch.setenv("FVC_CACHE_DIR", str(tmp_path / "cache"))
        (tmp_path / "net.py").write_text(OWN)
        DETECTORS.know_cell("own_net", OWN.replace("class Net", "class own_net"))
        name = f"{tmp_path / 'net.py'}:Net" if kind == "effort" else DETECTORS.check("own_net")
        run = begin(first.with_config(model=name, tune="effort" if kind == "effort" else ""), tables)
    scores = []
    for size in (1, 2):
        paths = RunPaths(tmp_path / f"ranks_{size}")
        begin(TinyTraining(paths, run.config), tables, read_table(run.paths.folds, FOLDS))
        shutil.copy(first.paths.augmented_metadata, paths.augmented_metadata)
        outcome = train_fold(paths, run.with_config(num_ranks=size).config, 0, metric_log=list_log())
        assert outcome.num_ranks == size
        assert bool(outcome.network.weights) == (kind == "run")
        scores.append(read_table(paths.predictions(0), PREDICTIONS)["logit"].to_numpy())
    np.testing.assert_allclose(*scores, atol=1e-5)
