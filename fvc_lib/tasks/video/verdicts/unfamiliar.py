"""What a run's videos say nothing about: codecs, sizes, lengths and rates beyond theirs, and copies of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import polars as pl
from pydantic import BaseModel, ConfigDict, Field

from fvc_lib.corpus.copies.near_duplicates import near_duplicate_links, nearly_alike
from fvc_lib.corpus.copies.perceptual_hash import parse_hashes
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import INDEX, read_table

_Facts = Mapping[str, Any]
_Count = Annotated[int, Field(ge=0)]
_Number = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class NumberRange(_Strict):
    """A number's 1st and 99th percentile over videos (null: of none known), and of how many it is not known."""

    num_unknown: _Count
    low: _Number | None
    high: _Number | None


class TrainingRanges(_Strict):
    """What a run's videos are like: counts of codecs, and ranges of sizes, lengths and rates."""

    codec: dict[str, _Count]
    shorter_side_pixels: NumberRange
    longer_side_pixels: NumberRange
    duration_seconds: NumberRange
    frames_per_second: NumberRange
    bits_per_second: NumberRange
    share_unfamiliar: Annotated[float, Field(ge=0, le=1)] = 0.0  # of these very videos

    def reasons(self, facts: _Facts) -> list[str]:
        """Return one sentence on how a video is outside, or none; ``facts``: of its probe, named as in INDEX."""
        found, unknown = [], list[str]()
        if facts["codec"] not in self.codec:
            found.append((f"codec {facts['codec']}", ", ".join(sorted(self.codec))))
        for column, (name, unit, of) in _WATCHED.items():
            value, known = of(facts), getattr(self, column)
            low, high = known.low, known.high
            if value is None:
                if not known.num_unknown:
                    unknown.append(f"its {name} is not known")
            elif low is None or high is None:
                unknown.append(f"the {name} of the run's videos is not known")
            elif not low * (1 - _SLACK) <= value <= high * (1 + _SLACK):
                found.append((f"{name} {_shown(value)} {unit}", f"{_shown(low)} to {_shown(high)}"))
        theirs = ["the run's videos: ", *[""] * len(found)]
        told = [f"{what} ({whose}{known})" for (what, known), whose in zip(found, theirs, strict=False)]
        return [f"Unfamiliar: {'; '.join([*told, *unknown])}."] if told or unknown else []


# A number by which a video may be unfamiliar: its name for people, its unit, and its value by a probe's facts.
_WATCHED: Mapping[str, tuple[str, str, Callable[[_Facts], float | None]]] = {
    "shorter_side_pixels": ("shorter side", "pixels", lambda facts: min(facts["width"], facts["height"])),
    "longer_side_pixels": ("longer side", "pixels", lambda facts: max(facts["width"], facts["height"])),
    "duration_seconds": ("length", "seconds", lambda facts: facts["duration_seconds"]),
    "frames_per_second": ("frame rate", "frames a second", lambda facts: facts["frames_per_second"]),
    "bits_per_second": ("bit rate", "bits a second", lambda facts: facts["bits_per_second"]),
}
_RATES = ("duration_seconds", "frames_per_second", "bits_per_second")
_SLACK = 0.1
FAMILIARITY = (
    "Unfamiliar is a codec that no video of the run has, and a side, length, frame rate or bit rate more than a tenth "
    "below the 1st or above the 99th percentile of the run's videos, or not known where theirs is."
)


def index_of_files(run: RunPaths) -> pl.DataFrame:
    """Return INDEX of a run's videos before any re-encoding, with which a new file is compared."""
    return read_table(run.original_index if run.original_index.is_file() else run.index, INDEX)


def training_ranges(index: pl.DataFrame) -> TrainingRanges:
    """Return the ranges of videos (INDEX); percentiles are values of videos."""
    parts, videos = dict[str, Any](), index.select("codec", "width", "height", *_RATES).to_dicts()
    for column, (_, _, of) in _WATCHED.items():
        values = pl.Series([of(video) for video in videos], dtype=pl.Float64)
        parts[column] = NumberRange(
            num_unknown=values.null_count(), low=values.quantile(0.01, "lower"), high=values.quantile(0.99, "higher")
        )
    ranges = TrainingRanges(codec=dict(sorted(index["codec"].value_counts().rows())), **parts)
    outside = sum(bool(ranges.reasons(video)) for video in videos)
    return ranges.model_copy(update={"share_unfamiliar": outside / max(1, index.height)})


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


# --- Nothing to judge

_GRID = 16  # cells per side of a frame that are compared
_BLACK = 20.0  # grey levels of 255: a black frame is darker than this on average, and
_FLAT = 8.0  # no cell of it is further from the average
_FROZEN = 1.0  # grey levels: a still changes less in every cell; a coarsely coded one may change more and is not named


def too_few(num_frames: int, num_sampled: int) -> str:
    """Return the reason for a video with fewer frames than a network sees."""
    return (
        f"It has {num_frames} frame{'s' * (num_frames != 1)} and the networks look at {num_sampled}, so some are shown "
        "to them more than once."
    )


def is_black(clips: npt.NDArray[np.uint8]) -> bool:
    """Return whether all frames of ``clips``, uint8 (N, T, 3, H, W), are black."""
    cells = (_cells(frame) for frame in clips.reshape(-1, *clips.shape[2:]))
    return all(each.mean() < _BLACK and np.abs(each - each.mean()).max() < _FLAT for each in cells)


def is_frozen(clips: npt.NDArray[np.uint8]) -> bool:
    """Return whether no cell changes between the frames of ``clips``, uint8 (N, T, 3, H, W)."""
    frames = clips.reshape(-1, *clips.shape[2:])
    lowest = highest = _cells(frames[0])
    for cells in map(_cells, frames[1:]):
        lowest, highest = np.minimum(lowest, cells), np.maximum(highest, cells)
        if (highest - lowest).max() >= _FROZEN:  # mostly so at the second frame
            return False
    return True


def _cells(frame: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Return means of luma (BT.601) over a grid, float64 (G, G) in grey levels; G is smaller for a tiny frame."""
    luma = np.tensordot(np.array([0.299, 0.587, 0.114]), frame, 1)
    rows, columns = (np.array_split(np.arange(side), min(_GRID, side)) for side in luma.shape)
    above = np.stack([luma[part].mean(0) for part in rows])
    return np.asarray(np.stack([above[:, part].mean(1) for part in columns], axis=1))


# --- Copies


class KnownFootage:
    """The run's videos by their perceptual hashes, None where there is none, to look for copies of them."""

    def __init__(self, hashes: Sequence[str | None], max_bits: int) -> None:
        self._max_bits, self._hashes = max_bits, hashes
        self._places = np.array([place for place, text in enumerate(hashes) if text is not None], np.int64)
        self._table = parse_hashes([text for text in hashes if text is not None and max_bits])[0]

    def copied(self, new: str | None) -> list[int]:
        """Return the places of the videos that show the same footage as a new video; none for 0 bits.

        A real and a fake made of it may both be found.
        """
        if new is None or not self._table.size:
            return []
        one, near = parse_hashes([new])[0][0], self._places
        if len(one) == self._table.shape[1]:
            near = near[nearly_alike(self._table, one, self._max_bits)]
        return [each for each in near.tolist() if near_duplicate_links([self._hashes[each], new], self._max_bits)]
