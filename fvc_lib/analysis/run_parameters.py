"""The parameters of runs side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import polars as pl

from fvc_lib.analysis.records import Answer, run_names
from fvc_lib.services.config import NOT_HASHED, read_params_file
from fvc_lib.services.errors import UsageError
from fvc_lib.services.path_text import path_to_text
from fvc_lib.services.run_paths import RunPaths

SCHEMA = pl.Schema({"parameter": pl.String, "run_id": pl.String, "value": pl.String, "changes_numbers": pl.Boolean})
_MAX_BYTES = 1_000_000  # ours are of some kilobytes; YAML can grow a thousandfold when read


def read_parameters(runs: Sequence[RunPaths]) -> Answer:
    """Every parameter of every run in ``params.yaml``'s own order; ``queries.parameter_differences`` tells the columns.

    A run without a readable file gives no rows, and a note unless it simply has none.
    """
    rows: list[tuple[str, str, str | None, bool]] = []
    notes: list[str] = []
    found = [_parameters(run, notes) for run in runs]
    run_ids = list(map(path_to_text, run_names(runs)))
    names = dict.fromkeys(name for each in found if each is not None for name in each)
    for name in names:
        for run_id, each in zip(run_ids, found, strict=True):
            if each is not None:
                rows.append((name, run_id, each.get(name), name not in NOT_HASHED))
    return Answer(pl.DataFrame(rows, schema=SCHEMA, orient="row"), tuple(notes))


def differing(parameters: pl.DataFrame) -> pl.DataFrame:
    """Of ``parameters`` those rows whose parameter has not the same value in all runs; to lack it is a value too."""
    return parameters.filter(pl.col("value").n_unique().over("parameter") > 1)


def _parameters(run: RunPaths, notes: list[str]) -> dict[str, str] | None:
    path = run.params_yaml
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"it has more than {_MAX_BYTES:,} bytes")
        return {str(name): _text(value) for name, value in read_params_file(path).items()}
    except (UsageError, OSError, RecursionError, ValueError) as error:
        notes.append(f"{path_to_text(path)} was left out: {error}")
        return None


def _text(value: Any) -> str:
    """A value as it would be typed; one that no parameter has, such as nested lists, by its type's name alone."""
    if isinstance(value, str):
        return value
    items = value if isinstance(value, list) else [value]
    if not all(item is None or isinstance(item, (str, int, float)) for item in items):
        return f"({type(value).__name__})"
    return json.dumps(value, ensure_ascii=False)
