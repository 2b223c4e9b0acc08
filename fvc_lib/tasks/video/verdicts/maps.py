"""Where in its frames a clip is called fake: maps, each shown only if it passes two checks of its own.

- Occlusion (Zeiler and Fergus, "Visualizing and understanding convolutional networks", ECCV 2014), for any network:
  how much the logit drops when a tile of the picture is deleted.
- Grad-CAM (Selvaraju et al., ICCV 2017), on the last feature map of the blocks that a network names.
- Integrated gradients (Sundararajan et al., ICML 2017), from the clip with everything deleted to the clip.

A map can look convincing and say nothing about the network (Adebayo et al., "Sanity checks for saliency maps", NeurIPS
2018). So each is compared with maps of the same networks with re-drawn weights, and deleting what it marks must lower
the logit more than deleting as much, in the same shape, elsewhere (after Petsiuk et al., "RISE", BMVC 2018).
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fvc_lib.engine.device import deterministic_algorithms, release_cached_memory
from fvc_lib.engine.oom_detection import is_out_of_memory
from fvc_lib.services.errors import UsageError
from fvc_lib.services.progress import Tell, silent
from fvc_lib.tasks.video.verdicts.scoring import Networks
from fvc_lib.video.clips.clip_file import Pixels

Floats = npt.NDArray[np.float64]

TILES = 8  # a side
BLOCKS = 2  # of frames; a tile is deleted in one of them at a time
DRAWS = 5  # of re-drawn weights
PLACEMENTS = 19  # the same shape elsewhere: the least possible p is 1 / 20
MOST_ALIKE = 0.6  # mean size of the rank correlation with maps of re-drawn weights
MOST_P = 0.05  # of deletion
_SHARES = (0.05, 0.1, 0.2, 0.35, 0.55)  # of the clip that is deleted, or brought back
_STEPS = 16  # of integrated gradients
_TIMED = 3
_PART = "making maps of where it looks fake"

LIMIT = (
    "A map says what moved these networks' score in this clip, not what was forged: they may be moved by a trace that "
    "forgery and honest editing share, may need only a part of what was changed, and find changes in time, such as cut "
    "or repeated frames, in no one place. A tile is the finest that is told apart."
)

OCCLUSION, GRAD_CAM, INTEGRATED_GRADIENTS = "Occlusion", "Grad-CAM", "Integrated gradients"


_MEANINGS = {
    OCCLUSION: "How far the logit drops, the mean over the networks, when a tile is deleted.",
    GRAD_CAM: "How much the features in a tile, in the networks' last map of them, raise the logit.",
    INTEGRATED_GRADIENTS: "How much of the logit a tile's pixels bring on the way from an emptied clip to this one.",
}


@dataclass(frozen=True)
class Curve:
    """The logit while more and more of the clip is deleted, or brought back to a clip where all is deleted.

    Attributes:
        shares: float64 (P,), of the clip, from 0 to 1.
        logits: float64 (P,), what the map marks most coming first.
        others: float64 (R, P), the same shapes elsewhere first: the map shifted around and mirrored.
    """

    shares: Floats
    logits: Floats
    others: Floats

    @property
    def area(self) -> float:
        """Under the curve: its mean logit."""
        return float(np.trapezoid(self.logits, self.shares))

    @property
    def other_areas(self) -> Floats:
        """float64 (R,), likewise."""
        return np.asarray(np.trapezoid(self.others, self.shares, axis=1))

    def p_lower(self) -> float:
        """One-sided, by rank: how often the same shape elsewhere gives a curve at least as low."""
        return _rank_p(self.other_areas <= self.area)

    def p_higher(self) -> float:
        """At least as high."""
        return _rank_p(self.other_areas >= self.area)


def _rank_p(as_far: npt.NDArray[np.bool_]) -> float:
    return (1 + int(as_far.sum())) / (1 + len(as_far))


@dataclass(frozen=True)
class EvidenceMap:
    """Where a clip is called fake, by one method, and whether the map may be believed.

    Attributes:
        method: its name.
        values: float32 (T, S, S) in [0, 1], the same all over a tile; 0 where nothing speaks for fake.
        top: what 1 stands for, in logits; None where the method has no unit.
        alike: mean size of Spearman's rank correlation with the maps of re-drawn weights; None: not compared.
        deletion, insertion: what is marked deleted from the clip, or brought back first; None: not tried.
        num_passes: forward passes of one clip through one network that map and checks took.
        why_not: why it is not shown; empty: it is.
    """

    method: str
    values: npt.NDArray[np.float32]
    top: float | None = None
    alike: float | None = None
    deletion: Curve | None = None
    insertion: Curve | None = None
    num_passes: int = 0
    why_not: str = ""

    @property
    def shown(self) -> bool:
        """Whether it passed its checks."""
        return not self.why_not

    @property
    def meaning(self) -> str:
        """What a high value says, in a sentence."""
        return _MEANINGS[self.method]

    def check_sentences(self) -> tuple[str, ...]:
        """What its checks found, in numbers; nothing where they were not made."""
        if self.alike is None or self.deletion is None or self.insertion is None:
            return ()
        drawn = f"Maps of {DRAWS} networks with re-drawn weights are other ones: mean size of the rank correlation"
        found = [f"{drawn} {self.alike:.2f} (at most {MOST_ALIKE:g})."]
        for name, curve, p in (
            ("deleted", self.deletion, self.deletion.p_lower()),
            ("brought back to an emptied clip", self.insertion, self.insertion.p_higher()),
        ):
            others = curve.other_areas
            found.append(
                f"What it marks {name} first: mean logit {curve.area:.2f}; in {len(others)} other places "
                f"{others.min():.2f} to {others.max():.2f} (p = {p:.2f})."
            )
        return *found, f"Map and checks took {self.num_passes:,} forward passes."


def maps_of(
    networks: Networks,
    folds: Sequence[int],
    clip: Pixels,
    *,
    tiles: int = TILES,
    blocks: int = BLOCKS,
    tell: Tell = silent,
) -> tuple[EvidenceMap, ...]:
    """One map per method, with its checks; a method that a network does not allow says so in ``why_not``.

    The same on every call. Memory is that of the networks' own micro-batch; gradients take one clip at a time.

    Args:
        networks: of a run or bundle.
        folds: whose networks' mean logit is explained.
        clip: uint8 (T, 3, S, S), as the networks see it.
        tiles: T, S are cut into so many tiles a side.
        blocks: and so many blocks of frames.
        tell: is told how many forward passes are done, of at most how many.

    Raises:
        FvcError: as ``Networks.logits``.
    """
    most = num_passes(len(folds), tiles=tiles, blocks=blocks)
    asked = _Asked(
        networks, tuple(folds), clip, _Cells.of(clip, tiles, blocks), lambda done: tell(_PART, min(done, most), most)
    )
    makers: dict[str, Callable[[_Asked, nn.Module], Floats]] = {
        OCCLUSION: _occlusion,
        GRAD_CAM: _grad_cam,
        INTEGRATED_GRADIENTS: _integrated_gradients,
    }
    return tuple(_checked(asked, method, make) for method, make in makers.items())


@dataclass(frozen=True)
class ClipMaps:
    """The maps of one clip.

    Attributes:
        clip: uint8 (T, 3, S, S).
        maps: one per method; none where they were not made.
        note: why not.
    """

    clip: Pixels
    maps: tuple[EvidenceMap, ...] = ()
    note: str = ""


def maps_within(
    networks: Networks, folds: Sequence[int], clips: Pixels, most_minutes: float, tell: Tell = silent
) -> ClipMaps:
    """Maps of that one of ``clips``, uint8 (N, T, 3, S, S), which the networks find most fake; ``tell`` as ``maps_of``.

    Where the quickest of three batches tells that all passes would take longer than ``most_minutes``, there are none.

    Raises:
        FvcError: as ``Networks.logits``.
    """
    logits = np.mean([networks.raw_logits(networks.network(fold), clips) for fold in folds], axis=0)
    clip = clips[int(logits.argmax())]
    batch = np.repeat(clip[None], networks.batch_size, axis=0)
    seconds = []
    for _ in range(_TIMED):
        begin = time.perf_counter()
        networks.raw_logits(networks.network(folds[0]), batch)
        seconds.append(time.perf_counter() - begin)
    minutes = min(seconds) / len(batch) * num_passes(len(folds)) / 60
    if minutes > most_minutes:
        return ClipMaps(
            clip, note=f"Not made: maps would take this machine about {np.ceil(minutes):,.0f} minutes for this video, "
            f"and {most_minutes:.2g} were allowed (--map-minutes)."
        )  # fmt: skip
    return ClipMaps(clip, maps_of(networks, folds, clip, tell=tell))


def num_passes(num_folds: int, *, tiles: int = TILES, blocks: int = BLOCKS) -> int:
    """Forward passes of one clip through one network that ``maps_of`` takes at most; a backward pass counts as two."""
    occlusion = (num_folds + DRAWS) * (1 + blocks * tiles**2)
    gradients = (num_folds + DRAWS) * 3 * (_STEPS + 2)
    curves = 3 * 2 * num_folds * (2 + (1 + PLACEMENTS) * len(_SHARES))
    return occlusion + gradients + curves


class _NotPossibleError(Exception):
    """The method cannot be had of this network; the message says why."""


def _checked(asked: "_Asked", method: str, make: Callable[["_Asked", nn.Module], Floats]) -> EvidenceMap:
    nothing = EvidenceMap(method, np.zeros(asked.cells.of_pixel.shape, np.float32))
    before = asked.num_passes
    try:
        each = [make(asked, asked.networks.network(fold)) for fold in asked.folds]
        in_cells = np.mean(each, axis=0)
        if not in_cells.max() > 0:
            none = "no part of the clip speaks for fake: whatever is deleted, the score does not fall"
            return replace(nothing, num_passes=asked.num_passes - before, why_not=none)
        redrawn = [make(asked, network) for network in asked.redrawn()]
    except _NotPossibleError as error:
        return replace(nothing, num_passes=asked.num_passes - before, why_not=str(error))
    alike = float(np.mean([abs(_rank_correlation(in_cells, other)) for other in redrawn]))
    deletion, insertion = (_curve(asked, in_cells, inserts=inserts) for inserts in (False, True))
    return EvidenceMap(
        method=method,
        values=np.clip(asked.cells.spread(in_cells / in_cells.max()), 0, None).astype(np.float32),
        top=float(in_cells.max()) if method == OCCLUSION else None,
        alike=alike,
        deletion=deletion,
        insertion=insertion,
        num_passes=asked.num_passes - before,
        why_not=_why_not(alike, deletion),
    )


def _why_not(alike: float, deletion: Curve) -> str:
    failed = []
    if not alike <= MOST_ALIKE:
        failed.append(
            f"networks with re-drawn weights, which have learned nothing, give a map like it (rank correlation "
            f"{alike:.2f}, at most {MOST_ALIKE:g} is allowed)"
        )
    if deletion.p_lower() > MOST_P:
        failed.append(
            f"deleting what it marks lowers the score no more than deleting as much elsewhere (p = "
            f"{deletion.p_lower():.2f}, at most {MOST_P:g} is allowed)"
        )
    return "; ".join(failed)


def _rank_correlation(one: Floats, other: Floats) -> float:
    """Spearman's, of all entries; 0 where one of them is constant."""
    from scipy.stats import rankdata  # half a second to load

    ranks = [rankdata(each) - (each.size + 1) / 2 for each in (one.ravel(), other.ravel())]
    size = float(np.sqrt((ranks[0] ** 2).sum() * (ranks[1] ** 2).sum()))
    return float(ranks[0] @ ranks[1]) / size if size else 0.0


