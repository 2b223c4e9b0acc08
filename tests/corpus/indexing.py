"""An index of a corpus, and the tables that it writes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from fvc_lib.corpus.index import IndexReport, build_index
from fvc_lib.services.config import RunConfig
from fvc_lib.services.tables import ANNOTATIONS, GROUP_LINKS, INDEX, REJECTED, read_table

_TABLES = {"index": INDEX, "rejected": REJECTED, "group_links": GROUP_LINKS, "annotations": ANNOTATIONS}


@dataclass(frozen=True)
class Indexed:
    """The report of an index and its tables."""

    report: IndexReport
    index: pl.DataFrame
    rejected: pl.DataFrame
    group_links: pl.DataFrame
    annotations: pl.DataFrame


def index_of(corpus: Path, out: Path, **options: Any) -> Indexed:
    """Index ``corpus`` into the folder ``out``; ``options`` are fields of the configuration."""
    settings = {"near_duplicate_bits": 10, "max_rejected_share": 0.5, "workers": 1, "cache_dir": str(out)} | options
    report = build_index(corpus, RunConfig(**settings), out)
    return Indexed(report, *(read_table(out / f"{name}.parquet", schema) for name, schema in _TABLES.items()))
