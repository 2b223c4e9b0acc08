"""The fixtures of everything that trains."""

from __future__ import annotations

from tests.kits.training import (  # noqa: F401
    frozen,
    kind,
    list_log,
    make_engine,
    observer,
    pictures,
    tables,
    tasks,
    tiny_training,
)  # fmt: skip
