"""An index of a corpus, and the tables that it writes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fvc_lib.corpus.index import build_index
from fvc_lib.services.config import RunConfig
from fvc_lib.services.tables import ANNOTATIONS, GROUP_LINKS, INDEX, REJECTED, read_table

_TABLES = {"index": INDEX, "rejected": REJECTED, "group_links": GROUP_LINKS, "annotations": ANNOTATIONS}


def index_of(corpus: Path, out: Path, **options: Any) -> SimpleNamespace:
    """Index ``corpus`` into the folder ``out``; ``options`` are fields of the configuration.

    Returns:
        ``report``, and the tables ``index``, ``rejected``, ``group_links`` and ``annotations``.
    """
    settings = {"near_duplicate_bits": 10, "max_rejected_share": 0.5, "workers": 1, "cache_dir": str(out)} | options
    report = build_index(corpus, RunConfig(**settings), out)
    tables = {name: read_table(out / f"{name}.parquet", schema) for name, schema in _TABLES.items()}
    return SimpleNamespace(report=report, **tables)