# --- What is asked of the networks


@dataclass(frozen=True)
class _Cells:
    """The clip cut into blocks of frames, and each into tiles.

    Attributes:
        shape: blocks, rows and columns.
        of_pixel: int64 (T, S, S), the number of the cell that a pixel is in.
    """

    shape: tuple[int, int, int]
    of_pixel: npt.NDArray[np.int64]

    @classmethod
    def of(cls, clip: Pixels, tiles: int, blocks: int) -> "_Cells":
        """At most one block per frame and one tile per pixel; black bars belong to the tiles beside them."""
        num_frames, _, height, width = clip.shape
        block = _parts(slice(0, num_frames), blocks, num_frames)
        row, column = (_parts(part, tiles, side) for part, side in zip(picture_of(clip), (height, width), strict=True))
        shape = (int(block[-1]) + 1, int(row[-1]) + 1, int(column[-1]) + 1)
        return cls(shape, (block[:, None, None] * shape[1] + row[:, None]) * shape[2] + column)

    def sums(self, values: Floats) -> Floats:
        """float64 (blocks, rows, columns), of values (T, S, S)."""
        found = np.bincount(self.of_pixel.ravel(), values.ravel(), int(np.prod(self.shape)))
        return np.asarray(found.reshape(self.shape))

    def spread(self, sums: Floats) -> Floats:
        """float64 (T, S, S), each pixel its cell's."""
        return np.asarray(sums.ravel()[self.of_pixel])


