"""A finished run asked again: files by its networks, and its test videos disturbed."""

import json
import os
import signal
from pathlib import Path

import polars as pl
import pytest

from fvc_lib.metrics.calibration import probabilities
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import INDEX, PREDICTIONS, read_table
from fvc_lib.tasks import decoding
from fvc_lib.tasks.decoding import FileToScore
from fvc_lib.tasks.journal import JOURNAL
from fvc_lib.tasks.video.predicting import networks_of_run, stored_predictions
from fvc_lib.tasks.video.robustness import level_facts, levels_named, score_levels
from fvc_lib.tasks.video.verdicts.scoring import score_files
from tests.faults.forked import run as run_child
from tests.kits.scored_run import NUM_VIDEOS, copied_run


@pytest.fixture(scope="module")
def run(scored_run, tmp_path_factory) -> RunPaths:
    return copied_run(scored_run, tmp_path_factory.mktemp("robust"))


def _lines(run, level):
    journal = run.robustness_scores / level / JOURNAL
    return [json.loads(line) for line in journal.read_bytes().splitlines()]


def scored(run, levels, predictions=None, **options):
    stored = stored_predictions(run, (0, 1)) if predictions is None else predictions
    index = read_table(run.index, INDEX)
    return score_levels(networks_of_run(run), index, stored, run.robustness_scores, levels, workers=1, **options)


def be_killed_in_the_second_level(run):
    def killed(done, total):
        if done == NUM_VIDEOS + 5:
            os.kill(os.getpid(), signal.SIGKILL)

    scored(run, ("size_half",), progress=killed)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_a_killed_sweep_goes_on_scores_nothing_twice_and_finds_the_stored_scores(run, monkeypatch):
    assert run_child(be_killed_in_the_second_level, run) == (-signal.SIGKILL, "")
    assert (len(_lines(run, "undisturbed")), len(_lines(run, "size_half"))) == (NUM_VIDEOS, 5)

    seen = []
    table, difference = scored(run, ("size_half", "jpeg_50"), progress=lambda *done: seen.append(done))
    assert difference == pytest.approx(0, abs=1e-6)
    assert seen[-1] == (3 * NUM_VIDEOS, 3 * NUM_VIDEOS)
    for level in ("undisturbed", "size_half", "jpeg_50"):
        files = [Path(line["path"]).stem for line in _lines(run, level)]
        assert sorted(files) == sorted(table["video_id"].unique())
    assert table["level"].unique(maintain_order=True).to_list() == ["undisturbed", "size_half", "jpeg_50"]
    assert table["failure"].null_count() == table.height
    same = table.filter(level="size_half").join(
        stored_predictions(run, (0, 1)), on=["video_id", "group_id", "label", "fold", "threshold"]
    )
    assert same.height == NUM_VIDEOS
    assert (same["score"] != same["score_right"]).any()

    # All is known: another call decodes nothing, and keeps what it was not asked for.
    monkeypatch.setattr(decoding, "run_isolated", lambda *_, **__: pytest.fail("decoded again"))
    again, _ = scored(run, ("jpeg_50",))
    assert again.equals(table)
    assert not list((Path(networks_of_run(run).config.cache_dir) / "scoring").iterdir())


def test_scores_that_are_not_the_stored_ones_stop_the_sweep(run):
    changed = stored_predictions(run, (0, 1)).with_columns(score=1 - pl.col("score"))
    with pytest.raises(DataError, match="largest difference: 0"):
        scored(run, (), changed)


def test_a_file_of_the_run_gets_its_stored_score_from_its_own_fold_unless_its_content_changed(run):
    networks, row = networks_of_run(run), read_table(run.predictions(1), PREDICTIONS).row(0, named=True)
    own = Path(networks.config.corpus) / row["label"] / f"{row['video_id']}.mp4"
    files = [FileToScore(own, (1,)), FileToScore(own, (1,), content_sha256="0" * 64)]
    again, refused = sorted(score_files(networks, files, workers=1), key=lambda each: each.position)
    assert probabilities([again.logits[1]], networks.folds[1].temperature)[0] == pytest.approx(row["score"], abs=1e-6)
    assert "content has changed" in refused.failure


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_a_video_that_was_damaged_is_scored_again_once_it_is_restored(run):
    row = read_table(run.predictions(1), PREDICTIONS).row(0, named=True)
    video = Path(networks_of_run(run).config.corpus) / row["label"] / f"{row['video_id']}.mp4"
    content = video.read_bytes()
    video.write_bytes(content[:-1])
    with pytest.raises(DataError, match="content has changed"):
        scored(run, ())
    video.write_bytes(content)
    assert scored(run, ())[1] == pytest.approx(0, abs=1e-6)


def test_runs_without_networks_are_refused(run, tmp_path):
    other = RunPaths(tmp_path / "run_1")
    for text, words in ((run.params_yaml.read_text(), "fold 0 is not finished"), ("task: image\n", "is of task image")):
        other.root.mkdir(exist_ok=True)
        other.params_yaml.write_text(text)
        with pytest.raises(UsageError, match=words):
            networks_of_run(other)


def test_levels_are_named_by_recipe_or_kind():
    every = levels_named()
    assert "canonical" not in every
    assert levels_named(["jpeg"]) == ("jpeg_90", "jpeg_70", "jpeg_50")
    assert levels_named(["trim_back", "size_half", "size"]) == ("size_half", "size_quarter", "trim_back")
    assert set(level_facts()["level"]) >= set(every)
    with pytest.raises(UsageError, match="got 'jpg'"):
        levels_named(["jpg"])
