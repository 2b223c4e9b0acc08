"""The table of forensic features as a model reads it: which columns it sees, and of which family each is."""

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
from fvc_lib.services.errors import DataError, UsageError, command_text
from fvc_lib.services.registry import FEATURES
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import FEATURES as SCHEMA, read_table
from fvc_lib.video.features.family import Feature, families_named

if TYPE_CHECKING:
    from fvc_lib.tasks.video.data import ClipRow

KEYS = ("video_id", "group_id", "label")


@dataclass(frozen=True)
class FeatureTable:
    """Features of every video of a run.

    Attributes:
        names: F columns that are seen, in their order.
        families: (F,) names, the family of each.
        videos: ids of the videos of which any feature is known.
        values: float64 (N, F), a row for each of ``videos``; NaN where missing.
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
        """Over columns and values: other features are other data."""
        digest = hashlib.sha256("\n".join([*self.names, "", *self.videos]).encode("utf-8", "surrogateescape"))
        digest.update(np.ascontiguousarray(self.values).data)
        return digest.hexdigest()

    def has(self, video_id: str, augmentation_index: int) -> bool:
        """Whether the video was measured; of altered copies none is."""
        return augmentation_index == 0 and video_id in self._row_of

    def of(self, rows: Sequence["ClipRow"]) -> npt.NDArray[np.float64]:
        """Float64 (N, F) of ``rows``."""
        return self.values[[self._row_of[row.video_id] for row in rows]]


def read_features(paths: RunPaths, config: RunConfig) -> FeatureTable:
    """The columns of the families that ``config`` names.

    Raises:
        DataError: there is no table, or it lacks a family.
    """
    anew = f"Measure them again: {command_text('--from', '03b', '--resume', paths.root)}"
    table = read_table(Path(paths.features), SCHEMA).sort("video_id")
    wanted = families_of(config)
    names = [name for name in table.columns if name in wanted]
    if lacking := sorted({wanted[name] for name in wanted} - {wanted[name] for name in names}):
        raise DataError(f"{str(paths.features)!r} has no features of the families {', '.join(lacking)}. {anew}")
    values = table.select(pl.col(names).cast(pl.Float64)).to_numpy()
    values = np.where(np.isfinite(values), values, np.nan)
    known = ~np.isnan(values).all(1)
    if not known.any():
        raise DataError(f"{str(paths.features)!r} knows no feature of any video. {anew}")
    videos = tuple(table.filter(pl.Series(known))["video_id"])
    return FeatureTable(tuple(names), tuple(wanted[name] for name in names), videos, values[known])


def families_of(config: RunConfig) -> dict[str, str]:
    """By column the family, of the families that ``config`` names."""
    return {column: family.name for family in families_named(config.feature_families) for column in family.columns()}


def described_features() -> dict[str, tuple[str, Feature]]:
    """Family and declaration of each column of every family that is installed here."""
    return {column: (name, each) for name, family in FEATURES.items() for column, each in family.columns().items()}


def refuse_settings(config: RunConfig) -> None:
    """``UsageError`` for what only a network has a use for, and for a model that sees nothing."""
    model = f"model {config.model!r} is fitted to features of whole videos"
    if config.class_balance not in ("loss", "none"):
        raise UsageError(
            f"class_balance {config.class_balance!r}: {model} and draws no batches. Give loss, which weighs videos by "
            "class, or none."
        )
    if config.num_ranks > 1:
        raise UsageError(f"num_ranks {config.num_ranks}: {model}, in one process. Give num_ranks 1.")
    if config.device not in ("auto", "cpu"):
        raise UsageError(f"device {config.device!r}: {model}, on the CPU. Leave device out.")
    if config.of_features == "embedding":
        if config.tune not in ("", "head") or config.head or config.l2_normalise:
            raise UsageError(f"tune, head, l2_normalise: {model} that a frozen trunk gives. Leave them out.")
        return
    if config.model_weights or config.crop or config.clips_per_video > 1 or config.head or config.tune:
        raise UsageError(
            f"model_weights, crop, clips_per_video, head, tune: {model}, and has neither clips nor a network. Leave "
            "them out."
        )
    families_named(config.feature_families)
