#!/usr/bin/env python3
"""What a question to many runs costs beside polars, pandas and MLflow: CPU seconds and memory for the same answer.

A million metric lines, written by the project's own writer into the logs of 40 runs of 5 folds, and two questions: all
curves (every line, the last attempt's where a step was repeated, in step order) and the lowest training loss of each
run. Each reader is a process of its own that asks both questions several times; its CPU time is that of all its threads
and without the imports, the least of the repetitions; its memory is the peak above what it held before. Readers take
turns. MLflow gets some of the same runs in its sqlite store, since a million values take it minutes to store; its time
is shown as measured and per million lines. The exit code is 1 when FVC takes more than 1.5 s, or when answers
differ.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fvc_lib.services.atomic_files import write_json
from fvc_lib.services.memory import peak_rss_bytes
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.stage_logs import MetricLog

METRICS = ("loss", "learning_rate", "gradient_norm", "samples_per_second", "data_seconds")
TARGET_SECONDS = {"fvc, logs": 1.5}
_KEY = ["run", "fold", "phase", "metric", "step"]


@dataclass(frozen=True)
class Shape:
    """How many runs, and how often each reader asks."""

    num_runs: int = 40
    num_folds: int = 5
    num_steps: int = 1000
    mlflow_runs: int = 2
    repetitions: int = 4
    rounds: int = 3

    @property
    def num_lines(self) -> int:
        """Lines of all logs together."""
        return self.num_runs * self.num_folds * self.num_steps * len(METRICS)


QUICK = Shape(num_runs=4, num_folds=2, num_steps=60, mlflow_runs=1, repetitions=1, rounds=1)


@dataclass(frozen=True)
class Result:
    """One reader's figures; ``answer`` is what tells whether two readers gave the same."""

    curves_seconds: float
    best_seconds: float
    peak_bytes: int
    num_lines: int
    answer: tuple[float, ...]


