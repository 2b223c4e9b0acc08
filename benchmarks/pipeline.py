"""What our pipeline takes around the cells of ten trivial notebooks, against bare papermill on the same notebooks.

Both run in this process, in turns, each notebook in a kernel of its own: papermill as ``papermill.execute_notebook``,
ours as the whole ``Runner`` on a run (plan, locks, watch, records, ``status.json``, fingerprints). Processor time
counts this process and the kernels; wall time counts waiting too. What is done once per command, beginning the run
(``run.json`` with the versions of everything) and importing either, is shown by itself.

    python benchmarks/pipeline.py [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
import papermill

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fvc_lib.execution.plan import make_plan
from fvc_lib.execution.run.record import begin_run
from fvc_lib.execution.run.runner import Runner, Terminal
from fvc_lib.execution.stages import Notebook, read_notebook
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.tasks import Stage

NUM_NOTEBOOKS = 10
CELLS = ("x = seed + 1", "print('x is', x)", "[x] * 3", "assert x == 8")

Seconds = tuple[float, float]  # processor, wall


def write_notebooks(folder: Path) -> list[Path]:
    """Ten notebooks of a parameters cell and four cells that cost nothing."""
    parameters = nbformat.v4.new_code_cell('run_dir: str = ""\nseed: int = 0', metadata={"tags": ["parameters"]})
    paths = []
    for number in range(NUM_NOTEBOOKS):
        cells = [parameters, *map(nbformat.v4.new_code_cell, CELLS)]
        notebook = nbformat.v4.new_notebook(cells=cells)
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        paths.append(folder / f"{number:02d}_trivial.ipynb")
        paths[-1].write_text(nbformat.writes(notebook))
    return paths


def bare(paths: list[Path], folder: Path) -> None:
    """papermill alone, one notebook after the other."""
    for path in paths:
        parameters = {"run_dir": str(folder), "seed": 7}
        papermill.execute_notebook(str(path), str(folder / path.name), parameters, progress_bar=False)


def ours(notebooks: dict[str, Notebook], folder: Path) -> Seconds:
    """The whole runner, one notebook after the other; returns what beginning the run took before that."""
    stages = tuple(Stage(name, (), lambda run, fold: (), lambda run, fold: ()) for name in notebooks)
    config = resolve_config({"runs_dir": str(folder / "runs"), "seed": 7}, environ={})
    before = clocks()
    run = begin_run(config, command="benchmark")
    beginning = since(before)
    shown = io.StringIO()
    runner = Runner(run, config, notebooks, Terminal(shown))
    if runner.execute(lambda: make_plan(notebooks, config, run, stages=stages)):
        raise SystemExit(shown.getvalue())
    return beginning


def clocks() -> Seconds:
    """Processor seconds of this process and of its children that have ended, and wall seconds."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages), time.perf_counter()


def since(before: Seconds) -> Seconds:
    now = clocks()
    return now[0] - before[0], now[1] - before[1]


def measured(work: Callable[[], Seconds | None]) -> tuple[Seconds, Seconds]:
    """What ``work`` took without its beginning, and the beginning."""
    before = clocks()
    beginning = work() or (0.0, 0.0)
    total = since(before)
    return (total[0] - beginning[0], total[1] - beginning[1]), beginning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every reading to this file")
    options = parser.parse_args()
    logging.getLogger("papermill").setLevel(logging.ERROR)
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    readings: dict[str, list[Seconds]] = {"papermill": [], "ours": [], "begin_run": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        paths = write_notebooks(folder)
        notebooks = {path.stem: read_notebook(path) for path in paths}
        for number in range(options.rounds + 1):
            place = folder / f"round_{number}"
            (place / "bare").mkdir(parents=True)
            theirs, _ = measured(lambda place=place: bare(paths, place / "bare"))
            own, beginning = measured(lambda place=place: ours(notebooks, place))
            if number:  # the first fills caches
                for name, value in (("papermill", theirs), ("ours", own), ("begin_run", beginning)):
                    readings[name].append(value)
    report(readings)
    if options.json:
        options.json.write_text(json.dumps(readings, indent=1) + "\n")


def report(readings: dict[str, list[Seconds]]) -> None:
    rounds = len(readings["ours"])
    print(f"{NUM_NOTEBOOKS} trivial notebooks, {rounds} rounds in turns; seconds: median (least)")
    for position, what in enumerate(("processor", "wall")):
        columns = {name: [value[position] for value in values] for name, values in readings.items()}
        ratios = [own / theirs for own, theirs in zip(columns["ours"], columns["papermill"], strict=True)]
        parts = [f"{name} {statistics.median(times):.3f} ({min(times):.3f})" for name, times in columns.items()]
        least = min(columns["ours"]) / min(columns["papermill"])
        print(
            f"{what:<10} {', '.join(parts)}; ours/papermill {statistics.median(ratios):.2f} (least/least {least:.2f})"
        )


if __name__ == "__main__":
    main()
