"""What a file's pixels and packets show, set beside the run's own videos: panels of one frame, and forensic features.

The frame is compared with those of the nearest real and the nearest fake of the run's videos whose features are known,
where its corpus is here: nearest by what goes into the networks' heads, or else by forensic features. A feature is a
quantile among the run's reals. Both say how a file differs, and neither that it was forged.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import polars as pl

from fvc_lib.corpus.samples.videos import corpus_root
from fvc_lib.services.atomic_files import path_from_text
from fvc_lib.services.errors import FvcError
from fvc_lib.services.isolated_workers import run_isolated
from fvc_lib.services.tables import FEATURES, read_table
from fvc_lib.tasks.video.classical.judging import FeatureMeasurer
from fvc_lib.tasks.video.verdicts.feature_distance import FeatureDistance, Features, FoldReference
from fvc_lib.tasks.video.verdicts.rule import KnownVideos
from fvc_lib.tasks.video.verdicts.scoring import Networks, RunNetworks
from fvc_lib.video.clips.clip_file import Pixels
from fvc_lib.video.decode.windows import unpacked
from fvc_lib.video.features.family import Feature, families_named
from fvc_lib.video.features.panels import LEAST, MIDDLE_FUNCTION, FramePanels, panels_of

Floats = npt.NDArray[np.float32]
_PERCENTS = np.linspace(0, 100, 101)
LIMIT = (
    "Near in features is no proof: the panels show one frame of each video, and camera, compression, scaling and what "
    "is in the picture leave traces as forging does."
)


class RealQuantiles:
    """How forensic features are spread over a run's real videos.

    Attributes:
        num_videos: reals.
        percentiles: of each feature, by its column, the 0th to the 100th: float32 (101,).
    """

    def __init__(self, num_videos: int, percentiles: Mapping[str, Floats]) -> None:
        self.num_videos, self.percentiles = num_videos, dict(percentiles)

    @classmethod
    def of(cls, table: pl.DataFrame) -> Self:
        """Of a run's FEATURES: a feature's mean, or its one value; those that no real has are left out."""
        reals = table.filter(label="real")
        values = {name: reals[name].drop_nulls().to_numpy() for name in _declared() if name in reals.columns}
        found = {n: np.percentile(of, _PERCENTS).astype(np.float32) for n, of in values.items() if of.size}
        return cls(reals.height, found)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """For a file."""
        return {"num_videos": np.array([self.num_videos]), **self.percentiles}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """What ``arrays`` gave; ``ValueError`` where it cannot have been that."""
        percentiles = dict(arrays)
        number = percentiles.pop("num_videos", np.empty(0))
        if number.dtype != np.int64 or number.shape != (1,) or number[0] < 1:
            raise ValueError("num_videos: wanted one int64 of at least 1")
        for name, of in percentiles.items():
            if of.dtype != np.float32 or of.shape != _PERCENTS.shape or not (np.diff(of) >= 0).all():
                raise ValueError(f"{name}: got {of.dtype} {of.shape}, wanted ascending float32 {_PERCENTS.shape}")
        return cls(int(number[0]), percentiles)

    def placed(self, values: Mapping[str, float]) -> list["PlacedFeature"]:
        """Each of ``values`` (by column) among the reals, the most extreme first: those at the ends, by how far out."""
        found = []
        for name, (family, feature) in _declared().items():
            value, known = np.float32(values.get(name, np.nan)), self.percentiles.get(name)
            if known is None or not np.isfinite(value):
                continue
            below, up_to = (np.searchsorted(known, value, side) for side in ("left", "right"))  # ties count half
            far = abs(float(value - known[50])) / (float(known[75] - known[25]) or 1e-6)
            share = float(below + up_to) / 2 / len(known)
            found.append((PlacedFeature(name, family, feature, float(value), share), far))
        found.sort(key=lambda each: (-abs(each[0].quantile - 0.5), -each[1]))
        return [each for each, _ in found]


@dataclass(frozen=True)
class PlacedFeature:
    """One feature of a file: its column, family and declaration, the value in its unit, and the share of reals below.

    ``quantile`` is in [0, 1]; 0 and 1 are beyond all of them.
    """

    column: str
    family: str
    feature: Feature
    value: float
    quantile: float


@dataclass(frozen=True)
class ShownFrame:
    """Panels of one video: ``this video``, or what a video of the run is called and how far it is."""

    title: str
    name: str
    panels: FramePanels
    distance: float | None = None


@dataclass(frozen=True)
class Traces:
    """What there is to look at of a file; ``notes`` say what is missing and why."""

    frames: tuple[ShownFrame, ...]
    features: tuple[PlacedFeature, ...] = ()
    num_reals: int = 0
    notes: tuple[str, ...] = field(default=())


def _declared() -> dict[str, tuple[str, Feature]]:
    """Family and feature by main column."""
    return {name: (each.name, of) for each in families_named("all") for name, of in each.main_columns().items()}


class KnownTraces:
    """What a run, or a bundle of it, has to set a file's traces beside.

    Args:
        networks: that judge; of a run they know its folder.
        known: the run's videos.
        distance: how far features of networks are from theirs, with names; None: not known.
        quantiles: those that a bundle has.
    """

    def __init__(
        self,
        networks: Networks,
        known: KnownVideos,
        distance: FeatureDistance | None = None,
        quantiles: RealQuantiles | None = None,
    ) -> None:
        self._networks, self._known, self._distance, self._quantiles = networks, known, distance, quantiles

    @cached_property
    def _table(self) -> pl.DataFrame | None:
        paths = self._networks.paths if isinstance(self._networks, RunNetworks) else None
        return read_table(paths.features, FEATURES) if paths and paths.features.is_file() else None

    @cached_property
    def quantiles(self) -> RealQuantiles | None:
        """Of the run's reals; None where it has measured no features."""
        return self._quantiles if self._table is None else RealQuantiles.of(self._table)

    @cached_property
    def _root(self) -> Path | None:
        """The corpus' folder; None where it is not here. Nothing is generated for it."""
        if "path" not in self._known.rows.columns:
            return None
        try:
            return corpus_root(self._networks.config, generate=False)
        except (FvcError, OSError):
            return None

    def of(self, row: Mapping[str, Any], middle: Pixels, features: Mapping[int, Features]) -> Traces:
        """Of one file: its row of VERDICTS, the middle of a frame uint8 (h, w), and features (1, F) by fold's network.

        Raises:
            FvcError: a table of the run is damaged, or code was changed.
        """
        own, notes = self._known.rows.filter(content_sha256=row["sha256"]).head(1), list[str]()
        values = self._measured(row, own, notes)
        frames = [ShownFrame("this video", Path(row["path"]).name, each)] if (each := panels_of(middle)) else []
        if frames:
            frames += self._nearest(own, features, values, notes)
        else:
            notes.append(f"No panels: the picture has less than {LEAST} pixels along a side.")
        placed = self.quantiles.placed(values) if self.quantiles else []
        return Traces(tuple(frames), tuple(placed), self.quantiles.num_videos if self.quantiles else 0, tuple(notes))

    def _encoded(self) -> list[str]:
        store = self._networks.store
        return [store.recipe, str(store.cache_dir)] if store.recipe else []

    def _measured(self, row: Mapping[str, Any], own: pl.DataFrame, notes: list[str]) -> dict[str, float]:
        """Forensic features by column; of a video of the run those that are stored."""
        if self.quantiles is None:
            notes.append("No forensic features: the run has none to compare with (-p forensic_features true).")
            return {}
        if self._table is not None and own.height:
            stored = self._table.filter(video_id=own["video_id"][0]).drop(FEATURES.columns)
            return {name: np.nan if of[0] is None else of[0] for name, of in stored.to_dict(as_series=False).items()}
        networks = self._networks
        measurer = networks.measurer or FeatureMeasurer(
            networks.config, networks.store.recipe, Path(networks.config.cache_dir)
        )
        ((_, values, failure),) = measurer.measure([(path_from_text(row["path"]), row["sha256"])])
        notes.extend([f"No forensic features: {failure}"] if failure else [])
        return values

    def _nearest(
        self, own: pl.DataFrame, features: Mapping[int, Features], values: Mapping[str, float], notes: list[str]
    ) -> Iterator[ShownFrame]:
        """The nearest real and nearest fake of other groups than ``own``, of the run's videos with known features."""
        if not own.height and not self._networks.config.near_duplicate_bits:  # else a near-duplicate gets no score
            notes.append(
                "No videos of the run are shown beside it: copies were not looked for (near_duplicate_bits 0), so it "
                "may be a copy of the nearest."
            )
            return
        far = self._distances(features, values)
        if not far or self._root is None:
            why = "how far they are is not known" if self._root else "its corpus is not here"
            notes.append(f"No videos of the run are shown beside it: {why}.")
            return
        rows = self._known.rows.filter(pl.col("video_id").is_in(list(far)))
        if own.height:
            rows = rows.filter(pl.col("group_id") != own["group_id"][0])
        rows = rows.with_columns(pl.col("video_id").replace_strict(far, return_dtype=pl.Float64).alias("far"))
        chosen = [near.row(0, named=True) for label in ("real", "fake")
                  if (near := rows.filter(label=label).sort("far", "video_id")).height]  # fmt: skip
        items = [
            {
                "source": str(self._root / path_from_text(each["path"])),
                "content_sha256": each["content_sha256"],
                "encoded": self._encoded(),
            }
            for each in chosen
        ]
        found = dict[int, FramePanels]()
        with closing(run_isolated(MIDDLE_FUNCTION, items, workers=1)) as answers:
            for answer in answers:
                said, name = answer.value or {}, chosen[answer.position]["video_id"]
                failure = answer.detail if answer.failure else said.get("video_error", "")
                panels = None if failure else panels_of(unpacked(said["middle"]))
                if panels is None:
                    why = "its file is not what it was, or cannot be read" if failure else "its picture is too small"
                    notes.append(f"The run's {name} is not shown beside it: {why}.")
                else:
                    found[answer.position] = panels
        for place, each in enumerate(chosen):
            if place in found:
                name = f"{each['video_id']} ({Path(each['path']).name})"
                number = rows.filter(label=each["label"]).height
                title = f"nearest {each['label']} of the run's {number:,} with known features"
                yield ShownFrame(title, name, found[place], each["far"])

    def _distances(self, features: Mapping[int, Features], values: Mapping[str, float]) -> dict[str, float]:
        """Of the run's videos by id, where 1 is how far they are from their nearest in the median."""
        if self._distance is not None:
            folds = [fold for fold in features if fold in self._distance.folds]
            found = [self._distance.folds[fold].relative(features[fold]) for fold in folds]
            if any(found):
                return {name: each for some in found for name, each in some.items()}
        if self._table is None or not values:
            return {}
        names = [name for name in _declared() if name in self._table.columns and name in values]
        table = self._table.join(self._known.rows.select("video_id"), on="video_id", how="semi")
        known = table.select(pl.col(names).fill_null(pl.col(names).median()).fill_null(0)).to_numpy()
        usual = np.median(known, axis=0)
        wanted = np.array([values[name] for name in names])
        groups = np.unique(table["group_id"].to_numpy(), return_inverse=True)[1].astype(np.int64)
        reference = FoldReference(known.astype(np.float32), groups, tuple(table["video_id"]))
        return reference.relative(np.where(np.isfinite(wanted), wanted, usual)[None].astype(np.float32))
