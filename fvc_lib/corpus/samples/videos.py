"""Generate the sample corpus of task video: a small corpus of synthetic real and fake clips.

Nothing in this corpus was filmed. The whole pipeline runs on it, on any machine and without a download. It shows that a
run reports leakage, controls (models that must score at chance) and confidence intervals honestly. Results on this
corpus say nothing about real forgeries.

Frames are planar yuv420p, uint8 (T, 3*H/2, W): T frames of height H and width W (see ``footage``). A donor is other
footage of the same shape, from which a manipulation copies.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from fvc_lib.corpus.listing import Listing, read_corpora, reading_options
from fvc_lib.corpus.samples.footage import (
    Camera,
    Encoding,
    Planes,
    Shot,
    decode_frames,
    draw_camera,
    encode_frames,
    encode_to_size,
    generate,
    generator_for,
    render_shot,
    resize_plane,
    split_planes,
)
from fvc_lib.services.atomic_files import AnyPath, write_bytes
from fvc_lib.services.config import RunConfig

# --- Manipulations, which make the fakes. They are strong enough to be seen in six frames of 112 pixels: the corpus
# shows that a pipeline learns, not how hard real forgeries are.


def region_masks(rng: np.random.Generator, num_frames: int, height: int, width: int) -> list[npt.NDArray[np.bool_]]:
    """Return one mask (height, width) per frame, True inside an ellipse that moves straight through the clip.

    The ellipse covers a fifth to a third of the frame; ``rng`` decides its size, shape and path.
    """
    half_area = rng.uniform(0.20, 0.32) / np.pi
    stretch = rng.uniform(0.75, 1.35)
    half_height = np.sqrt(half_area) * stretch * height
    half_width = np.sqrt(half_area) / stretch * width
    begin, end = rng.uniform(0.25, 0.75, (2, 2))  # centres (row, column) as shares of the sides
    rows = np.arange(height)[:, None]
    columns = np.arange(width)
    masks = []
    for share in np.linspace(0, 1, num_frames):
        row, column = (begin + (end - begin) * share) * (height, width)
        down = (rows - row) / half_height
        right = (columns - column) / half_width
        masks.append(down**2 + right**2 <= 1)
    return masks


def splice_region(base: Planes, donor: Planes, rng: np.random.Generator) -> Planes:
    """Return ``base`` (T, 3*H/2, W) with a moving region replaced by the same region of ``donor``.

    ``rng`` decides the region. Its camera noise differs from that of the rest of the frame.
    """
    forged = base.copy()
    masks = region_masks(rng, *_size(base))
    for target, source, mask in zip(forged, donor, masks, strict=True):
        for to_plane, from_plane, step in zip(split_planes(target), split_planes(source), (1, 2, 2), strict=True):
            np.copyto(to_plane, from_plane, where=mask[::step, ::step])
    return forged


def resynthesise_region(base: Planes, _donor: Planes, rng: np.random.Generator) -> Planes:
    """Return ``base`` (T, 3*H/2, W) with the luma of a moving region shrunk and enlarged, as if a network had made it.

    The region loses its camera noise. A checkerboard, as upsampling networks leave it, is added to the region.
    """
    forged = base.copy()
    _, height, width = _size(base)
    masks = region_masks(rng, *_size(base))
    amplitude = np.float32(rng.uniform(7, 12))
    factor = max(4, 4 * round(min(height, width) / 72))
    half_period = max(4, 2 * round(max(height, width) / 56)) // 2
    rows, columns = (np.arange(side) // half_period % 2 for side in (height, width))
    lattice = np.where(rows[:, None] == columns, amplitude, -amplitude)  # a checkerboard
    for frame, mask in zip(forged, masks, strict=True):
        coarse = resize_plane(frame[:height], height // factor, width // factor)
        smooth = np.rint(resize_plane(coarse, height, width) + lattice)
        levels = np.clip(smooth, 16, 235).astype(np.uint8)
        np.copyto(frame[:height], levels, where=mask)
    return forged


def duplicate_frames(base: Planes, _donor: Planes, rng: np.random.Generator) -> Planes:
    """Return ``base`` (T, 3*H/2, W) with about half of its frames replaced by a single frame; T does not change."""
    length = round(len(base) * rng.uniform(0.45, 0.6))
    start = int(rng.integers(0, len(base) - length + 1))
    forged = base.copy()
    forged[start : start + length] = base[start]
    return forged


def drop_frames(base: Planes, _donor: Planes, rng: np.random.Generator) -> Planes:
    """Return ``base`` (T, 3*H/2, W) with only a few of its frames, each repeated many times; T does not change."""
    hold = max(2, round(len(base) * rng.uniform(0.28, 0.36)))
    source = np.arange(len(base))
    phase = int(rng.integers(0, hold))
    since_new = (source + phase) % hold
    return np.asarray(base[np.maximum(source - since_new, 0)])


def splice_time(base: Planes, donor: Planes, rng: np.random.Generator) -> Planes:
    """Return ``base`` (T, 3*H/2, W) with a run of frames replaced by the frames of ``donor`` at the same indices.

    The run is a third to a half of the clip, and never includes the first sixth.
    """
    length = round(len(base) * rng.uniform(0.34, 0.5))
    latest = len(base) - length
    start = int(rng.integers(len(base) // 6, latest + 1))
    forged = base.copy()
    forged[start : start + length] = donor[start : start + length]
    return forged


def _size(frames: Planes) -> tuple[int, int, int]:
    """Return (T, H, W) of frames (T, 3*H/2, W)."""
    return len(frames), frames.shape[1] * 2 // 3, frames.shape[2]


@dataclass(frozen=True)
class Manipulation:
    """A way to make a fake from rendered footage.

    Attributes:
        generator: name of the tool that the manifest states.
        apply: called with the base footage, donor footage of the same shape but another place and camera, and a random
            generator. Returns a changed copy of the base.
        uses_donor: whether ``apply`` reads the donor footage.
    """

    generator: str
    apply: Callable[[Planes, Planes, np.random.Generator], Planes]
    uses_donor: bool = False


MANIPULATIONS = {
    "region_splice": Manipulation("collage", splice_region, uses_donor=True),
    "local_resynthesis": Manipulation("resynth", resynthesise_region),
    "frame_duplication": Manipulation("retimer", duplicate_frames),
    "frame_drop": Manipulation("retimer", drop_frames),
    "temporal_splice": Manipulation("collage", splice_time, uses_donor=True),
}

# --- The plan of the corpus. Metadata of files is drawn independently of the label, and not dealt in equal shares: if
# metadata is perfectly balanced, a cross-validated classifier of it scores far below chance (AUC 0.2 to 0.3).

# Any change that alters a byte of a clip needs another version: finished corpora are recognised by it.
CORPUS_VERSION = "2"
_SAMPLE = "sample_corpus"  # name of the folder, and so of the corpus
_NEW = "sample_new"  # folder of the videos that are in no corpus
DESIGN_SEED = 15

EVENTS_PER_LABEL = 20
_SIZES = ((240, 180), (176, 240), (256, 144), (208, 208), (288, 216))
_RATES = (12, 15, 20, 24, 30)
_CONTAINERS = (("libx264", "mp4"), ("libx264", "mkv"), ("mpeg4", "avi"), ("mpeg4", "mp4"), ("libvpx-vp9", "webm"))
_BITS_PER_PIXEL = (0.22, 0.28, 0.35, 0.42)
_COPIES = (0, 1, 1, 1, 2)
_COPY_KINDS = ("reencode", "rescale", "crop")


@dataclass(frozen=True)
class ClipPlan:
    """Description of a video file of the sample corpus, before it is made."""

    path: str  # relative to the corpus folder, with '/'
    variant: str  # original, reencode, rescale or crop
    encoding: Encoding


@dataclass(frozen=True)
class EventPlan:
    """Description of an event: an original clip and its near-duplicates, which are all real or all fake."""

    name: str  # also the leakage group of the clips
    label: str  # real or fake
    manipulation: str | None  # a key of ``MANIPULATIONS``; None for real
    width: int
    height: int
    num_frames: int
    clips: tuple[ClipPlan, ...]  # the original is the first


def plan_events() -> tuple[EventPlan, ...]:
    """Return the plans of all events of the sample corpus in the order of their names.

    An event is an original clip with its near-duplicates. The result is the same on every call.
    """
    drafts = []
    for label in ("real", "fake"):
        manipulations = _deal(tuple(MANIPULATIONS), label, "manipulation")
        copies = _deal(_COPIES, label, "copies")
        for number in range(EVENTS_PER_LABEL):
            manipulation = manipulations[number] if label == "fake" else None
            drafts.append((label, number, manipulation, copies[number]))
    events, first_clip = [], 0
    order = generator_for("order", DESIGN_SEED).permutation(len(drafts))
    for number, place in enumerate(order):
        events.append(_event(f"event_{number:02d}", first_clip, *drafts[place]))
        first_clip += len(events[-1].clips)
    return tuple(events)


def _event(name: str, first_clip: int, label: str, number: int, manipulation: str | None, num_copies: int) -> EventPlan:
    rng = generator_for("draft", DESIGN_SEED, label, number)
    width, height = _SIZES[rng.integers(len(_SIZES))]
    frames_per_second = _RATES[rng.integers(len(_RATES))]
    kinds = rng.permutation(len(_COPY_KINDS))[:num_copies]
    variants = ["original", *(_COPY_KINDS[kind] for kind in kinds)]
    num_frames = round(frames_per_second * rng.uniform(1.6, 2.6))
    clips = []
    for place, variant in enumerate(variants, start=first_clip):
        codec, suffix = _CONTAINERS[rng.integers(len(_CONTAINERS))]
        bits_per_pixel = _BITS_PER_PIXEL[rng.integers(len(_BITS_PER_PIXEL))]
        encoding = Encoding(codec, suffix, frames_per_second, bits_per_pixel)
        clips.append(ClipPlan(f"videos/clip_{place:03d}.{suffix}", variant, encoding))
    return EventPlan(name, label, manipulation, width, height, num_frames, tuple(clips))


def _deal(cards: Sequence[Any], *seed: str) -> list[Any]:
    """Choose one of the values ``cards`` for each event of a label; return them as a list in random order.

    Every value is chosen about equally often. An event is an original clip with its near-duplicates. There are
    ``EVENTS_PER_LABEL`` real events and as many fake ones. ``seed`` decides the order.
    """
    order = generator_for("deal", DESIGN_SEED, *seed).permutation(EVENTS_PER_LABEL)
    return [cards[place % len(cards)] for place in order]


_NOTICE_TEXT = """This corpus is synthetic.

