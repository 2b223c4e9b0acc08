"""Evidence on a judged file: its score over time, an occlusion map, and its provenance.

For the score over time the networks judge windows (short runs of frames) over the whole video;
``video/decode/views.py`` defines the windows.

An occlusion map shows how much each part of a clip raises the networks' logit of fake. A tile is a rectangle of the
picture over several frames. One tile at a time is deleted (blurred); the drop of the logit is the tile's value
(Zeiler and Fergus, "Visualizing and understanding convolutional networks", ECCV 2014). This works for any network. A
map can look convincing and mean nothing, so it must pass a deletion check: deleting the marked tiles must lower the
logit more than deleting tiles of the same shape elsewhere (after Petsiuk et al., "RISE", BMVC 2018).

One file is in memory at a time. If one kind of evidence fails, the kinds that were computed before it are still
returned.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from fvc_lib.metrics.calibration import probabilities
from fvc_lib.services.atomic_files import path_from_text
from fvc_lib.services.errors import DataError, FvcError
from fvc_lib.services.isolated_workers import run_isolated
from fvc_lib.services.stage_logs import Tell, silent
from fvc_lib.tasks.decoding import FileToScore, item_to_decode, scratch_folder
from fvc_lib.tasks.video.verdicts.rule import KnownVideos
from fvc_lib.tasks.video.verdicts.scoring import Networks
from fvc_lib.tasks.video.verdicts.untrusted import provenance_of, windows as decode_windows
from fvc_lib.video.clips.making import decode_limits, failure_of
from fvc_lib.video.clips.store import Pixels
from fvc_lib.video.decode.views import Windows

Floats = npt.NDArray[np.floating]
Masks = Sequence[npt.NDArray[np.bool_]]

NO_FRAMES = "The model sees features of the whole video and no frames, so it has no score over time and no map."
NO_NETWORK = "This is a video of the run, and the bundle does not have the network that had not seen it."
DECODE_SECONDS = 900.0  # the limit for a whole video
_DECODE = f"{decode_windows.__module__}:{decode_windows.__name__}"
FORENSIC_NOTE = " Between windows only the frames differ: forensic features are of the whole video."
TILES = 8  # per side of the picture
BLOCKS = 2  # parts of a clip in time; a tile covers the frames of one part
PLACEMENTS = 19  # moved copies of a map; so the smallest possible p-value is 1 / 20
MAX_P = 0.05
_SHARES = (0, 0.05, 0.1, 0.2, 0.35, 0.55, 1)  # shares of the tiles that the deletion check deletes
_FAR = 2  # a moved copy is moved by at least this many tiles, vertically or horizontally


@dataclass(frozen=True)
class WindowScores:
    """The score over time: one score per window (a short run of frames) and network.

    Attributes:
        begins, ends: float64 (N,), begin and end of each of the N windows in seconds from the video's first frame,
            ascending.
        scores: float64 (N, K), the calibrated probability of fake by each of K networks.
        middles: uint8 (N, 3, H, W), the middle frame of each window without black bars.
        seconds: length of the video.
        note: a sentence that says which share of the video's frames the windows show.
    """

    begins: Floats
    ends: Floats
    scores: Floats
    middles: Pixels
    seconds: float
    note: str


@dataclass(frozen=True)
class OcclusionMap:
    """A map of the parts of one clip that raise the networks' logit of fake.

    A tile is a rectangle of the picture over several frames. To delete a tile means to blur it. The value of a tile is
    proportional to the drop of the logit when it is deleted.

    Attributes:
        picture: uint8 (T, 3, H, W), the clip without black bars.
        values: float32 (T, H, W) in [0, 1]: the drop of the logit by each pixel's tile, divided by ``top``; 0 if the
            logit does not drop. None if no map was made.
        top: the largest drop of the logit by one tile.
        p_value: one-sided p-value of the deletion check, which tests whether deleting the marked tiles lowers the logit
            more than deleting tiles elsewhere. None if no map was made.
        why_hidden: why the map must not be shown; empty if it passed the check.
    """

    picture: Pixels
    values: npt.NDArray[np.float32] | None = None
    top: float = 0.0
    p_value: float | None = None
    why_hidden: str = ""


@dataclass
class FileEvidence:
    """The evidence on one file. ``clips``, ``windows`` and ``occlusion`` are None if they failed or do not apply.

    Attributes:
        provenance: sentences on the signed manifest of the file, or on why there is none.
        clips: uint8 (N, T, 3, H, W), the clips that the file's score was computed from, without black bars.
        windows: the score over time.
        occlusion: the map of the parts that raise the score.
        note: a sentence that says why evidence from frames is impossible for this file; empty if it is possible.
        failure: the error that stopped the computation of evidence from frames; empty if none. Another attempt may
            succeed.
    """

    provenance: tuple[str, ...] = ()
    clips: Pixels | None = None
    windows: WindowScores | None = None
    occlusion: OcclusionMap | None = None
    note: str = ""
    failure: str = ""


def file_evidence(
    networks: Networks, known: KnownVideos, row: Mapping[str, Any], *, map_minutes: float = 0.0, tell: Tell = silent
) -> FileEvidence:
    """Gather the evidence on one file: its provenance, its score over time and maybe an occlusion map.

    Args:
        networks: the networks that judged the file.
        known: the run's videos; a file among them is judged by the fold network that had not seen it.
        row: the file's row of VERDICTS, with a score.
        map_minutes: time limit for the occlusion map in minutes; 0: no map.
        tell: called with the name of the current step, the number of units done and their total.

    Raises:
        MemoryError: memory is full. An ``FvcError``, ``OSError``, ``ValueError`` or ``RuntimeError`` is not raised; its
            text becomes ``failure``.
    """
    path = path_from_text(row["path"])
    found = FileEvidence(provenance_of(path))
    own = known.rows.filter(content_sha256=row["sha256"]).drop_nulls("score")
    folds = (int(own["fold"][0]),) if own.height else networks.judges
    if not networks.sees_frames:
        found.note = NO_FRAMES
        return found
    if not set(folds) <= set(networks.folds):
        found.note = NO_NETWORK
        return found
    tell("decoding the whole video", 0, 0)
    try:
        with decoded(networks, path, row["sha256"]) as (windows, frames, forensic):
            clips = frames[windows.stored[: windows.num_clips]]
            picture = _picture(windows)
            found.clips = np.ascontiguousarray(clips[picture])
            found.windows = score_windows(networks, folds, windows, frames, forensic, tell)
            if map_minutes > 0:
                found.occlusion = occlusion_map(networks, folds, clips, picture, map_minutes, tell)
    except (FvcError, OSError, ValueError, RuntimeError) as error:
        found.failure = f"{type(error).__name__}: {error}"
    return found


# --- The score over time


@contextmanager
def decoded(
    networks: Networks, path: Path, content_sha256: str
) -> Iterator[tuple[Windows, Pixels, Mapping[str, float]]]:
    """Decode a whole video in a worker process, with the settings of the run's clips.

    Yields ``(windows, frames, forensic)``. ``windows`` states which frames each clip and window consists of. ``frames``
    are the frames, uint8 (F, 3, S, S), as a memory-mapped file that is deleted at the end. ``forensic`` are the video's
    forensic features by column; it is empty if the networks take none.

    Args:
        networks: the networks of a run or bundle, for their settings.
        path: the video.
        content_sha256: SHA-256 that the file's content must have.

    Raises:
        DataError: the video cannot be decoded within the limits, or its content is not ``content_sha256``.
        OSError: the frames cannot be written.
    """
    store, side = networks.store, networks.store.fixed_size
    with scratch_folder(networks.config) as folder:
        target = folder / "windows.raw"
        file = FileToScore(path, (), content_sha256=content_sha256)
        item = item_to_decode(store, file, target, networks.families)
        limits = decode_limits(store, 1, recipes=bool(store.recipe)) | {"timeout_seconds": DECODE_SECONDS}
        with closing(run_isolated(_DECODE, [item], **limits)) as answers:
            answer = next(answers)
        value: dict[str, Any] = answer.value or {}
        failure = f"the decoder gave up: {answer.detail}" if answer.failure else failure_of(value)
        if failure:
            raise DataError(failure)
        num_stored = int(value.pop("num_stored"))
        forensic = value.pop("forensic")
        value |= {name: np.array(rows) for name, rows in value.items() if isinstance(rows, list)}
        yield Windows(**value), np.memmap(target, np.uint8, "r", shape=(num_stored, 3, side, side)), forensic


def _picture(found: Windows) -> tuple[Any, slice, slice]:
    """Return an index into frames (..., S, S) of a video that selects the picture without its black bars.

    ``found`` are the windows of the video, which also state where the picture lies.
    """
    left, top, width, height = found.content
    return ..., slice(top, top + height), slice(left, left + width)


def score_windows(
    networks: Networks,
    folds: Sequence[int],
    found: Windows,
    frames: Pixels,
    forensic: Mapping[str, float],
    tell: Tell = silent,
) -> WindowScores:
    """Score every window (a short run of frames) by the networks of ``folds``, in batches of the run's size.

    Forensic features are those of the whole video in every window.

    Args:
        networks: the networks of the run or bundle.
        folds: numbers of the K folds whose networks judge.
        found: the windows, as ``decoded`` yields them.
        frames: the frames of the windows, uint8 (F, 3, S, S).
        forensic: the video's forensic features by column; empty if the networks take none.
        tell: called with the name of the step, the number of windows done and their total.
    """
    stored = found.stored[found.num_clips :]
    size = networks.batch_size
    logits = np.empty((len(stored), len(folds)))
    for first in range(0, len(stored), size):
        tell("judging windows over the whole video", first, len(stored))
        batch = slice(first, first + size)
        some = np.asarray(frames[stored[batch]])[:, None]
        logits[batch] = networks.logits(folds, some)
    logits += [networks.forensic_logit(fold, forensic) for fold in folds]
    logits /= [networks.folds[fold].temperature for fold in folds]
    picture = _picture(found)
    middles = [frames[row[len(row) // 2]] for row in stored]
    return WindowScores(
        begins=found.begins[found.num_clips :],
        ends=found.ends[found.num_clips :],
        scores=probabilities(logits, 1.0),
        middles=np.stack([frame[picture] for frame in middles]),
        seconds=found.seconds,
        note=_note(found) + (FORENSIC_NOTE if networks.families else ""),
    )


def _note(found: Windows) -> str:
    places = found.places[found.num_clips :]
    num_frames = found.num_source_frames
    if len(places) == 1:
        return f"No score over time: the video's {num_frames:,} frames give one window."
    covered = 100 * len(np.unique(places)) / num_frames
    return f"{len(places)} windows; together they show {covered:.0f} % of the video's frames."


# --- The occlusion map


def occlusion_map(
    networks: Networks,
    folds: Sequence[int],
    clips: Pixels,
    picture: tuple[Any, slice, slice] = np.s_[..., :, :],
    max_minutes: float = np.inf,
    tell: Tell = silent,
) -> OcclusionMap:
    """Return the occlusion map of the clip with the highest mean logit over networks.

    The map shows how much each tile of the clip raises that logit. It is the same in every call.

    Args:
        networks: the networks of a run or bundle.
        folds: numbers of the folds; the map explains the mean logit of their networks.
        clips: uint8 (N, T, 3, S, S), as the networks see them.
        picture: index that cuts the black bars off frames (..., S, S).
        max_minutes: time limit in minutes; no map is made if a timed batch shows that it would take longer.
        tell: called with the name of the step, the number of clips judged and their total.

    Raises:
        FvcError: a network cannot be built or loaded.
    """
    whole = networks.raw_logits(folds, clips).mean(1)
    clip = clips[int(whole.argmax())]
    size = networks.batch_size
    done = 0
    seen = np.ascontiguousarray(clip[picture])
    tile_of_pixel, shape = _tiles(seen)
    num_tiles = int(np.prod(shape))

    num_in_check = 2 + (1 + PLACEMENTS) * (len(_SHARES) - 2)
    num_passes = 1 + num_tiles + num_in_check
    begin = time.perf_counter()
    networks.raw_logits(folds, np.repeat(clip[None], size, axis=0))
    minutes = (time.perf_counter() - begin) / size * num_passes / 60
    if minutes > max_minutes:
        why = f"it would take about {math.ceil(minutes):,} minutes on this machine, and {max_minutes:.2g} are allowed"
        return OcclusionMap(seen, why_hidden=f"{why} (--map-minutes)")
    # Each pixel of a deleted tile becomes the mean of a square around it, an eighth of the clip wide.
    reach = clip.shape[-1] // 16
    means = F.avg_pool2d(torch.from_numpy(seen).float(), 2 * reach + 1, 1, reach, count_include_pad=False)
    blurred = means.round().byte().numpy()

    def mean_logits(masks: Masks) -> Floats:
        """Return the logits of the clip after deleting tiles, float64 (M,), averaged over the networks of ``folds``.

        ``masks`` are M masks (num_tiles,); True means that the tile is deleted.
        """
        nonlocal done
        logits = np.zeros(len(masks))
        for first in range(0, len(masks), size):
            some = masks[first : first + size]
            batch = np.repeat(clip[None], len(some), axis=0)
            batch[picture] = [np.where(mask[tile_of_pixel][:, None], blurred, seen) for mask in some]
            logits[first : first + size] = networks.raw_logits(folds, batch).mean(1)
            done += len(some)
            tell("mapping where it looks fake", done, num_passes)
        return logits

    before, *after = mean_logits([np.zeros(num_tiles, bool), *np.eye(num_tiles, dtype=bool)])
    drops = np.reshape(before - np.array(after), shape)
    top = float(drops.max())
    if not top > 0:
        return OcclusionMap(seen, why_hidden="deleting a tile lowers the score nowhere in the clip")
    p_value, why_hidden = _deletion_check(mean_logits, drops), ""
    if p_value > MAX_P:
        why_hidden = (
            "deleting the marked tiles lowers the score no more than deleting as much elsewhere "
            f"(p = {p_value:.2f}, at most {MAX_P:g} is allowed)"
        )
    values = np.clip(drops.ravel()[tile_of_pixel] / top, 0, None).astype(np.float32)
    return OcclusionMap(seen, values, top, p_value, why_hidden)


def _tiles(picture: Pixels) -> tuple[npt.NDArray[np.intp], tuple[int, ...]]:
    """Divide a clip into tiles; return ``(tile_of_pixel, shape)``.

    ``tile_of_pixel`` is the number of each pixel's tile, int (T, H, W). ``shape`` is the number of tiles along time,
    height and width. An axis with fewer pixels than tiles has a tile for each pixel.

    Args:
        picture: the clip, uint8 (T, 3, H, W).
    """
    sides = len(picture), *picture.shape[2:]
    shape = tuple(min(wanted, side) for wanted, side in zip((BLOCKS, TILES, TILES), sides, strict=True))
    parts = [np.arange(side) * number // side for number, side in zip(shape, sides, strict=True)]
    tile_of_pixel = np.ravel_multi_index(np.ix_(*parts), shape)
    return np.asarray(tile_of_pixel), shape


def _deletion_check(mean_logits: Callable[[Masks], Floats], drops: Floats) -> float:
    """Return the p-value of a map, by a rank test against moved copies of the map.

    Tiles are deleted in descending order of their values. The statistic is the area under the curve of the logit over
    the deleted share of tiles. A small area means that the first deleted tiles matter most. The p-value is the share of
    all maps, the original included, whose area is at most that of the original.

    Args:
        mean_logits: function that returns the logits (M,) after deleting the True tiles of M masks.
        drops: the map, float (blocks, rows, columns): the drop of the logit by each tile.
    """
    counts = sorted({round(share * drops.size) for share in _SHARES})
    maps = [drops, *_elsewhere(drops)]
    masks = [np.zeros(drops.size, bool), np.ones(drops.size, bool)]
    for values in maps:
        rank = np.argsort(np.argsort(-values.ravel(), kind="stable"))
        masks += [rank < count for count in counts[1:-1]]
    begin, end, *inner = mean_logits(masks)
    between = np.reshape(inner, (len(maps), -1))
    first = np.full((len(maps), 1), begin)
    last = np.full((len(maps), 1), end)
    curves = np.hstack([first, between, last])
    shares = np.array(counts) / drops.size
    area, *others = np.trapezoid(curves, shares)
    return float((1 + np.sum(others <= area)) / len(maps))


def _elsewhere(drops: Floats) -> Iterator[Floats]:
    """Yield up to ``PLACEMENTS`` copies of a map, moved cyclically and at random within the picture.

    Every copy is moved by at least ``_FAR`` tiles, vertically or horizontally.

    Args:
        drops: the map, float (blocks, rows, columns) of tiles.
    """
    height, width = drops.shape[1:]
    down, right = np.indices((height, width))
    tiles_down = np.minimum(down, height - down)
    tiles_right = np.minimum(right, width - right)
    far = np.argwhere(np.maximum(tiles_down, tiles_right) >= _FAR)
    shifts = np.random.default_rng(0).permutation(far)
    for shift in shifts[:PLACEMENTS]:
        yield np.roll(drops, tuple(shift), (1, 2))
