"""Videos whose frames carry their number in their pixels, so that a wrong frame cannot pass for the right one."""

import itertools
import json
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import polars as pl
import pytest

from fvc_lib.services.registry import AUGMENTATIONS
from fvc_lib.services.tables import AUGMENTED
from fvc_lib.video.augmentations import AugmentationPlan
from fvc_lib.video.clips.store import ClipStore
from fvc_lib.video.decode.pixels import FrameConverter

BITS = 8
TIME_BASE = Fraction(1, 1000)


def numbered_frame(number: int, width: int, height: int) -> np.ndarray:
    """Grey (height, width): eight vertical stripes, dark for 0 and bright for 1, are the number in binary."""
    bits = np.array([(number >> bit) & 1 for bit in range(BITS)])
    stripe = np.arange(width) * BITS // width
    return np.broadcast_to(np.where(bits[stripe], 200, 50).astype(np.uint8), (height, width)).copy()


def read_number(frame: np.ndarray) -> int:
    """The number a decoded upright frame (3, H, W) carries."""
    width = frame.shape[2]
    middles = [int((bit + 0.5) * width / BITS) for bit in range(BITS)]
    row = frame[:, frame.shape[1] // 2].mean(axis=0)
    return sum(1 << bit for bit, middle in enumerate(middles) if row[middle] > 125)


def write_video(
    path: Path,
    num_frames: int = 20,
    *,
    codec: str = "libx264",
    container: str | None = None,
    width: int = 64,
    height: int = 48,
    pixel_format: str = "yuv420p",
    gop: int = 8,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    times_ms: Sequence[int] | None = None,
    sample_aspect_ratio: Fraction | None = None,
    display: tuple[float, bool] | None = None,
    frames: Sequence[np.ndarray] | None = None,
) -> Path:
    """Encode numbered (or the given grey or RGB) frames, 40 ms apart unless ``times_ms`` says otherwise."""
    times = list(times_ms) if times_ms is not None else [40 * number for number in range(num_frames)]
    with av.open(str(path), "w", format=container, options=container_options or {}) as output:
        stream = output.add_stream(codec, rate=25, options=options or {})
        stream.width, stream.height, stream.pix_fmt = width, height, pixel_format
        stream.codec_context.gop_size = gop
        stream.codec_context.thread_count = 1
        if codec not in ("mpeg4", "mpeg2video", "h263"):
            stream.codec_context.time_base = TIME_BASE
        if sample_aspect_ratio is not None:
            stream.codec_context.sample_aspect_ratio = sample_aspect_ratio
        if display is not None:
            stream.set_display_rotation(display[0], hflip=display[1])
        for number in range(num_frames):
            pixels = numbered_frame(number, width, height) if frames is None else frames[number]
            frame = av.VideoFrame.from_ndarray(pixels, format="gray" if pixels.ndim == 2 else "rgb24")
            frame = frame.reformat(format=pixel_format)
            frame.pts, frame.time_base = times[number], TIME_BASE
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return path


@pytest.fixture(scope="session")
def shared_media() -> Path:
    """Real files beside the repository; absent on most machines."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "media"
    if not folder.is_dir():
        pytest.skip("needs the media files beside the repository (../shared/media)")
    return folder


@pytest.fixture
def make_video(tmp_path: Path) -> Callable[..., Path]:
    """``write_video`` into the test's own folder: ``make_video("a.mp4", 20, ...)``."""
    return lambda name, *args, **options: write_video(tmp_path / name, *args, **options)


@pytest.fixture(scope="session")
def encode_video() -> Callable[..., Path]:
    """``write_video`` itself, for files that several tests share."""
    return write_video


def plan_of(text: str) -> AugmentationPlan:
    """The plan that ``to_json`` wrote."""
    listed = [{name: tuple(v) if name == "order" else v for name, v in entry.items()} for entry in json.loads(text)]
    return AugmentationPlan(tuple(AUGMENTATIONS.get(entry.pop("name"))(**entry) for entry in listed))


def filled_store(store: ClipStore, video_ids: Sequence[str]) -> pl.DataFrame:
    """Fill ``store`` with noise, an original and a copy per video; return the AUGMENTED rows, with awkward texts."""
    rows = []
    for video, number in itertools.product(range(len(video_ids)), (0, 1)):
        video_id, label = video_ids[video], ("fake", "real")[video % 2]
        store.write(video_id, number, np.random.default_rng([video, number]).integers(0, 256, store.shape, np.uint8))
        path = store.clip_path(video_id, number).relative_to(store.cache_dir).as_posix()
        of_video = (f"{video_id}_{number}", video_id, f'g "{video}"\n<b>🎬', label)
        rows.append((*of_video, number, "[]", store.settings_hash, path))
    return pl.DataFrame(rows, schema=list(AUGMENTED.columns), orient="row")


def full_decode(path: Path, size: int) -> list[np.ndarray]:
    """Every frame of a full decode in presentation order, letterboxed to ``size``: the naive oracle."""
    frames, times = [], []
    with av.open(str(path), metadata_errors="ignore") as container:
        stream = container.streams.best("video")
        converter = FrameConverter(size, stream.sample_aspect_ratio)
        for frame in container.decode(stream):
            converter.observe(frame)
            frames.append(np.empty((3, size, size), np.uint8))
            converter.convert(frame, frames[-1])
            times.append(frame.pts)
        stored = container.format.name not in ("avi", "h264", "mjpeg", "m4v")
    order = sorted(range(len(frames)), key=times.__getitem__) if stored else range(len(frames))
    return [frames[number] for number in order]
