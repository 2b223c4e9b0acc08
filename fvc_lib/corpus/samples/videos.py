"""A small corpus of synthetic real and fake clips, generated on the spot.

Nothing in it was filmed: it lets the whole pipeline run, and shows that leakage, controls and intervals are reported
honestly, on any machine and without a download. It says nothing about detecting forgeries in the wild.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from fvc_lib.corpus.samples import files, scenes
from fvc_lib.corpus.samples.files import Encoding, PlannedFiles, decode_frames, split_planes
from fvc_lib.corpus.samples.scenes import Camera, Plane, Planes, Shot
from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.config import RunConfig

# The manipulations that make fakes of generated footage, planar yuv420p, uint8 (T, 3*H/2, W). They are strong enough to
# be seen in six frames of 112 pixels: the corpus shows that a pipeline learns, not how hard real forgeries are. Each
# takes the footage that is changed, which it does not write to, footage of the same shape from another place and
# camera, and what chooses where and when.

Mask = npt.NDArray[np.bool_]


def splice_region(base: Planes, donor: Planes, rng: np.random.Generator) -> Planes:
    """A moving part of the view is replaced by the donor's, whose grain and texture are another camera's."""
    forged = base.copy()
    for t, mask in enumerate(_moving_region(base, rng)):
        _paste(forged[t], donor[t], mask)
    return forged


def resynthesise_region(base: Planes, donor: Planes, rng: np.random.Generator) -> Planes:
    """A moving part of the view is generated anew at low resolution: no grain, but an upsampler's lattice."""
    del donor
    forged = base.copy()
    height, width = base.shape[1] * 2 // 3, base.shape[2]
    factor = max(4, 4 * round(min(height, width) / 72))
    lattice = _lattice(height, width, max(4, 2 * round(max(height, width) / 56)), rng.uniform(7, 12))
    for t, mask in enumerate(_moving_region(base, rng)):
        luma = split_planes(base[t])[0]
        coarse = scenes.resize_plane(luma, height // factor, width // factor)
        smooth = np.clip(np.rint(scenes.resize_plane(coarse, height, width) + lattice), 16, 235).astype(np.uint8)
        np.copyto(split_planes(forged[t])[0], smooth, where=mask)
    return forged


def duplicate_frames(base: Planes, donor: Planes, rng: np.random.Generator) -> Planes:
    """One frame is repeated for about half of the clip: what happened meanwhile is hidden."""
    del donor
    length = round(len(base) * rng.uniform(0.45, 0.6))
    start = int(rng.integers(0, len(base) - length + 1))
    source = np.arange(len(base))
    source[start : start + length] = start
    return base[source]


def drop_frames(base: Planes, donor: Planes, rng: np.random.Generator) -> Planes:
    """Most frames are dropped at several places, and the gaps filled by holding the last frame that is left."""
    del donor
    hold = max(2, round(len(base) * rng.uniform(0.28, 0.36)))
    source = np.arange(len(base))
    phase = int(rng.integers(0, hold))
    held = np.maximum(source - (source + phase) % hold, 0)
    return np.asarray(base[held])


def splice_time(base: Planes, donor: Planes, rng: np.random.Generator) -> Planes:
    """A stretch of a third to a half of the clip is replaced by other footage."""
    length = round(len(base) * rng.uniform(0.34, 0.5))
    start = int(rng.integers(len(base) // 6, len(base) - length + 1))
    forged = base.copy()
    forged[start : start + length] = donor[start : start + length]
    return forged


MANIPULATIONS: dict[str, Callable[[Planes, Planes, np.random.Generator], Planes]] = {
    "region_splice": splice_region,
    "local_resynthesis": resynthesise_region,
    "frame_duplication": duplicate_frames,
    "frame_drop": drop_frames,
    "temporal_splice": splice_time,
}
USES_DONOR = frozenset({"region_splice", "temporal_splice"})  # the others leave their donor unread


def _moving_region(frames: Planes, rng: np.random.Generator) -> list[Mask]:
    """One mask (H, W) per frame: a blob of a fifth to a third of the view, wandering in a straight line."""
    height, width = frames.shape[1] * 2 // 3, frames.shape[2]
    half_area = rng.uniform(0.20, 0.32) / np.pi
    stretch = rng.uniform(0.75, 1.35)
    half_height, half_width = np.sqrt(half_area) * stretch * height, np.sqrt(half_area) / stretch * width
    margin = 0.25
    begin, end = rng.uniform(margin, 1 - margin, (2, 2))
    rows, columns = np.arange(height)[:, None], np.arange(width)
    masks = []
    for share in np.linspace(0, 1, len(frames)):
        row, column = (begin + (end - begin) * share) * (height, width)
        distance = ((rows - row) / half_height) ** 2 + ((columns - column) / half_width) ** 2
        masks.append(distance <= 1)
    return masks


def _paste(target: Planes, source: Planes, mask: Mask) -> None:
    for to_plane, from_plane in zip(split_planes(target), split_planes(source), strict=True):
        step = mask.shape[0] // to_plane.shape[0]
        np.copyto(to_plane, from_plane, where=mask[::step, ::step])


def _lattice(height: int, width: int, period: int, amplitude: float) -> Plane:
    """A checkerboard (H, W) of +-amplitude with the given period in pixels."""
    rows = (np.arange(height) // (period // 2) % 2)[:, None]
    columns = np.arange(width) // (period // 2) % 2
    return np.where(rows == columns, np.float32(amplitude), np.float32(-amplitude))


# The plan of the corpus. What a file's metadata shows is drawn without regard to the label, and not dealt in equal
# shares: a cross-validated classifier of perfectly balanced metadata scores far below chance (AUC 0.2 to 0.3).

# Any change that alters a byte of the corpus needs another version: finished corpora are recognised by it.
CORPUS_VERSION = "2"
DESIGN_SEED = 15

EVENTS_PER_LABEL = 20
_SIZES = ((240, 180), (176, 240), (256, 144), (208, 208), (288, 216))
_RATES = (12, 15, 20, 24, 30)
_CONTAINERS = (("libx264", "mp4"), ("libx264", "mkv"), ("mpeg4", "avi"), ("mpeg4", "mp4"), ("libvpx-vp9", "webm"))
_SECONDS = (1.6, 2.6)
_BITS_PER_PIXEL = (0.22, 0.28, 0.35, 0.42)
_COPIES = (0, 1, 1, 1, 2)
_COPY_KINDS = ("reencode", "rescale", "crop")

T = TypeVar("T")


@dataclass(frozen=True)
class ClipPlan:
    """One file of the corpus."""

    path: str  # relative to the corpus folder, with '/'
    variant: str  # original, reencode, rescale or crop
    encoding: Encoding


@dataclass(frozen=True)
class EventPlan:
    """One scene, filmed once; its clips are the footage (or its forgery) and near-duplicates of it."""

    name: str  # the group
    label: str
    manipulation: str | None
    width: int
    height: int
    num_frames: int
    clips: tuple[ClipPlan, ...]  # the original first


def plan_events() -> tuple[EventPlan, ...]:
    """All events of the corpus in the order of their names; the same on every call."""
    drafts = []
    for label in ("real", "fake"):
        manipulations, copies = _deal(tuple(MANIPULATIONS), label, "manipulation"), _deal(_COPIES, label, "copies")
        drafts += [_draft(label, manipulations[i], copies[i], i) for i in range(EVENTS_PER_LABEL)]
    order = scenes.generator_for("order", DESIGN_SEED).permutation(len(drafts))
    events, first_clip = [], 0
    for number, index in enumerate(order):
        events.append(_named(drafts[index], number, first_clip))
        first_clip += len(drafts[index].clips)
    return tuple(events)


def _draft(label: str, manipulation: str, num_copies: int, number: int) -> EventPlan:
    rng = scenes.generator_for("draft", DESIGN_SEED, label, number)
    width, height = _SIZES[rng.integers(len(_SIZES))]
    frames_per_second = _RATES[rng.integers(len(_RATES))]
    variants = ["original", *(_COPY_KINDS[k] for k in rng.permutation(len(_COPY_KINDS))[:num_copies])]
    return EventPlan(
        name="",
        label=label,
        manipulation=manipulation if label == "fake" else None,
        width=width,
        height=height,
        num_frames=round(frames_per_second * rng.uniform(*_SECONDS)),
        clips=tuple(ClipPlan("", variant, _encoding(rng, frames_per_second)) for variant in variants),
    )


def _encoding(rng: np.random.Generator, frames_per_second: int) -> Encoding:
    codec, suffix = _CONTAINERS[rng.integers(len(_CONTAINERS))]
    return Encoding(codec, suffix, frames_per_second, _BITS_PER_PIXEL[rng.integers(len(_BITS_PER_PIXEL))])


def _named(draft: EventPlan, number: int, first_clip: int) -> EventPlan:
    clips = tuple(
        replace(clip, path=f"videos/clip_{first_clip + i:03d}.{clip.encoding.suffix}")
        for i, clip in enumerate(draft.clips)
    )
    return replace(draft, name=f"event_{number:02d}", clips=clips)


def _deal(cards: Sequence[T], *seed: str) -> list[T]:
    """One card per event of a label, each equally often as far as that goes, in an order of its own for each seed."""
    dealt = [cards[i % len(cards)] for i in range(EVENTS_PER_LABEL)]
    return [dealt[i] for i in scenes.generator_for("deal", DESIGN_SEED, *seed).permutation(EVENTS_PER_LABEL)]


_NOTICE_TEXT = """This corpus is synthetic.

Every clip was generated by FVC's sample corpus generator (version {version}): no place, object or person in it exists.
"Real" means: rendered camera-like footage, encoded. "Fake" means: the same kind of footage, changed by the manipulation
that manifest.csv names. Clips of one group show the same event; copies are re-encoded, rescaled or cropped.
Use it to see that the pipeline runs and reports honestly. Results on it say nothing about forgeries in the wild.
"""


def generate_sample_corpus(folder: AnyPath, *, progress: Callable[[int, int], None] | None = None) -> Path:
    """Write the sample corpus to ``folder``, or what is missing of it; see ``files.generate``.

    Equal versions of this code, numpy and PyAV write equal bytes.

    Returns:
        The path of ``manifest.csv``: columns path, label, group, manipulation (empty for real), variant (original,
        reencode, rescale, crop), variant_of (the path of the original, empty for originals).
    """
    events = plan_events()
    plan = [PlannedFiles(tuple(clip.path for clip in event.clips), partial(make_event, event)) for event in events]
    return files.generate(
        Path(folder), "sample_corpus", CORPUS_VERSION, plan, _NOTICE_TEXT, manifest_text(events), progress
    )


def make_event(event: EventPlan) -> tuple[bytes, ...]:
    """The files' contents of ``event.clips`` in their order."""
    footage = film(event, "base", scenes.draw_camera(f"{event.label} {event.name}"))
    if event.manipulation is not None:
        uses_donor = event.manipulation in USES_DONOR
        # Another device than the base's: poorer light, so more noise.
        noise = scenes.generator_for("donor noise", event.name).uniform(8, 14)
        camera = replace(scenes.draw_camera(f"donor {event.name}"), noise_sigma=noise)
        donor = film(event, "donor", camera) if uses_donor else footage
        forger = scenes.generator_for("forger", event.name)
        footage = MANIPULATIONS[event.manipulation](footage, donor, forger)
    original, *copies = event.clips
    published = files.encode_to_size(footage, original.encoding)
    footage = decode_frames(published)  # copies are made from what was published
    copied = (files.encode_to_size(_vary(footage, copy.variant, copy.path), copy.encoding) for copy in copies)
    return (published, *copied)


def film(event: EventPlan, role: str, camera: Camera) -> Planes:
    """Render a shot and pass it through a device's own encoder, as all footage was before anyone can change it."""
    shot = Shot(f"{event.name} {role}", event.width, event.height, event.num_frames, camera)
    bits_per_pixel = scenes.generator_for("device", shot.name).uniform(0.7, 1.1)
    device = Encoding("mpeg4", "avi", event.clips[0].encoding.frames_per_second, bits_per_pixel)
    frames = scenes.render_shot(shot)
    bits_per_second = device.target_bytes(frames) * 8 * device.frames_per_second // event.num_frames
    return decode_frames(files.encode_frames(frames, device, bits_per_second))


def manifest_text(events: tuple[EventPlan, ...]) -> str:
    """The manifest's CSV text, one row per clip."""
    rows: list[Sequence[object]] = [("path", "label", "group", "manipulation", "variant", "variant_of")]
    for event in events:
        original = event.clips[0].path
        for clip in event.clips:
            of = "" if clip.variant == "original" else original
            rows.append((clip.path, event.label, event.name, event.manipulation or "", clip.variant, of))
    return files.csv_text(rows)


def _vary(frames: Planes, variant: str, seed: str) -> Planes:
    rng = scenes.generator_for("variant", seed)
    height, width = frames.shape[1] * 2 // 3, frames.shape[2]
    if variant == "rescale":
        factor = rng.choice([0.75, 0.85, 1.2])
        return files.rescale_frames(frames, 4 * round(height * factor / 4), 4 * round(width * factor / 4))
    if variant == "crop":
        kept = rng.uniform(0.86, 0.94)
        h, w = 4 * round(height * kept / 4), 4 * round(width * kept / 4)
        top, left = (2 * int(rng.integers(0, (side - part) // 2 + 1)) for side, part in ((height, h), (width, w)))
        return files.crop_frames(frames, top, left, h, w)
    return frames


def run_corpus(config: RunConfig, *, progress: Callable[[int, int], None] | None = None) -> Path:
    """The user's corpus; without one, the sample corpus in ``data_dir``, generated where it is not complete yet.

    ``progress`` is called with (clips done, clips in all) meanwhile.
    """
    if config.corpus:
        return Path(config.corpus)
    return generate_sample_corpus(Path(config.data_dir) / "sample_corpus", progress=progress)