class _Asked:
    """A clip, and the logits of what is left of it; counts what that costs."""

    def __init__(
        self,
        networks: Networks,
        folds: tuple[int, ...],
        clip: Pixels,
        cells: _Cells,
        tell: Callable[[int], None] = lambda _done: None,
    ) -> None:
        self._tell = tell
        self.networks, self.folds, self.clip, self.cells = networks, folds, clip, cells
        self.empty = without_detail(clip)
        self.num_passes = 0

    def logits(self, network: nn.Module, deleted: Sequence[npt.NDArray[np.bool_]]) -> Floats:
        """float64 (N,), of the clip without the cells that each of ``deleted``, bool (cells,), names."""
        found, size = [], self.networks.batch_size
        for first in range(0, len(deleted), size):
            gone = [cells[self.cells.of_pixel][:, None] for cells in deleted[first : first + size]]
            clips = np.stack([np.where(each, self.empty, self.clip) for each in gone])
            found.append(self.networks.raw_logits(network, clips))
            self.num_passes += len(clips)
            self._tell(self.num_passes)
        return np.concatenate(found)

    def mean_logits(self, deleted: Sequence[npt.NDArray[np.bool_]]) -> Floats:
        """Likewise, the mean over the folds' networks."""
        return np.asarray(np.mean([self.logits(self.networks.network(f), deleted) for f in self.folds], axis=0))

    def redrawn(self) -> Iterator[nn.Module]:
        """``DRAWS`` networks with re-drawn weights, of the folds in turn."""
        for draw in range(DRAWS):
            yield with_redrawn_weights(self.networks.network(self.folds[draw % len(self.folds)]), draw)


