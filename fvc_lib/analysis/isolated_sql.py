"""Anybody's SQL in a process of its own, so that one that runs away takes neither the kernel nor the machine with it.

DuckDB's own limits stop most queries; lists and texts that are made whole, as by ``repeat('x', 1000000000)``, it counts
too late. The process has a limit of address space and a time after which it is ended. It gets the tables as Arrow files
in a private folder and leaves the answer there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import duckdb
import polars as pl

from fvc_lib.analysis.sandbox import Limits, ask_bounded
from fvc_lib.services.isolated_workers import run_isolated

_RESERVED_BYTES = 4 << 30  # address space that the libraries take before the first row
_GRACE_SECONDS = 5.0  # for reading the tables, and for DuckDB to notice by itself that the time is over


def ask_isolated(
    query: str, frames: Mapping[str, pl.DataFrame], parameters: Mapping[str, object] | None, limits: Limits
) -> tuple[pl.DataFrame, bool]:
    """As ``sandbox.ask_bounded``, in another process; parameters are texts, numbers, booleans, None or lists of them.

    Raises:
        ValueError: as there.
        duckdb.Error: as there, also when the process was ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, frame in frames.items():
            frame.write_ipc(Path(folder, f"{name}.arrow"))
        item = {"folder": folder, "query": query, "parameters": dict(parameters or {}), "limits": asdict(limits)}
        (answer,) = run_isolated(
            f"{__name__}:answer_in_folder",
            [item],
            workers=1,
            timeout_seconds=limits.max_seconds + _GRACE_SECONDS,
            memory_bytes=_RESERVED_BYTES + limits.max_bytes + 2 * sum(map(_size_bytes, frames.values())),
        )
        if answer.failure == "timeout":
            raise duckdb.InterruptException(f"The query was stopped: {answer.detail}.")
        if answer.failure is not None:
            raise duckdb.OutOfMemoryException(f"The query took its process down ({answer.detail}): ask for less.")
        if "error" in answer.value:
            raise _error(answer.value["error"], answer.value["message"])
        # Into memory, not mapped: the folder goes.
        return pl.read_ipc(Path(folder, "answer").read_bytes()), bool(answer.value["more"])


def answer_in_folder(item: Mapping[str, Any]) -> dict[str, Any]:
    """What the process does: read the tables, ask, leave the rows; an error as its type's name and its message."""
    folder = Path(item["folder"])
    frames = {path.stem: pl.read_ipc(path) for path in folder.glob("*.arrow")}
    try:
        rows, more = ask_bounded(item["query"], frames, item["parameters"], Limits(**item["limits"]))
        rows.write_ipc(folder / "answer")
    except (ValueError, duckdb.Error, OSError, MemoryError) as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"more": more}


def _error(name: str, message: str) -> Exception:
    kind = getattr(duckdb, name, None)
    if isinstance(kind, type) and issubclass(kind, duckdb.Error):
        return kind(message)
    # Arrow says of memory that ended that it is an input or output that failed.
    return duckdb.OutOfMemoryException(message) if name in ("OSError", "MemoryError") else ValueError(message)


def _size_bytes(frame: pl.DataFrame) -> int:
    return int(frame.estimated_size())