def write_runs(folder: Path, shape: Shape) -> None:
    """The runs' logs, a twentieth of each fold's steps logged again by a second attempt."""
    generator = np.random.default_rng(0)
    for number in range(shape.num_runs):
        run = RunPaths(folder / "benchmark" / f"run_20250101_{number:06d}_abcdef01")
        for fold in range(shape.num_folds):
            values = generator.normal(size=(shape.num_steps, len(METRICS)))
            begun_again = shape.num_steps - shape.num_steps // 20
            for attempt, steps in (
                (1, range(begun_again)),
                (2, range(begun_again - shape.num_steps // 20, begun_again)),
            ):
                _log(run, fold, attempt, steps, values)
            _log(run, fold, 2, range(begun_again, shape.num_steps), values)
        write_json(run.run_json, {"run_id": run.run_id})
        write_json(run.status_json, {"state": "done", "stages": {}})


def _log(run: RunPaths, fold: int, attempt: int, steps: range, values: np.ndarray[Any, Any]) -> None:
    path = run.metrics("04_fold_training", fold)
    with MetricLog(path, run_id=run.run_id, fold=fold, attempt=attempt) as log:
        for step in steps:
            row = dict(zip(METRICS, map(float, values[step]), strict=True))
            log.log(step=step, epoch=step // 100, phase="train", metrics=row)


Questions = tuple[Callable[[], Any], Callable[[], Any], Callable[[Any, Any], tuple[float, ...]]]


def _fvc(folder: Path) -> Questions:
    from fvc_lib.analysis.read.queries import learning_curves

    runs = list_runs(folder)
    return (
        lambda: learning_curves(runs).frame,
        lambda: learning_curves(runs, metrics=["loss"]).frame.group_by("run_id").min(),
        lambda curves, best: (curves.height, float(curves["value"].sum()), float(best["value"].sum())),
    )


def _polars(folder: Path) -> Questions:
    import polars as pl

    paths = sorted(folder.glob("*/*/metrics/*.jsonl"))
    schema = {
        "ts": pl.Float64, "step": pl.Int64, "epoch": pl.Int64, "phase": pl.String, "metric": pl.String,
        "value": pl.Float64, "flag": pl.String, "fold": pl.Int64, "attempt": pl.Int64, "run_id": pl.String,
    }  # fmt: skip

    def curves() -> pl.DataFrame:
        lines = pl.scan_ndjson(paths, schema=schema).rename({"run_id": "run"})
        return lines.sort(*_KEY, "attempt").unique(_KEY, keep="last", maintain_order=True).collect()

    return (
        curves,
        lambda: curves().filter(pl.col("metric") == "loss").group_by("run").agg(pl.col("value").min()),
        lambda found, best: (found.height, float(found["value"].sum()), float(best["value"].sum())),
    )


def _pandas(folder: Path) -> Questions:
    import pandas

    paths = sorted(folder.glob("*/*/metrics/*.jsonl"))

    def curves() -> Any:
        lines = pandas.concat([pandas.read_json(path, lines=True, dtype=False) for path in paths])
        lines = lines.rename(columns={"run_id": "run"}).sort_values([*_KEY, "attempt"], kind="stable")
        return lines.drop_duplicates(_KEY, keep="last")

    return (
        curves,
        lambda: curves().query("metric == 'loss'").groupby("run")["value"].min(),
        lambda found, best: (len(found), float(found["value"].sum()), float(best.sum())),
    )


def fill_mlflow(folder: Path, shape: Shape) -> None:
    """Some of the runs as MLflow runs, one for each fold, in batches."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    from fvc_lib.analysis.read.queries import learning_curves

    client = MlflowClient(_store(folder))
    experiment = client.create_experiment("benchmark", artifact_location=str(folder / "artifacts"))
    for run in list_runs(folder)[: shape.mlflow_runs]:
        for (fold,), rows in learning_curves([run]).frame.group_by("fold", maintain_order=True):
            made = client.create_run(experiment, tags={"run": run.run_id, "fold": str(fold)}).info.run_id
            points = [
                Metric(row["metric"], row["value"], int(1000 * row["ts"]), row["step"])
                for row in rows.iter_rows(named=True)
            ]
            for start in range(0, len(points), 1000):
                client.log_batch(made, metrics=points[start : start + 1000])


def _mlflow(folder: Path) -> Questions:
    from mlflow import MlflowClient

    client = MlflowClient(_store(folder))
    experiment = client.get_experiment_by_name("benchmark").experiment_id

    def histories(metrics: Sequence[str]) -> list[tuple[str, float]]:
        return [
            (run.data.tags["run"], point.value)
            for run in client.search_runs([experiment])
            for metric in metrics
            for point in client.get_metric_history(run.info.run_id, metric)
        ]

    def best() -> dict[str, float]:
        lowest: dict[str, float] = {}
        for run, value in histories(["loss"]):
            lowest[run] = min(value, lowest.get(run, value))
        return lowest

    return (
        lambda: histories(METRICS),
        best,
        lambda found, best: (len(found), sum(value for _, value in found), sum(best.values())),
    )


def _store(folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"


READERS: dict[str, Callable[[Path], Questions]] = {
    "fvc, logs": _fvc,
    "polars, scan_ndjson": _polars,
    "pandas, read_json": _pandas,
    "mlflow, sqlite": _mlflow,
}


def measure(name: str, folder: Path, repetitions: int) -> Result:
    """Ask both questions in this process."""
    curves, best, answer_of = READERS[name](folder)
    before = _held_bytes()
    found_curves, curves_seconds = _least(curves, repetitions)
    found_best, best_seconds = _least(best, repetitions)
    peak = peak_rss_bytes() - before
    answer = answer_of(found_curves, found_best)
    return Result(curves_seconds, best_seconds, peak, int(answer[0]), tuple(round(number, 6) for number in answer))


def _held_bytes() -> int:
    """What this process holds, from where on its peak is counted again."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_rss_bytes()


def _least(question: Callable[[], Any], repetitions: int) -> tuple[Any, float]:
    found, least = None, float("inf")
    for _ in range(repetitions):
        del found
        before = _cpu_seconds()
        found = question()
        least = min(least, _cpu_seconds() - before)
    return found, least


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _in_a_process(name: str, folder: Path, repetitions: int) -> Result:
    command = [sys.executable, __file__, "--case", json.dumps([name, str(folder), repetitions])]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    fields = json.loads(done.stdout.splitlines()[-1])
    return Result(**{**fields, "answer": tuple(fields["answer"])})


def least_of(results: Sequence[Result]) -> Result:
    """The least CPU time and the median peak of several turns."""
    peaks = sorted(result.peak_bytes for result in results)
    return Result(
        min(result.curves_seconds for result in results),
        min(result.best_seconds for result in results),
        peaks[len(peaks) // 2],
        results[0].num_lines,
        results[0].answer,
    )


def run(shape: Shape, folder: Path) -> dict[str, Result]:
    """Write the data, then let the readers take turns."""
    write_runs(folder, shape)
    fill_mlflow(folder, shape)
    turns: dict[str, list[Result]] = {name: [] for name in READERS}
    for _ in range(shape.rounds):
        for name, results in turns.items():
            results.append(_in_a_process(name, folder, shape.repetitions))
    return {name: least_of(results) for name, results in turns.items()}


def table_lines(results: dict[str, Result]) -> list[str]:
    """The figures as text; ratios are of the CPU time per line, to FVC's from the logs."""
    base = results["fvc, logs"]
    lines = [f"{'reader':20s} {'rows':>9s} {'curves':>9s} {'ratio':>7s} {'best':>9s} {'ratio':>7s} {'peak':>8s}"]
    for name, result in results.items():
        share = result.num_lines / base.num_lines
        lines.append(
            f"{name:20s} {result.num_lines:9,d} {result.curves_seconds:7.3f} s "
            f"{result.curves_seconds / share / base.curves_seconds:6.2f}x {result.best_seconds:7.3f} s "
            f"{result.best_seconds / share / base.best_seconds:6.2f}x {result.peak_bytes / 1e6:5.0f} MB"
        )
    return lines


def problems(results: dict[str, Result], *, judge_time: bool) -> list[str]:
    """What is not as it should be, in words."""
    base = results["fvc, logs"]
    whole = {name: result for name, result in results.items() if result.num_lines == base.num_lines}
    found = [
        f"{name} answers {result.answer}, fvc {base.answer}"
        for name, result in whole.items()
        if not np.allclose(result.answer, base.answer)
    ]
    if judge_time:
        found += [
            f"{name} took {max(results[name].curves_seconds, results[name].best_seconds):.3f} s, allowed {target} s"
            for name, target in TARGET_SECONDS.items()
            if max(results[name].curves_seconds, results[name].best_seconds) > target
        ]
    return found


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few thousand lines: does it run at all?")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        name, folder, repetitions = json.loads(given.case)
        print(json.dumps(asdict(measure(name, Path(folder), repetitions))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        results = run(QUICK if given.quick else Shape(), Path(folder))
    print("\n".join(table_lines(results)))
    found = problems(results, judge_time=not given.quick)
    print("\n".join(found) or "every reader that read all lines gave the same answer")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