Every clip was generated by FVC's sample corpus generator (version {version}): no place, object or person in it exists.
"Real" means: rendered camera-like footage, encoded. "Fake" means: the same kind of footage, changed by the manipulation
that manifest.csv names. Clips of one group show the same event; copies are re-encoded, rescaled or cropped.
Use it to see that the pipeline runs and reports honestly. Results on it say nothing about forgeries in the wild.
"""


def generate_sample_corpus(folder: AnyPath, *, progress: Callable[[int, int], None] | None = None) -> Path:
    """Write the missing files of the sample corpus to ``folder``: synthetic real and fake clips, and a manifest.

    Existing files of the same version of the corpus are not changed. Equal versions of this code, numpy and PyAV write
    equal bytes. ``progress`` is called with (files done, files in all).

    Returns:
        The path of ``manifest.csv``; for its columns see ``manifest_of``.
    """
    events = plan_events()
    plan = {tuple(clip.path for clip in event.clips): partial(make_event, event) for event in events}
    notice = _NOTICE_TEXT.format(version=CORPUS_VERSION)
    return generate(Path(folder), notice, plan, manifest_of(events), progress)


def generate_new_videos(folder: Path) -> None:
    """Write one real and one fake video to ``folder``, on which the command ``fvc predict`` can be tried.

    The videos are generated like the clips of the sample corpus, but show other events. Existing files are not changed.
    """
    for label, manipulation in (("real", None), ("fake", "region_splice")):
        event = _event(f"new_{label}", 0, label, EVENTS_PER_LABEL, manipulation, 0)
        suffix = Path(event.clips[0].path).suffix
        path = folder / f"{label}{suffix}"
        if not path.is_file():
            write_bytes(path, make_event(event)[0])


def make_event(event: EventPlan) -> list[bytes]:
    """Generate the video files of an event; return their bytes, in the order of ``event.clips``.

    The first file is the original: rendered footage, manipulated if the event is fake. The others are near-duplicates
    of this file.
    """
    footage = film(event, "base", _camera(event))
    if event.manipulation is not None:
        manipulation, donor = MANIPULATIONS[event.manipulation], footage
        if manipulation.uses_donor:
            # The donor is filmed by another device in poorer light, so it has more noise.
            noise = generator_for("donor noise", event.name).uniform(8, 14)
            camera = replace(draw_camera(f"donor {event.name}"), noise_sigma=noise)
            donor = film(event, "donor", camera)
        footage = manipulation.apply(footage, donor, generator_for("forger", event.name))
    contents = [encode_to_size(footage, event.clips[0].encoding)]
    footage = decode_frames(contents[0])  # copies are made from the published file
    for copy in event.clips[1:]:
        contents.append(encode_to_size(_vary(footage, copy.variant, copy.path), copy.encoding))
    return contents


def film(event: EventPlan, role: str, camera: Camera) -> Planes:
    """Render footage with the traces of a recording device, and return its frames, uint8 (T, 3*H/2, W).

    The rendered frames are encoded and decoded once, so they have the compression traces of a filmed video.

    Args:
        event: states size, length and frame rate of the shot.
        role: ``base`` or ``donor``; seeds the content of the shot together with the event's name.
        camera: the camera that films it.
    """
    shot = Shot(f"{event.name} {role}", event.width, event.height, event.num_frames, camera)
    bits_per_pixel = generator_for("device", shot.name).uniform(0.7, 1.1)
    device = Encoding("mpeg4", "avi", event.clips[0].encoding.frames_per_second, bits_per_pixel)
    frames = render_shot(shot)
    return decode_frames(encode_frames(frames, device, device.bits_per_second(frames)))


def manifest_of(events: Sequence[EventPlan]) -> pl.DataFrame:
    """Return the manifest of the corpus, one row per clip, with the columns:

    - path, label and group;
    - manipulation and generator (the stated tool), both null for reals;
    - source: phone or camcorder, by the noise of the camera; null for fakes;
    - variant: original, reencode, rescale or crop;
    - variant_of: path of the original; null for originals.
    """
    rows = []
    for event in events:
        device = "phone" if _camera(event).noise_sigma >= 3.5 else "camcorder"
        for clip in event.clips:
            generator = MANIPULATIONS[event.manipulation].generator if event.manipulation else None
            original = None if clip.variant == "original" else event.clips[0].path
            row = {
                "path": clip.path,
                "label": event.label,
                "group": event.name,
                "manipulation": event.manipulation,
                "generator": generator,
                "source": None if event.manipulation else device,
                "variant": clip.variant,
                "variant_of": original,
            }
            rows.append(row)
    return pl.DataFrame(rows, infer_schema_length=None)


def _camera(event: EventPlan) -> Camera:
    return draw_camera(f"{event.label} {event.name}")


def _vary(frames: Planes, variant: str, seed: str) -> Planes:
    """Return ``frames`` (T, 3*H/2, W) as a near-duplicate shows them: unchanged, of another size, or cropped.

    ``variant`` is reencode (nothing changes), rescale or crop. ``seed`` decides the scale or the box of the crop.
    """
    rng = generator_for("variant", seed)
    _, height, width = _size(frames)
    if variant == "reencode":
        return frames
    share = rng.choice([0.75, 0.85, 1.2]) if variant == "rescale" else rng.uniform(0.86, 0.94)
    h = 4 * round(height * share / 4)
    w = 4 * round(width * share / 4)
    if variant == "crop":
        free = (height - h, width - w)
        top, left = (2 * int(rng.integers(0, space // 2 + 1)) for space in free)
    varied = np.empty((len(frames), h * 3 // 2, w), np.uint8)
    for source, target in zip(frames, varied, strict=True):
        for from_plane, to_plane, step in zip(split_planes(source), split_planes(target), (1, 2, 2), strict=True):
            if variant == "crop":
                from_corner = from_plane[top // step :, left // step :]
                to_plane[:] = from_corner[: h // step, : w // step]
            else:
                to_plane[:] = np.rint(resize_plane(from_plane, *to_plane.shape))
    return varied


def run_corpus(config: RunConfig, *, progress: Callable[[int, int], None] | None = None) -> Path:
    """Return the path of the run's corpus: ``config.corpus`` if it is set, else the sample corpus.

    The sample corpus is in the folder ``config.data_dir``. Its missing files are written first, and two new videos for
    ``fvc predict`` next to it. ``progress`` is called with (clips done, number of all clips).
    """
    if config.corpus:
        return Path(config.corpus)
    generate_new_videos(Path(config.data_dir) / _NEW)
    return generate_sample_corpus(Path(config.data_dir) / _SAMPLE, progress=progress)


def names_of_corpora(config: RunConfig) -> list[str]:
    """Return the names of the run's corpora, without generating or writing anything.

    Raises:
        UsageError: a corpus cannot be read, is given twice or lies within another one.
        DataError: a corpus has no usable label, or is a published corpus that was not unpacked completely.
    """
    given = [each for each in (config.corpus, *config.more_corpora) if each]
    if not given:
        return [_SAMPLE]
    listing = read_corpora(given, None, **reading_options(config))
    names = sorted({entry.corpus for entry in listing.entries})
    return names if config.corpus else [*names, _SAMPLE]


def run_listing(config: RunConfig) -> Listing:
    """Return the listing of the run's corpora: their usable and rejected files, with labels.

    If the run uses the sample corpus, its missing files are written first. Paths in the run's index are relative to the
    ``root`` of the listing. For several corpora, this is a folder with links to the corpora.

    Raises:
        UsageError: a corpus cannot be read, is given twice or lies within another one.
        DataError: a corpus has no usable label, or is a published corpus that was not unpacked completely.
    """
    return read_corpora(
        [run_corpus(config), *config.more_corpora],
        Path(config.cache_dir) / "index",
        **reading_options(config),
    )