def _parts(part: slice, number: int, side: int) -> npt.NDArray[np.int64]:
    """int64 (side,): which of at most ``number`` equal parts of ``part`` a place is in, or is nearest to."""
    length = part.stop - part.start
    places = np.clip(np.arange(side) - part.start, 0, length - 1)
    return np.asarray(places * min(number, length) // length)


def picture_of(clip: Pixels) -> tuple[slice, slice]:
    """Rows and columns of the picture; beyond it all frames are black, as letterboxing leaves them."""
    brightest = clip.max((0, 1))
    found = [np.flatnonzero(brightest.max(axis)) for axis in (1, 0)]
    rows, columns = (
        slice(int(each[0]), int(each[-1]) + 1) if each.size else slice(0, side)
        for each, side in zip(found, brightest.shape, strict=True)
    )
    return rows, columns


def without_detail(clip: Pixels) -> Pixels:
    """What stands where something is deleted, uint8 (T, 3, S, S): each frame's mean over an eighth of its side."""
    empty, (rows, columns) = clip.copy(), picture_of(clip)
    side = max(1, clip.shape[-1] // 8) // 2 * 2 + 1
    picture = torch.from_numpy(clip[..., rows, columns]).float()
    means = F.avg_pool2d(picture, side, 1, side // 2, count_include_pad=False)
    empty[..., rows, columns] = means.round().byte().numpy()
    return empty


def with_redrawn_weights(network: nn.Module, seed: int) -> nn.Module:
    """A copy whose parameters have their own entries in a random order: as large as before, with nothing learned."""
    drawn = copy.deepcopy(network)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drawn.parameters():
            order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
            parameter.copy_(parameter.flatten()[order].view_as(parameter))
    return drawn


# --- The methods: each gives float64 (blocks, rows, columns) for one network, positive where something speaks for fake


def _occlusion(asked: _Asked, network: nn.Module) -> Floats:
    num_cells = int(np.prod(asked.cells.shape))
    whole, *others = asked.logits(network, [np.zeros(num_cells, bool), *np.eye(num_cells, dtype=bool)])
    return np.reshape(whole - np.array(others), asked.cells.shape)


def _integrated_gradients(asked: _Asked, network: nn.Module) -> Floats:
    device = asked.networks.compute.device
    begin, end = (torch.from_numpy(each).to(device).float() for each in (asked.empty, asked.clip))
    total = torch.zeros_like(end)
    with _gradients(asked, INTEGRATED_GRADIENTS):
        if not _takes_floats(asked, network):
            raise _NotPossibleError("this network takes no pixels in between, so no gradient goes through them")
        for step in range(_STEPS):
            pixels = (begin + (end - begin) * ((step + 0.5) / _STEPS)).unsqueeze(0).requires_grad_()
            logit = network(pixels).sum()
            (gradient,) = torch.autograd.grad(logit, pixels, allow_unused=True) if logit.requires_grad else (None,)
            if gradient is None:
                raise _NotPossibleError("no gradient reaches the pixels of this network")
            total += gradient[0]
            asked.num_passes += 1
    return asked.cells.sums(((end - begin) * total / _STEPS).sum(1).double().cpu().numpy())


def _takes_floats(asked: _Asked, network: nn.Module) -> bool:
    """Whether it says the same of pixels as float32 as of uint8."""
    clip = torch.from_numpy(asked.clip).unsqueeze(0).to(asked.networks.compute.device)
    with torch.no_grad():
        try:
            as_bytes, as_floats = float(network(clip)), float(network(clip.float()))
        except Exception as error:  # whatever a user's network refuses them with
            if is_out_of_memory(error):
                raise
            return False
    asked.num_passes += 2
    return abs(as_bytes - as_floats) <= 1e-3 * (1 + abs(as_bytes))


def _grad_cam(asked: _Asked, network: nn.Module) -> Floats:
    try:
        blocks: Sequence[nn.Module] = network.recomputable_blocks()  # type: ignore[operator]
    except (AttributeError, UsageError):
        blocks = ()
    num_frames, _, side, _ = asked.clip.shape
    seen: list[Tensor] = []

    def keep(_block: nn.Module, _inputs: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor) or as_feature_map(first, num_frames) is None:
            return None
        leaf = first.detach().requires_grad_()
        seen.append(leaf)
        return (leaf, *output[1:]) if isinstance(output, tuple) else leaf

    hooks = [block.register_forward_hook(keep) for block in blocks]
    try:
        with _gradients(asked, GRAD_CAM):
            logit = network(torch.from_numpy(asked.clip).unsqueeze(0).to(asked.networks.compute.device)).sum()
            asked.num_passes += 1
            used = logit.requires_grad and seen
            (gradient,) = torch.autograd.grad(logit, seen[-1], allow_unused=True) if used else (None,)
    finally:
        for hook in hooks:
            hook.remove()
    if gradient is None:
        raise _NotPossibleError("this network names no block that gives a map of features")
    features, slopes = (as_feature_map(each, num_frames) for each in (seen[-1].detach(), gradient))
    assert features is not None
    assert slopes is not None
    weights = slopes.mean((1, 2, 3), keepdim=True)  # of each channel
    heat = (weights * features).sum(0)  # (T', h, w)
    sized = F.interpolate(heat[None, None], (num_frames, side, side), mode="trilinear", align_corners=False)[0, 0]
    return asked.cells.sums(sized.double().cpu().numpy())


def as_feature_map(output: Tensor, num_frames: int) -> Tensor | None:
    """(C, T', h, w) of what a block gives for one clip, h and w above 1; None where it has no such shape.

    Known are (1, C, T', h, w), (T, C, h, w), both also with channels last, and square grids of tokens, (T, N, C) and
    (1, T' N, C), perhaps after one token for the class.
    """
    found = None
    if output.dim() == 5 and len(output) == 1:
        last = output.shape[2] == output.shape[3] != output.shape[4]
        found = output[0].movedim(-1, 0) if last else output[0]
    elif output.dim() == 4 and len(output) == num_frames:
        last = output.shape[1] == output.shape[2] != output.shape[3]
        found = output.movedim(-1, 0) if last else output.transpose(0, 1)
    elif output.dim() == 3 and len(output) in (1, num_frames):
        steps = (1,) if len(output) == num_frames else (num_frames, num_frames // 2, 1)
        for extra, parts in ((extra, parts) for extra in (0, 1) for parts in steps if parts):
            grid, left = divmod(output.shape[1] - extra, parts)
            side = int(grid**0.5)
            if not left and side * side == grid and side > 1:
                tokens = output[:, extra:].reshape(len(output) * parts, side, side, -1)
                return tokens.movedim(-1, 0)
    return found if found is not None and min(found.shape[-2:]) > 1 else None


@contextmanager
def _gradients(asked: _Asked, method: str) -> Iterator[None]:
    """As scoring, with gradients; out of memory becomes ``_NotPossibleError``."""
    device = asked.networks.compute.device
    try:
        # cuDNN has no backward pass of recurrent heads in evaluation mode.
        with torch.enable_grad(), deterministic_algorithms(device), torch.backends.cudnn.flags(enabled=False):
            yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        release_cached_memory(device)
        raise _NotPossibleError(f"there is not memory enough for {method}") from error


# --- Deletion and insertion


def _curve(asked: _Asked, heat: Floats, *, inserts: bool) -> Curve:
    """Of the cells in the order of ``heat`` (blocks, rows, columns), beside the same order elsewhere."""
    counts = sorted({round(share * heat.size) for share in (0, *_SHARES, 1)})
    first, last = np.full(heat.size, inserts), np.full(heat.size, not inserts)
    asked_for = [first, last]
    for each in (heat, *_elsewhere(heat)):
        order = np.argsort(-each.ravel(), kind="stable")
        for count in counts[1:-1]:
            asked_for.append(first.copy())
            asked_for[-1][order[:count]] = not inserts
    begin, end, *inner = asked.mean_logits(asked_for)
    rows = np.array(inner).reshape(1 + PLACEMENTS, -1)
    rows = np.pad(rows, ((0, 0), (1, 1)), constant_values=((0, 0), (begin, end)))
    return Curve(np.array(counts) / heat.size, rows[0], rows[1:])


_MARKED, _OVERLAP, _TRIES = 0.2, 0.5, 1000


def _elsewhere(heat: Floats) -> Iterator[Floats]:
    """``PLACEMENTS`` times the same shape in another place: shifted around the borders, perhaps mirrored.

    Of the fifth that ``heat`` marks most at most half is marked again, as far as ``_TRIES`` find such places.
    """
    generator, size = np.random.default_rng(0), min(round(_MARKED * heat.size), int((heat > 0).sum()))
    marked = np.argsort(-heat.ravel(), kind="stable")[:size]
    for _ in range(PLACEMENTS):
        for _ in range(_TRIES):
            shift = tuple(int(generator.integers(side)) for side in heat.shape)
            axes = tuple(axis for axis in (1, 2) if generator.integers(2))
            moved = np.flip(np.roll(heat, shift, (0, 1, 2)), axes)
            again = np.argsort(-moved.ravel(), kind="stable")[:size]
            if np.intersect1d(marked, again).size <= _OVERLAP * size:
                break
        yield moved
