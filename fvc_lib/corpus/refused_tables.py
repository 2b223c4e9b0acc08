"""A corpus that is refused as a whole still says of each of its files what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fvc_lib.corpus.listing import Rejections
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import REJECTED, write_table


@contextmanager
def written_when_refused(rejections: Rejections, path: Path | None) -> Iterator[None]:
    """Write the REJECTED table to ``path`` where this ends in a ``DataError``, and name it in the error."""
    try:
        yield
    except DataError as error:
        if path is None or not rejections.rows:
            raise
        write_table(rejections.frame(), REJECTED, path)
        raise type(error)(f"{error} Why each of {len(rejections.rows):,} rows is not used stands in {path}.") from error
