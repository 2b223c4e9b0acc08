"""What a worker process has come to once it has done its work."""

import importlib
from typing import Any

from fvc_lib.services.memory import peak_rss_bytes


def peak_of(item: list[Any]) -> dict[str, Any]:
    """What ``module:function`` answers to its own item, both in ``item``, and the most that this process ever held."""
    module, _, name = item[0].partition(":")
    answer = getattr(importlib.import_module(module), name)(item[1])
    return {"answer": answer, "peak_bytes": peak_rss_bytes()}
