"""The promise behind every number, on the whole sample corpus: real labels are learned, shuffled ones are not, and maps
of where a video is called fake point at what was changed.

Three full runs of some three minutes each, so not part of ``make test``: ``make honesty``.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fvc_lib.analysis.read.headline import run_headline
from fvc_lib.corpus.samples.footage import generator_for
from fvc_lib.corpus.samples.videos import plan_events, region_masks
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tables import FOLDS, INDEX, RESULTS, read_table
from fvc_lib.tasks.video.predicting import networks_of_run
from fvc_lib.tasks.video.verdicts.evidence import occlusion_map
from fvc_lib.video.decode.clip import decode_clip

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("honesty")


def run_demo(folder: Path, *options: str) -> RunPaths:
    places = {"FVC_RUNS_DIR": "runs", "FVC_DATA_DIR": "data", "FVC_CACHE_DIR": "cache"}
    subprocess.run(
        [sys.executable, str(ROOT / "run_notebooks.py"), "--params", str(ROOT / "params" / "demo.yaml"), *options],
        env={**os.environ, **{name: str(folder / place) for name, place in places.items()}},
        check=True,
    )
    return list_runs(folder / "runs")[-1]


@pytest.fixture(scope="module")
def learned(folder: Path) -> RunPaths:
    return run_demo(folder)


def auc(run: RunPaths, source: str) -> dict[str, float]:
    rows = read_table(run.results, RESULTS).filter(
        (pl.col("source") == source) & (pl.col("scope") == "all") & (pl.col("metric") == "roc_auc")
    )
    return rows.row(0, named=True)


def test_real_labels_are_learned_and_no_control_comes_near(learned):
    run = learned
    assert run_headline(run).verdict.standing == "above control"
    # It was 0.8 before intervals over few groups became wider: .975 [.793, .997] on one machine.
    assert auc(run, "model")["low"] > 0.75
    for control in ("metadata_only", "length_only", "shuffled_labels", "constant", "group_lookup_by_group"):
        interval = auc(run, control)
        assert interval["low"] <= 0.5 <= interval["high"], control
    assert auc(run, "group_lookup_by_row")["value"] > 0.9  # what a split by row would have claimed


def test_shuffled_labels_score_chance(folder):
    run = run_demo(folder, "-p", "shuffle_labels", "true", "-p", "shuffled_label_control", "false")
    interval = auc(run, "model")
    assert interval["low"] <= 0.5 <= interval["high"]
    assert run_headline(run).verdict.standing == "not above control"


def maps_of_planted_changes(run: RunPaths, corpus: Path) -> pl.DataFrame:
    """Return one row per map of a fake with a changed region, made by the network that had not seen it.

    Columns: ``shown``; ``hit``, the share of the highest tile that lies in the region; ``inside``, the share of the
    map's sum that lies in the region (the energy-based pointing game of Wang et al., "Score-CAM", CVPR workshops 2020:
    readers see the values as opacity). By chance both are ``share``, the region's share of the picture.
    ``iou`` compares the region with the highest part of the map of equal size; ``chance_iou`` is its value by chance.
    """
    networks = networks_of_run(run)
    frames, side = networks.config.num_frames, networks.config.fixed_size
    regions = {
        event.clips[0].path: event.name
        for event in plan_events()
        if event.manipulation in ("region_splice", "local_resynthesis")
    }
    videos = read_table(run.index, INDEX).join(read_table(run.folds, FOLDS).select("video_id", "fold"), on="video_id")
    videos = (
        videos.filter(pl.col("path").is_in(list(regions)))
        .sort("path")
        .unique("group_id", keep="first", maintain_order=True)
    )
    rows = []
    for path, fold in videos.select("path", "fold").iter_rows():
        decoded = decode_clip(corpus / path, frames, side)
        box = decoded.content
        picture = np.s_[..., box.top : box.top + box.height, box.left : box.left + box.width]
        changed = np.stack(region_masks(generator_for("forger", regions[path]), frames, box.height, box.width))
        found = occlusion_map(networks, [fold], decoded.frames[None], picture)
        if found.values is not None:
            values, share = found.values, changed.mean()
            highest = values == values.max()
            marked = values >= max(np.sort(values.ravel())[-int(changed.sum())], 1e-9)
            rows.append(
                {
                    "shown": not found.why_hidden,
                    "hit": (highest & changed).sum() / highest.sum(),
                    "inside": float((values * changed).sum() / values.sum()),
                    "share": share,
                    "iou": (marked & changed).sum() / (marked | changed).sum(),
                    "chance_iou": share * marked.mean() / (share + marked.mean() - share * marked.mean()),
                }
            )
    return pl.DataFrame(rows)


@pytest.mark.parametrize("model", ["frame_cnn", "r2plus1d_small"])
def test_maps_that_pass_their_checks_point_at_the_region_that_was_changed(model, folder, request):
    own = ("-p", "model", model, "-p", "epochs", "24", "-p", "shuffled_label_control", "false")
    run = request.getfixturevalue("learned") if model == "frame_cnn" else run_demo(folder, *own)
    found = maps_of_planted_changes(run, folder / "data" / "sample_corpus").filter("shown")
    print(found.height, found.select(pl.col("hit", "inside", "share", "iou", "chance_iou").mean()))
    assert found.height >= 2
    assert found["hit"].mean() > 2 * found["share"].mean()
    assert found["inside"].mean() > 1.8 * found["share"].mean()
    assert found["iou"].mean() > 1.8 * found["chance_iou"].mean()
