"""The outer fold under seal: whoever looks at it before the selection is on record is stopped and named."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from fvc_lib.learning.data import ClipRow
from fvc_lib.learning.selection import RecordedSelection
from fvc_lib.services.errors import LeakageError


@dataclass(frozen=True)
class OuterFold:
    """What was under the seal: the test clips with their labels, in the order of the video ids, and their groups."""

    rows: tuple[ClipRow, ...]
    group_of: Mapping[str, str]


class SealedFold:
    """The videos that a fold is tested on; before it is opened only how many they are can be known.

    Neither their labels nor their ids can be had, so that no network can score them either. ``open`` wants the recorded
    selection of the very same fold, and does it once. Everything else that would show them, copying and pickling
    included, raises ``LeakageError`` with the place in the code that tried.

    Args:
        name: of the fold, for messages.
        rows: its test clips.
        group_of: group by video id.
        clips: fingerprint of the whole fold, which the selection must be of.
    """

    __slots__ = ("_clips", "_contents", "_name", "_opened_by")

    def __init__(self, name: str, rows: Sequence[ClipRow], group_of: Mapping[str, str], clips: str) -> None:
        self._name = name
        self._contents = OuterFold(tuple(rows), dict(group_of))
        self._clips = clips
        self._opened_by = ""

    def open(self, selection: RecordedSelection) -> OuterFold:
        """Break the seal.

        Raises:
            LeakageError: ``selection`` is not recorded, or of another fold or of other labels; or it was opened before.
        """
        if not isinstance(selection, RecordedSelection):
            self._refuse("the labels, with a selection that is not recorded,")
        if selection.clips != self._clips:
            self._refuse("the labels, with the selection of another fold,")
        if self._opened_by:
            self._refuse(f"the labels a second time (the first was {self._opened_by})")
        self._opened_by = _place(2)
        return self._contents

    @property
    def rows(self) -> tuple[ClipRow, ...]:
        """Refused: ``open`` gives them."""
        self._refuse("the labels")

    @property
    def group_of(self) -> Mapping[str, str]:
        """Refused: ``open`` gives them."""
        self._refuse("the groups")

    def __len__(self) -> int:
        return len(self._contents.rows)

    def __iter__(self) -> Iterator[ClipRow]:
        self._refuse("the labels")

    def __getitem__(self, index: int) -> ClipRow:
        self._refuse("a label")

    def __reduce__(self) -> NoReturn:
        self._refuse("a copy")

    def __repr__(self) -> str:
        return f"<sealed {self._name}: {len(self)} videos>"

    def _refuse(self, what: str) -> NoReturn:
        """Raise, naming who asked for ``what``."""
        raise LeakageError(
            f"{self._name}: {_place(3)} asked for {what} of {len(self)} videos that test it. Epoch, threshold and "
            "temperature come from the inner validation part; record them first (selection.record_selection), then "
            "open the fold with the record, once."
        )


def _place(depth: int) -> str:
    """The function that called, so many calls up from here, as ``module.function (line n)``."""
    frame = sys._getframe(depth)
    return f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname} (line {frame.f_lineno})"
