#!/usr/bin/env python3
"""What tables of 10,000 to a million rows cost each stage: CPU and wall seconds, peak memory, bytes written and shown.

Rows are made up, and nothing is decoded or trained: a manifest and files of a few bytes, what a probe might say of
them, and predictions. Three of ten videos lie in clusters of 100 to 600 copies with both labels, which their hashes
alone connect. Everything else is the real functions of the stages, each step in a process of its own, over the tables
that the steps before it wrote. Intervals take time in proportion to ``--replicates``; runs have 2,000.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.index import status_bytes
from fvc_lib.analysis.dashboard.panels import panels
from fvc_lib.analysis.figures import corpus, results as figures, roc_and_calibration as ranking
from fvc_lib.analysis.pages.report import videos_html, write_report, write_runs_index
from fvc_lib.analysis.read.queries import default_selection
from fvc_lib.analysis.read.scores import score_table, write_results
from fvc_lib.corpus import index, protocols
from fvc_lib.corpus.copies.perceptual_hash import WINDOWS, hash_text
from fvc_lib.corpus.folds import balance_table
from fvc_lib.corpus.listing import read_corpora
from fvc_lib.services.atomic_files import write_json, write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import (
    FOLDS,
    GROUP_LINKS,
    INDEX,
    LEAKAGE_AUDIT,
    PREDICTIONS,
    PROTOCOL,
    RESULTS,
    SCORES,
    SLICES,
    frame_of,
    read_table,
    write_table,
)
from fvc_lib.tasks.leakage_audit import leakage_audit
from fvc_lib.tasks.video.controls import tells_labels
from fvc_lib.tasks.video.results import kfold_results, slice_table
from fvc_lib.video.decode.probe import VideoProbe

SIZES = ((320, 240), (640, 360), (1280, 720), (1920, 1080))


def write_corpus(folder: Path, num_rows: int) -> None:
    """A manifest and its files, 500 to a folder; a file's name says which cluster it is of."""
    rng = np.random.default_rng(0)
    rows: list[tuple[object, ...]] = []
    cluster = 0
    while len(rows) < num_rows:
        is_large = rng.random() < 0.0012  # so that three of ten videos lie in large ones
        share = rng.random()
        for _ in range(rng.integers(100, 600) if is_large else 1):
            number = len(rows)
            label = "fake" if rng.random() < share else "real"
            rows.append((f"{number // 500:04d}/{cluster} {number}.mp4", label, f"platform {number % 7}"))
        cluster += 1
    del rows[num_rows:]
    for path, *_ in rows:
        file = folder / "corpus" / str(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(file.stem)
    with (folder / "corpus/list.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("path", "label", "platform"), *rows])


def described(path_text: str) -> dict[str, Any]:
    """Instead of a probe: what a video of that name might be. It runs in the worker processes."""
    cluster, number = map(int, Path(path_text).stem.split())
    codes = np.random.default_rng(cluster).integers(1, 2**64, (6, len(WINDOWS)), np.uint64)
    codes ^= np.uint64(1) << np.random.default_rng(number).integers(0, 64, codes.shape, np.uint64)
    frames = 50 + number % 997
    size = SIZES[number % len(SIZES)]
    return {
        "probe": asdict(VideoProbe("h264", "mov", "yuv420p", *size, 25.0, frames, frames / 25, 0, True, 9_000, 9e4)),
        "content_sha256": f"{number:016x}" + "0" * 48,
        "perceptual_hash": hash_text(codes),
    }


def predicted(folds: pl.DataFrame) -> pl.DataFrame:
    """PREDICTIONS of a model that is right of three in four."""
    logits = np.random.default_rng(1).normal(np.where(folds["label"] == "fake", 0.7, -0.7), 1.0)
    drawn = folds.with_columns(score=1 / (1 + np.exp(-logits)), threshold=0.5, logit=logits, temperature=1.0)
    return frame_of({name: drawn[name] if name in drawn.columns else None for name in PREDICTIONS.columns}, PREDICTIONS)


class Steps:
    """What is measured, in this order; each gives the bytes that it shows, and 0 where it only writes tables."""

    def __init__(self, folder: Path, replicates: int) -> None:
        self.folder = folder
        self.run = RunPaths(folder / "runs/scale/run_20250101_000000_00000000")
        config = RunConfig(experiment="scale", model="frame_cnn")
        self.config = config.model_copy(update={"bootstrap_replicates": replicates})  # also fewer than a run may have
        if not self.run.run_json.is_file():
            write_json(self.run.run_json, {"run_id": self.run.run_id})
            write_text(self.run.params_yaml, config.to_yaml())

    def list_manifest(self) -> int:
        read_corpora([self.folder / "corpus/list.csv"], self.folder / "work")
        return 0

    def _index(self, bits: int) -> int:
        index.VIDEO_FILES = replace(index.VIDEO_FILES, function="benchmarks.scale:described")
        update = {"cache_dir": str(self.folder), "near_duplicate_bits": bits, "max_rejected_share": 0.5, "workers": 2}
        config = self.config.model_copy(update=update)
        index.build_index(self.folder / "corpus/list.csv", config, self.run.index.parent)
        return 0

    def index_new_files(self) -> int:
        return self._index(0)

    def index_again(self) -> int:
        return self._index(0)

    def index_again_with_near_duplicates(self) -> int:
        return self._index(10)

    def figures_of_the_index(self) -> int:
        index, links = self._index_without_hashes(), read_table(self.run.group_links, GROUP_LINKS)
        return sum(len(each.to_json()) for each in (corpus.group_sizes_figure(index), corpus.group_links_figure(links)))

    def folds_and_protocol(self) -> int:
        index = self._index_without_hashes()
        table = protocols.make_protocol(index, self.config, tells_labels(self.config))
        folds = protocols.folds_tested(table)
        write_table(table, PROTOCOL, self.run.protocol)
        write_table(folds, FOLDS, self.run.folds)
        balance_table(folds)
        protocols.parts_table(table, self.config)
        predictions = predicted(folds)
        for fold in range(self.config.num_folds):
            write_table(predictions.filter(fold=fold), PREDICTIONS, self.run.predictions(fold))
        return 0

    def _index_without_hashes(self) -> pl.DataFrame:
        return read_table(self.run.index, INDEX, without=["perceptual_hash"])

    def _tables(self) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
        parts = [read_table(self.run.predictions(fold), PREDICTIONS) for fold in range(self.config.num_folds)]
        return self._index_without_hashes(), read_table(self.run.folds, FOLDS), pl.concat(parts)

    def results_and_controls(self) -> int:
        found = kfold_results(*self._tables(), self.config)
        write_table(found, RESULTS, self.run.results)
        write_results(self.run.results_csv, found)
        return 0

    def slices(self) -> int:
        index, _, predictions = self._tables()
        write_table(slice_table(index, predictions, self.config), SLICES, self.run.slices)
        return 0

    def leakage_audit(self) -> int:
        without_hashes = self.config.model_copy(update={"near_duplicate_bits": 0})  # they are a step above
        found = leakage_audit(read_table(self.run.index, INDEX), *self._tables()[1:], without_hashes)
        write_table(found, LEAKAGE_AUDIT, self.run.leakage_audit)
        return 0

    def table_of_scores(self) -> int:
        index, _, predictions = self._tables()
        write_table(score_table(index, predictions), SCORES, self.run.scores)
        return 0

    def figures_of_the_results(self) -> int:
        predictions, replicates = self._tables()[2], self.config.bootstrap_replicates
        drawn = (
            ranking.roc_figure(predictions, replicates=replicates),
            *(
                draw(predictions, replicates=replicates)
                for draw in (ranking.calibration_figure, ranking.risk_coverage_figure)
            ),
            figures.score_distribution_figure(predictions),
            figures.slices_figure(read_table(self.run.slices, SLICES)),
        )
        return sum(len(each.to_json()) for each in drawn)

    def report_page(self) -> int:
        write_report([], self.run.report_html, title="scale", videos=videos_html(self.run))
        return self.run.report_html.stat().st_size

    def index_of_runs(self) -> int:
        return write_runs_index(self.folder / "runs").stat().st_size

    def dashboard(self) -> int:
        """All panels, whose bands have 500 replicates."""
        selection = default_selection(self.folder / "runs")
        return sum(len(json.dumps(panel.bundle(selection), default=str)) for panel in panels())


STEPS = [name for name, value in vars(Steps).items() if callable(value) and not name.startswith("_")]


def measure(step: str, folder: Path, replicates: int) -> dict[str, float]:
    """One step in this process: seconds of it and its children, its own peak over what it began with, and bytes."""
    work: Callable[[], int] = getattr(Steps(folder, replicates), step)
    Path("/proc/self/clear_refs").write_text("5")  # what the imports took is forgotten
    before, cpu, wall = status_bytes("VmRSS"), time.process_time(), time.monotonic()
    shown = work()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "cpu": time.process_time() - cpu + children.ru_utime + children.ru_stime,
        "wall": time.monotonic() - wall,
        "peak": status_bytes("VmHWM") - before,
        "shown": shown,
    }


def main() -> None:
    """Make tables, measure, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="how many")
    parser.add_argument("--replicates", type=int, default=20, help="of every bootstrap but the dashboard's (20)")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS, help="some of them; they need those before")
    parser.add_argument("--folder", type=Path, help="keep the tables there")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("forkserver")  # which has imported what each of its children needs
    context.set_forkserver_preload([name for name in sys.modules if name.startswith(("fvc_lib.", "benchmarks.index"))])
    print("| step | rows | CPU s | over a tenth of the rows | wall s | peak memory | a row | shown |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    before: dict[str, tuple[int, float]] = {}
    with tempfile.TemporaryDirectory(prefix="fvc-scale-") as temporary:
        for rows in arguments.rows:
            folder = (arguments.folder or Path(temporary)) / str(rows)
            if not folder.is_dir():
                write_corpus(folder, rows)
            for step in arguments.steps:
                with ProcessPoolExecutor(1, context) as pool:
                    found = pool.submit(measure, step, folder, arguments.replicates).result()
                earlier, spent = before.get(step, (0, 0.0))
                ratio = f"{found['cpu'] / spent:.1f}" if earlier * 10 == rows and spent else ""
                before[step] = rows, found["cpu"]
                size = f"{found['shown'] / 1e6:.1f} MB" if found["shown"] else ""
                print(
                    f"| {step.replace('_', ' ')} | {rows:,} | {found['cpu']:.1f} | {ratio} | {found['wall']:.0f} | "
                    f"{found['peak'] / 2**20:,.0f} MiB | {found['peak'] / rows / 1024:.1f} KiB | {size} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
