"""The promise behind every number, on the whole sample corpus: real labels are learned, shuffled ones are not.

Two full runs of some three minutes each, so not part of ``make test``: ``make honesty``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from fvc_lib.analysis.read.headline import run_headline
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tables import RESULTS, read_table

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


def auc(run: RunPaths, source: str) -> dict[str, float]:
    rows = read_table(run.results, RESULTS).filter(
        (pl.col("source") == source) & (pl.col("scope") == "all") & (pl.col("metric") == "roc_auc")
    )
    return rows.row(0, named=True)


def test_real_labels_are_learned_and_no_control_comes_near(folder):
    run = run_demo(folder)
    assert run_headline(run).verdict.standing == "above control"
    assert auc(run, "model")["low"] > 0.8
    for control in ("metadata_only", "length_only", "shuffled_labels", "constant", "group_lookup_by_group"):
        interval = auc(run, control)
        assert interval["low"] <= 0.5 <= interval["high"], control
    assert auc(run, "group_lookup_by_row")["value"] > 0.9  # what a split by row would have claimed


def test_shuffled_labels_score_chance(folder):
    run = run_demo(folder, "-p", "shuffle_labels", "true", "-p", "shuffled_label_control", "false")
    interval = auc(run, "model")
    assert interval["low"] <= 0.5 <= interval["high"]
    assert run_headline(run).verdict.standing == "not above control"
