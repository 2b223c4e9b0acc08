"""A corpus whose file names, groups and platforms are script, markup and SQL, through all stages to all pages."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fvc_lib.execution.run.status import read_status
from fvc_lib.services import tables
from fvc_lib.services.run_paths import list_runs
from fvc_lib.services.tables import read_table
from tests.browser.conftest import OpenFile
from tests.browser.offline import draw_all, flaws
from tests.browser.runs import EXPERIMENT, HOSTILE, ROOT, environment_of

NUM_VIDEOS = 16
SMALL = {
    "num_folds": 2, "fixed_size": 16, "num_frames": 2, "epochs": 1, "augmentations_per_video": 0,
    "bootstrap_replicates": 100, "inner_validation_share": 0.34, "memory_preflight": False, "near_duplicate_bits": 0,
}  # fmt: skip


def write_corpus(folder: Path, make_video: Callable[..., Path]) -> Path:
    """Videos of such names (one is no UTF-8), and a manifest that gives such words for all it may."""
    rows = []
    for number in range(NUM_VIDEOS):
        turn = [HOSTILE[(number + by) % len(HOSTILE)] for by in range(3)]
        name = f"{turn[0].replace('/', '')} {number} " + os.fsdecode(b"\xff" if number == 3 else b"") + ".mp4"
        make_video(folder / name, seed=number)
        fake = number % 2 == 1
        rows.append(
            {
                "path": name, "label": "fake" if fake else "real",
                "group": f"{turn[1]} {number // 2 % 8}", "platform": turn[2], "manipulation": turn[0] if fake else None,
            }
        )  # fmt: skip
    manifest = folder / "manifest '; DROP TABLE x; --.csv"
    with manifest.open("w", newline="", encoding="utf-8", errors="surrogateescape") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return manifest


@pytest.mark.long
@pytest.mark.fault(30, 38, 39)
def test_names_that_are_code_go_through_every_stage_and_stand_on_every_page_as_text(
    open_file: OpenFile, make_video: Callable[..., Path], tmp_path: Path
) -> None:
    manifest = write_corpus(tmp_path / "videos <img src=x onerror=alert(5)> 'q'", make_video)
    parameters = [part for name, value in SMALL.items() for part in ("-p", name, str(value))]
    done = subprocess.run(
        [sys.executable, str(ROOT / "run_notebooks.py"), "-p", "corpus", str(manifest), "--experiment", EXPERIMENT,
         *parameters],
        cwd=tmp_path, env=environment_of(tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = list_runs(tmp_path / "runs")
    assert run.experiment == EXPERIMENT
    index = read_table(run.index, tables.INDEX)
    assert index.height == NUM_VIDEOS
    assert set(HOSTILE[:3]) <= set(index["platform"])
    assert len(read_status(run).stages) == 8
    for path in (run.report_html, run.root.parent.parent / "index.html"):
        watched = open_file(path)
        draw_all(watched.page)
        assert flaws(watched.page) == [], path.name
        assert watched.trouble() == [], path.name
        assert "DROP TABLE runs; --" in watched.page.locator("body").inner_text(), path.name
