"""Stands where a checkout has run_notebooks.py: the real runner on a project's own few notebooks.

``--resume RUN [--jobs N] [--tasks KEY,...]``, as the batch scripts call it.
"""

import argparse
import json
import sys
from pathlib import Path

from fvc_lib.execution.plan import make_plan, read_notebooks
from fvc_lib.execution.run.runner import Runner
from fvc_lib.services.errors import FvcError, StoppedError
from fvc_lib.services.parameters import run_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import Stage

HOME = Path(__file__).resolve().parent


def stages_of(home: Path) -> tuple[Stage, ...]:
    """The stages that ``stages.json`` names; each writes ``tables/<key>.txt`` and reads what its needs wrote."""
    return tuple(_stage(**fields) for fields in json.loads((home / "stages.json").read_text()))


def _stage(name: str, needs: list[str], folds: int) -> Stage:
    def outputs(run: RunPaths, fold: int | None) -> tuple[Path, ...]:
        return (run.tables / (f"{name}.txt" if fold is None else f"{name}_fold_{fold}.txt"),)

    def inputs(run: RunPaths, fold: int | None) -> tuple[Path, ...]:
        del fold
        return tuple(path for need in needs for path in sorted(run.tables.glob(f"{need}*.txt")))

    return Stage(name, tuple(needs), inputs, outputs, folds > 0, trains=folds > 0)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--tasks")
    given = parser.parse_args()
    run = RunPaths(Path(given.resume).absolute())
    tasks = frozenset(given.tasks.split(",")) if given.tasks else None
    stages = stages_of(HOME)
    config, notebooks = run_config(run.params_yaml), read_notebooks(HOME / "notebooks", stages)
    runner = Runner(run, config, notebooks, jobs=given.jobs, only_tasks=tasks)
    try:
        return runner.execute(lambda: make_plan(notebooks, config, run, tasks=tasks, stages=stages))
    except (FvcError, StoppedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
