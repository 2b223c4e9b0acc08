"""Runs for the browser to look at: real records of real notebooks, under names that would like to be more than text."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import polars as pl

from fvc_lib.analysis.pages.report import write_run_report, write_runs_index
from fvc_lib.execution.run.record import begin_run
from fvc_lib.services import tables
from fvc_lib.services.atomic_files import path_to_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.records.digests import write_document
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import read_table, write_table
from fvc_lib.tasks.video.calibration import RecordedSelection, Selection, record_selection
from tests.analysis.conftest import write_run
from tests.browser.chromium import SENTINEL

ROOT = Path(__file__).parents[2]
SCRIPT = f"<script>window.{SENTINEL}='script';alert(1)</script>"
IMAGE = f"<img src=x onerror=\"window.{SENTINEL}='image';alert(2)\">"
SQL = "'; DROP TABLE runs; --"
BRACKETS = "a\nb\t\"q\" 'p' {x} [y](javascript:alert(3)) $z$ `k` %(s)s &lt; \\n"
LINK = f"<a href=\"javascript:window.{SENTINEL}='link'\">click</a>"
HOSTILE = (SCRIPT, IMAGE, SQL, BRACKETS, LINK)
EXPERIMENT = f'{IMAGE} {SQL} "quoted"\n[b] & <i>'.replace("/", "")
RUN = "run_20250304_101500_<svg onload=alert(4)>'\"; --"
FOREIGN = os.fsdecode(b"'caf\xe9 \xff' <b>")  # no UTF-8; sorts before the other, whose run of the same id is the newest


class Runs(NamedTuple):
    """A runs folder.

    Attributes:
        folder: The folder of all runs.
        shown: The run that the runner made pages of, newest of its experiment; another one has no record.
        copied: A copy of ``shown`` in an experiment whose name is no UTF-8.
    """

    folder: Path
    shown: RunPaths
    copied: RunPaths


def environment_of(folder: Path) -> dict[str, str]:
    """Return variables that keep FVC's folders in ``folder`` and give kernels the code of this checkout."""
    places = {f"FVC_{name.upper()}_DIR": str(folder / name) for name in ("runs", "cache", "data")}
    return {**os.environ, **places, "PYTHONPATH": str(ROOT), "USE_MLOPS_PIPELINE": "false", "OMP_NUM_THREADS": "1"}


def make_runs(folder: Path) -> Runs:
    """Write two runs through the services; the real runner makes the results, record and pages of one."""
    write_run(folder / "runs", EXPERIMENT, "run_20250301_080000_plain", seed=1, skill=0.4)
    shown = write_run(folder / "runs", EXPERIMENT, RUN)
    # The record and parameters of a run that was begun with such names on the command line.
    config = RunConfig(
        experiment=shown.experiment, runs_dir=str(folder / "begun"), corpus=f"/videos/{SCRIPT}/{IMAGE}/{BRACKETS}",
        bootstrap_replicates=200, model="frame_cnn",
    )  # fmt: skip
    begun = begin_run(config, command=f"python run_notebooks.py --experiment '{SCRIPT}' {IMAGE} {SQL}")
    record = json.loads(begun.run_json.read_text())
    write_document(shown.run_json, {**record, "run_id": path_to_text(shown.run_id)})
    shutil.copyfile(begun.params_yaml, shown.params_yaml)
    # Paths, platforms, codecs, manipulations and group links that are code, in turn.
    index = read_table(shown.index, tables.INDEX)
    names = pl.Series("names", HOSTILE)

    def turn(by: int) -> pl.Expr:
        return pl.lit(names).gather((pl.int_range(pl.len()) + by) % len(HOSTILE))

    path = pl.concat_str(pl.lit("clips/"), turn(0), pl.lit(" \\xff "), pl.int_range(pl.len()).cast(pl.String))
    hostile = index.with_columns(
        path=path, platform=turn(0), codec=turn(2), manipulation=pl.when(pl.col("label") == "fake").then(turn(1))
    )
    write_table(hostile, tables.INDEX, shown.index)
    links = [
        {"group_id": index["group_id"][number], "why": "same_source", "evidence": name, "first": name, "second": SQL}
        for number, name in enumerate(HOSTILE)
    ]
    write_table(pl.DataFrame(links), tables.GROUP_LINKS, shown.group_links)
    for fold in range(5):  # the choices of each fold's training, which the audit wants
        judged = read_table(shown.predictions(fold), tables.PREDICTIONS)
        fake = int((judged["label"] == "fake").sum())
        chosen = Selection(
            num_epochs=10, best_epoch=10, validation_loss=0.42, prior_logit=0.0, temperature=judged["temperature"][0],
            log_loss=0.4, log_loss_uncalibrated=0.41, threshold=judged["threshold"][0], balanced_accuracy=0.8,
            num_videos=judged.height, num_groups=judged["group_id"].n_unique(), num_real=judged.height - fake,
            num_fake=fake, fewest_groups=9,
        )  # fmt: skip
        shown.fold_checkpoints(fold).mkdir(parents=True)
        record_selection(shown.fold_checkpoints(fold), RecordedSelection(chosen, clips="00", weights="00"))
    done = subprocess.run(
        [sys.executable, str(ROOT / "run_notebooks.py"), "--resume", str(shown.root), "--only", "05"],
        cwd=folder, env=environment_of(folder), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    copied = RunPaths(folder / "runs" / FOREIGN / RUN)
    shutil.copytree(shown.root, copied.root)
    write_run_report(copied)
    write_runs_index(folder / "runs")
    return Runs(folder / "runs", shown, copied)
