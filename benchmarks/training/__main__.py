"""``python -m benchmarks.training``: what FVC's training engine costs over a bare torch loop.

The bare loop does the same work (forward, loss and backward in the same micro-batches, clipping, AdamW's step, the same
clips in the same order through the same loader) and ends with the same weights; tests hold it to that. Both run in one
process and take turns step by step, in the order ours, theirs, theirs, ours, each charged with its own time. A value is
the ratio of two such blocks of ours to the two of theirs between them; the median of many counts, with the interval it
lies in. So neighbours on the machine, and a clock that changes its speed, fall on both sides.

Parts (--only):

  steps    what a step costs over the bare one. What happens once in a while is made to happen far more often, and then
           charged as often as it does by default:
             transaction  the snapshot before each step, the watching, the accumulated loss: what a step always does.
                          On tiny clips the same is seen with less noise; charged to a usual step that is the least it
                          can cost there, where caches are colder
             metric log   every step's three metrics are written 50 times, and a 50th is charged
             sampler      memory is sampled every 10 ms, and one sample a second is charged
             checkpoints  one is saved after each step, one every two minutes is charged, its writer's time included
  epochs   everything at once, as it is by default, over whole short epochs with validation and a checkpoint each
  memory   the peak over the bare loop's, each in a process of its own
  stall    how long a save of 130 MB blocks the training
  lines    metric lines a second
  waiting  the share of an epoch that passes before the next clips are there

A verdict is "undecided" when the target lies within the interval: measure for longer, or on a quieter machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.training.cases import MODELS, Case, Training
from benchmarks.training.figures import Figure, figures_table, of_shares, summary
from benchmarks.training.lines import measure_lines
from benchmarks.training.overhead import FIXED_COSTS, measure_epochs, measure_steps, together
from benchmarks.training.peaks import measure_peaks
from benchmarks.training.stall import measure_stall
from benchmarks.training.waiting import measure_waiting
from fvc_lib.services.atomic_files import write_text

PARTS = ("steps", "epochs", "stall", "lines", "waiting", "memory")
EACH_PERCENT, TOGETHER_PERCENT = 2.0, 5.0


def read_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a few minutes, and wide intervals")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (default: all)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="networks (default: both)")
    parser.add_argument("--blocks", type=int, help="blocks of each side for a part, even (default: 150; quick: 20)")
    parser.add_argument("--steps", type=int, default=1, help="steps in a block (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value there too")
    parser.add_argument("--folder", type=Path, help="where clips and checkpoints are written for the time being")
    asked = parser.parse_args(words)
    asked.blocks = asked.blocks or (20 if asked.quick else 150)
    if asked.blocks < 2 or asked.blocks % 2 or asked.steps < 1:
        parser.error(
            f"--blocks {asked.blocks} --steps {asked.steps}: wanted an even number of blocks of 1 step or more"
        )
    return asked


def main() -> None:
    """Measure, part by part, and print the table."""
    asked = read_arguments()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        for part, measure in measures(asked, folder).items():
            if part.split()[0] in asked.only:
                print(f"measuring: {part}", file=sys.stderr, flush=True)
                figures += measure()
    print(figures_table(figures))
    print(f"\n{summary(figures)} {torch.get_num_threads()} threads, torch {torch.__version__}, "
          f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.")  # fmt: skip
    if asked.json:
        write_text(asked.json, json.dumps(document(figures), indent=1))


def measures(asked: argparse.Namespace, folder: Path) -> dict[str, Callable[[], list[Figure]]]:
    """What there is to measure, by name; a part's name is the first word."""
    quick = asked.quick
    found: dict[str, Callable[[], list[Figure]]] = {}
    for model in asked.models:
        training = Training(Case(model), folder / model)
        found[f"steps of {model}"] = partial(steps, training, asked.blocks, asked.steps)
        found[f"epochs of {model}"] = partial(epochs, training, 6 if quick else 60)
        found[f"memory of {model}"] = partial(memory, training, 2 if quick else 5)
    found["stall"] = partial(measure_stall, folder, steps=60 if quick else 240, between_seconds=2.0 if quick else 4.0)
    found["lines"] = partial(measure_lines, folder, 10 if quick else 60)
    found["waiting"] = partial(measure_waiting, folder, 160, 2 if quick else 7)
    return found


def steps(training: Training, num_blocks: int, steps_per_block: int) -> list[Figure]:
    """Overhead of each thing the engine does, and of all of them."""
    training.store_clips()
    parts = measure_steps(training, num_blocks, steps_per_block)
    group = str(training.case)
    figures = [
        figure
        for part, shares in parts.items()
        # The fixed costs alone are the least there is: under the limit they decide nothing.
        for figure in of_shares(group, part, shares, EACH_PERCENT if part != FIXED_COSTS else None)
    ]
    return figures + of_shares(group, "together", together(parts), TOGETHER_PERCENT)


def epochs(training: Training, number: int) -> list[Figure]:
    """Overhead of whole epochs of ten effective batches and sixteen validation clips, checkpoints included."""
    training.store_clips()
    shares = measure_epochs(training, epochs=number, windows=10, num_validation=16)
    return of_shares(str(training.case), "whole epochs", shares, TOGETHER_PERCENT)


def memory(training: Training, rounds: int) -> list[Figure]:
    """Peak memory beside the bare loop's."""
    training.store_clips()
    return measure_peaks(training, rounds)


def document(figures: list[Figure]) -> dict[str, object]:
    """Every value, and what it was measured on."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "figures": [figure.document() for figure in figures],
    }


if __name__ == "__main__":
    main()
