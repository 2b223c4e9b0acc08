"""What held memory when it ended, from the context files that shortages leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from fvc_lib.analysis.memory_findings import MemoryFindings
from fvc_lib.analysis.memory_wording import where_text
from fvc_lib.analysis.records import read_json_object
from fvc_lib.services.run_paths import RunPaths

_SCHEMA = {"stage": pl.String, "shape": pl.String, "dtype": pl.String, "num_tensors": pl.Int64, "total_bytes": pl.Int64}
_MOST_ROWS = 8


def largest_tensors(run: RunPaths, found: MemoryFindings) -> pl.DataFrame:
    """The tensors that held most when memory ended: ``stage shape dtype num_tensors total_bytes``, largest first.

    Of each stage, shape and type the shortage where they held most. Context files that are missing or unreadable add no
    row: the events tell of the shortage all the same.
    """
    rows = [row for shortage in found.shortages.iter_rows(named=True) for row in _tensors(run, shortage)]
    frame = pl.DataFrame(rows, schema=_SCHEMA).sort("total_bytes", "stage", "shape", descending=[True, False, False])
    return frame.unique(["stage", "shape", "dtype"], keep="first", maintain_order=True).head(_MOST_ROWS)


def _tensors(run: RunPaths, shortage: dict[str, Any]) -> Iterator[dict[str, object]]:
    name = shortage["context_file"]
    if name is None or name != Path(name).name:  # a name from a log shall not lead out of its folder
        return
    state = read_json_object(run.oom_contexts(shortage["stage"], shortage["fold"]) / name).get("state")
    tensors = state.get("largest_tensors") if isinstance(state, dict) else None
    for tensor in tensors if isinstance(tensors, list) else ():
        if isinstance(tensor, dict) and isinstance(tensor.get("total_bytes"), int):
            shape, count = tensor.get("shape"), tensor.get("count")
            yield {
                "stage": where_text(shortage),
                "shape": " × ".join(map(str, shape)) if isinstance(shape, list) else "not recorded",
                "dtype": str(tensor.get("dtype")).removeprefix("torch."),
                "num_tensors": count if isinstance(count, int) else None,
                "total_bytes": tensor["total_bytes"],
            }
