"""The table of forensic features that a model sees."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import polars as pl

from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, command_text
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import FEATURES, read_table
from fvc_lib.video.features.family import families_named

if TYPE_CHECKING:
    from fvc_lib.tasks.video.data import ClipRow


@dataclass(frozen=True)
class FeatureTable:
    """Forensic features of a run's videos.

    Attributes:
        names: the F columns, in order.
        families: (F,) the family of each column.
        videos: ids of the videos that have any feature.
        values: float64 (N, F), one row for each of ``videos``; NaN where missing.
    """

    names: tuple[str, ...]
    families: tuple[str, ...]
    videos: tuple[str, ...]
    values: npt.NDArray[np.float64]

    @cached_property
    def _row_of(self) -> Mapping[str, int]:
        return {video_id: row for row, video_id in enumerate(self.videos)}

    @cached_property
    def settings_hash(self) -> str:
        """Hash of the columns and values: other features are other data."""
        digest = hashlib.sha256("\n".join([*self.names, "", *self.videos]).encode("utf-8", "surrogateescape"))
        digest.update(np.ascontiguousarray(self.values).data)
        return digest.hexdigest()

    def has(self, video_id: str, augmentation_index: int) -> bool:
        """Return whether the video was measured; augmented copies never are."""
        return augmentation_index == 0 and video_id in self._row_of

    def of_videos(self, video_ids: Sequence[str]) -> npt.NDArray[np.float64]:
        """Return float64 (N, F) of videos."""
        return self.values[[self._row_of[video_id] for video_id in video_ids]]

    def of(self, rows: Sequence["ClipRow"]) -> npt.NDArray[np.float64]:
        """Return float64 (N, F) of ``rows``."""
        return self.of_videos([row.video_id for row in rows])


def read_features(paths: RunPaths, config: RunConfig) -> FeatureTable:
    """Return the columns of the families that ``config`` names.

    Raises:
        DataError: there is no table, or it lacks a family.
    """
    remedy = f"Measure them again: {command_text('--from', '03b', '--resume', paths.root)}"
    table = read_table(Path(paths.features), FEATURES).sort("video_id")
    wanted = families_of(config)
    names = [name for name in table.columns if name in wanted]
    if lacking := sorted(set(wanted.values()) - {wanted[name] for name in names}):
        raise DataError(f"{str(paths.features)!r} has no features of the families {', '.join(lacking)}. {remedy}")
    values = table.select(pl.col(names).cast(pl.Float64)).to_numpy()
    values = np.where(np.isfinite(values), values, np.nan)
    known = ~np.isnan(values).all(1)
    if not known.any():
        raise DataError(f"{str(paths.features)!r} has no feature of any video. {remedy}")
    videos = tuple(table.filter(pl.Series(known))["video_id"])
    return FeatureTable(tuple(names), tuple(wanted[name] for name in names), videos, values[known])


def families_of(config: RunConfig) -> dict[str, str]:
    """Return the family of each column of the families that ``config`` names."""
    return {column: family.name for family in families_named(config.feature_families) for column in family.columns()}
