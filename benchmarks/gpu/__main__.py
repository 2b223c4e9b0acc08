"""``make bench-gpu``: how busy a GPU is kept, and what the engine costs there over a bare loop with mixed precision.

Needs torch and numpy alone (``make bench-gpu PYTHON=python3``) and generates its clips, which lie in files of the clip
store's form and are read by as many loader processes as there are cores. The networks have the layers of the published
ones, with random weights: speed does not depend on what they are. Prints what it ran on.

Every figure is printed, and written to --out, as soon as it is there: what is killed keeps what it has. What there is
no time for (--minutes) is named at the end, with the command that measures it.

Parts (--only), in this order:

  busy           share of wall time with a kernel active over --steps steps after the warm-up, from torch's profiler;
                 the target is 85 %
  loading        clips a second that the loader processes alone give
  engine         clips a second beside the bare loop's, in turns; the target is 0.95
  preflight      the predicted peak of memory beside the measured one; the target is 25 %
  stem           milliseconds and memory of the forensic stem, by how many clips it takes at once
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.measures import MEASURES, Figure, order
from benchmarks.gpu.networks import NETWORKS
from benchmarks.gpu.trainings import Case, Clock
from fvc_lib.engine.device import resolve_device
from fvc_lib.services.atomic_files import write_json
from fvc_lib.services.errors import UsageError
from fvc_lib.services.isolated_workers import available_cores
from tests.gpu.promises import machine


class Record:
    """Figures on the screen and in a file, each at once."""

    def __init__(self, path: Path | None, about: dict[str, Any]) -> None:
        self._path, self._document = path, {**about, "complete": False, "figures": []}

    def add(self, part: str, network: str, figure: Figure) -> None:
        """Say it and keep it."""
        print(" ".join(filter(None, [network, f"{part}:", figure.line])), flush=True)
        one = {"part": part, "network": network, "what": figure.what, "line": figure.line, "values": figure.values}
        self._document["figures"].append(one)
        self._write()

    def finish(self) -> str:
        """The table for docs/measurements.md."""
        self._document["complete"] = True
        self._write()
        return table(self._document)

    def _write(self) -> None:
        if self._path is not None:
            write_json(self._path, self._document)


def table(document: dict[str, Any]) -> str:
    """The figures of a file as Markdown, under what they were measured on."""
    cells = [[each[name].replace("|", "/") for name in ("network", "part", "line")] for each in document["figures"]]
    rows = [f"| {' | '.join(row)} |" for row in cells]
    cut = [] if document["complete"] else ["", "Ended before all was measured."]
    head = [f"{document['machine']}; {document['what']}.", "", "| network | part | found |", "|---|---|---|"]
    return "\n".join([*head, *rows, *cut])


def read_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="make bench-gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", help="cuda, mps or cpu; auto: a GPU, or nothing is measured")
    parser.add_argument("--only", nargs="+", choices=tuple(MEASURES), default=tuple(MEASURES), metavar="PART",
                        help="parts to measure (default: all)")  # fmt: skip
    parser.add_argument("--networks", nargs="+", choices=tuple(NETWORKS), default=tuple(NETWORKS))
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing that ends later (default: 9)")
    parser.add_argument("--steps", type=int, default=200, help="of the part busy (default: 200)")
    parser.add_argument("--short-steps", type=int, default=40, help="of every other training (default: 40)")
    parser.add_argument("--warmup", type=int, default=20, help="steps before them (default: 20)")
    parser.add_argument("--rounds", type=int, default=3, help="of engine and bare loop (default: 3)")
    parser.add_argument("--batch", type=int, default=16, help="clips (default: 16)")
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--workers", type=int, default=available_cores(), help="loader processes (default: cores)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="figures as JSON; in a folder: bench-gpu.json")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="print the table of such a file, and measure nothing"
    )
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Measure, part by part, and print."""
    asked = read_arguments(words)
    if asked.table:
        print(table(json.loads(asked.table.read_text(encoding="utf-8"))))
        return 0
    clock = Clock(time.monotonic() + 60 * asked.minutes)
    if asked.device == "auto" and resolve_device().device.type == "cpu":
        print(f"skipped: torch {torch.__version__} finds no GPU on this machine")
        return 0
    try:
        compute = resolve_device(asked.device)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    out = asked.out / "bench-gpu.json" if asked.out and asked.out.is_dir() else asked.out
    what = (
        f"{asked.batch} clips of {asked.frames} x {asked.side} px a step, {asked.workers} loader processes, "
        f"{asked.steps} (busy) and {asked.short_steps} steps after {asked.warmup}"
    )
    about = {"machine": machine(asked.device), "what": what}
    print("\n".join(about.values()), flush=True)
    record = Record(out, about)
    logged = logging.root.manager.disable
    logging.disable(logging.WARNING)  # of the stops by which a training is measured
    try:
        with tempfile.TemporaryDirectory(prefix="fvc-bench-gpu-") as name:
            case = Case(compute, asked, Path(name), clock)
            case.clips(0).store()
            left_out = [pair for pair in order(asked.only, asked.networks) if not measured(case, record, *pair)]
    finally:
        logging.disable(logged)
    print(f"\n{record.finish()}", flush=True)
    if left_out:
        parts, networks = (dict.fromkeys(filter(None, each)) for each in zip(*left_out, strict=True))
        again = " ".join(["--only", *parts, *(["--networks", *networks] if networks else [])])
        print(f"\nno time was left for some; once more: make bench-gpu ARGS='{again}'", flush=True)
    return 0


def measured(case: Case, record: Record, part: str, network: str) -> bool:
    """One part of one network; False where there is no time for it."""
    measure = MEASURES[part]
    if case.clock.left < measure.seconds(case, network):
        record.add(part, network, Figure("left out", f"not measured, {case.clock.left:.0f} s are left"))
        return False
    try:
        for figure in measure.measure(case, network):
            record.add(part, network, figure)
    except Exception as error:  # noqa: BLE001 - of one part; the others are measured all the same
        found = f"FAILED: {type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        record.add(part, network, Figure("failed", found))
    return True


if __name__ == "__main__":
    sys.exit(main())
