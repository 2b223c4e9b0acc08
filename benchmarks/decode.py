#!/usr/bin/env python3
"""What ``decode_clip`` costs beside other ways to the same frames, as ratios that hold on any machine.

CPU time (all threads and child processes) is taken in this process, the peers in turn round after round, and compared
by the median. Peak memory is what a fresh process needs over its imports. Every peer decodes with one thread, picks
the frames round(linspace(0, n - 1, T)) and fits them to the same square. The column ``differs`` tells whether it gave
the same frames: the mean absolute difference to ours, in grey levels, of the worst frame. Scalers differ by 1 to 5; far
more means other frames, and then the ratio compares unlike things.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import cast

import av
import numpy as np
import numpy.typing as npt
from av.video.stream import VideoStream

from fvc_lib.video.decode import decode_clip, uniform_places

Pixels = npt.NDArray[np.uint8]
Decoder = Callable[[Path, int, int], Pixels]

OURS = "decode_clip"
FRAMES_PER_SECOND = 25


@dataclass(frozen=True)
class Video:
    """One generated file: its name in the table, and how it is encoded."""

    name: str
    codec: str
    suffix: str
    options: dict[str, str]
    keyframe_interval: int


VIDEOS = (
    Video("h264 B-frames GOP 250", "libx264", ".mp4", {"preset": "veryfast", "bf": "3", "sc_threshold": "0"}, 250),
    Video("h264 B-frames GOP 30", "libx264", ".mp4", {"preset": "veryfast", "bf": "3", "sc_threshold": "0"}, 30),
    Video("mpeg4 GOP 12", "mpeg4", ".avi", {"q": "5"}, 12),
    Video("vp9 GOP 128", "libvpx-vp9", ".webm", {"deadline": "realtime", "cpu-used": "8"}, 128),
)


@dataclass(frozen=True)
class Row:
    """One peer against ``decode_clip`` on one file; memory in bytes over the imports."""

    video: str
    num_frames: int
    peer: str
    cpu_ratio: float
    our_memory: int
    peer_memory: int
    difference: float

    @property
    def memory_ratio(self) -> float:
        """Our peak over the peer's."""
        return self.our_memory / max(1, self.peer_memory)


# Each takes (path, number of frames, side of the square) and gives uint8 (T, 3, h, w) without the black borders.


def ours(path: Path, num_frames: int, size: int) -> Pixels:
    """What is measured."""
    clip = decode_clip(path, num_frames, size)
    box = clip.content
    return clip.frames[:, :, box.top : box.top + box.height, box.left : box.left + box.width]


def pyav_sequential(path: Path, num_frames: int, size: int) -> Pixels:
    """Count the packets, then decode everything from the first frame on and convert the wanted frames."""
    with av.open(str(path)) as container:
        count = sum(packet.size > 0 for packet in container.demux(video=0))
    wanted = set(uniform_places(count, num_frames).tolist())
    taken = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        width, height = fitted(stream.width, stream.height, size)
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                taken.append(frame.to_ndarray(width=width, height=height, format="rgb24", interpolation="BILINEAR"))
    return channels_first(taken)


def opencv(path: Path, num_frames: int, size: int) -> Pixels:
    """``VideoCapture`` set to each frame number, as most data loaders use it."""
    import cv2

    cv2.setNumThreads(1)
    capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
    taken = []
    for place in uniform_places(int(capture.get(cv2.CAP_PROP_FRAME_COUNT)), num_frames).tolist():
        capture.set(cv2.CAP_PROP_POS_FRAMES, place)
        there, frame = capture.read()
        if not there:
            break
        inner = fitted(frame.shape[1], frame.shape[0], size)
        taken.append(cv2.cvtColor(cv2.resize(frame, inner, interpolation=cv2.INTER_AREA), cv2.COLOR_BGR2RGB))
    capture.release()
    return channels_first(taken)


def torchcodec_exact(path: Path, num_frames: int, size: int) -> Pixels:
    """torchcodec's decoder in its exact mode, and torch's antialiased resize."""
    import torch
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(str(path), seek_mode="exact", num_ffmpeg_threads=1)
    places = uniform_places(decoder.metadata.num_frames, num_frames).tolist()
    frames = decoder.get_frames_at(indices=places).data
    width, height = fitted(frames.shape[3], frames.shape[2], size)
    small = torch.nn.functional.interpolate(frames, (height, width), mode="bilinear", antialias=True)
    return np.asarray(small.numpy(), np.uint8)


def decord(path: Path, num_frames: int, size: int) -> Pixels:
    """decord's batch reader, which scales while it decodes."""
    from decord import VideoReader

    with av.open(str(path)) as container:
        width, height = fitted(container.streams.video[0].width, container.streams.video[0].height, size)
    reader = VideoReader(str(path), width=width, height=height, num_threads=1)
    return channels_first(list(reader.get_batch(uniform_places(len(reader), num_frames).tolist()).asnumpy()))


def imageio_ffmpeg(path: Path, num_frames: int, size: int) -> Pixels:
    """The ffmpeg program in a pipe: it counts, then selects and scales."""
    from imageio_ffmpeg import count_frames_and_secs, read_frames

    places = uniform_places(count_frames_and_secs(str(path))[0], num_frames).tolist()
    with av.open(str(path)) as container:
        width, height = fitted(container.streams.video[0].width, container.streams.video[0].height, size)
    chosen = "+".join(f"eq(n\\,{place})" for place in places)
    pipe = read_frames(
        str(path),
        input_params=["-threads", "1"],
        output_params=[
            "-vf",
            f"select={chosen},scale={width}:{height}:flags=bilinear",
            "-fps_mode",
            "passthrough",
            "-threads",
            "1",
        ],
    )
    next(pipe)  # what it knows about the file
    return channels_first([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in pipe])


# In the order of the table: the name, the package it needs, and how it decodes.
CONTESTANTS: dict[str, tuple[str, Decoder]] = {
    OURS: ("fvc_lib.video.decode", ours),
    "PyAV sequential": ("av", pyav_sequential),
    "OpenCV": ("cv2", opencv),
    "torchcodec exact": ("torchcodec.decoders", torchcodec_exact),
    "decord": ("decord", decord),
    "imageio-ffmpeg": ("imageio_ffmpeg", imageio_ffmpeg),
}


def fitted(width: int, height: int, size: int) -> tuple[int, int]:
    """Width and height of the picture inside a letterboxed square."""
    scale = size / max(width, height)
    return max(1, round(width * scale)), max(1, round(height * scale))


def channels_first(frames: Sequence[Pixels]) -> Pixels:
    """uint8 (T, 3, H, W) from T pictures (H, W, 3)."""
    return np.stack(frames).transpose(0, 3, 1, 2) if frames else np.empty((0, 3, 0, 0), np.uint8)


def write_video(video: Video, folder: Path, width: int, height: int, seconds: int) -> Path:
    """Encode a camera that pans over a textured scene while boxes cross it and the sensor is noisy."""
    path = folder / f"{video.name.replace(' ', '_')}{video.suffix}"
    generator = np.random.default_rng(0)
    # Pale colours: the peers assume different colour matrices where a file names none, and that is not the subject.
    coarse = generator.integers(40, 200, (height // 8, width // 8, 1)) + generator.integers(0, 12, 3)
    scene = np.kron(coarse, np.ones((16, 16, 1))).astype(np.uint8)
    noise = generator.integers(0, 12, (2 * height, 2 * width, 1)).astype(np.uint8)
    with av.open(str(path), "w") as container:
        added = container.add_stream(video.codec, rate=Fraction(FRAMES_PER_SECOND), options=dict(video.options))
        stream = cast(VideoStream, added)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.bit_rate = 2_000_000
        stream.codec_context.gop_size = video.keyframe_interval
        for number in range(seconds * FRAMES_PER_SECOND):
            picture = np.array(camera(scene, number, width, height))
            left = number * 11 % (width - width // 5)
            picture[height // 3 : height // 2, left : left + width // 5] = number * 37 % 200
            dy, dx = generator.integers(0, (height, width))
            picture += noise[dy : dy + height, dx : dx + width]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def camera(scene: Pixels, number: int, width: int, height: int) -> Pixels:
    """What a camera swaying over ``scene`` (twice as wide and high) sees at frame ``number``."""
    left = round((1 + np.sin(number / 90)) / 2 * width)
    top = round((1 + np.cos(number / 130)) / 2 * height)
    return scene[top : top + height, left : left + width]


def cpu_seconds() -> float:
    """User and system time of this process, its threads, and its child processes that have ended."""
    child = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + child.ru_utime + child.ru_stime


def interleaved_cpu_seconds(
    decoders: dict[str, Decoder], path: Path, num_frames: int, size: int, rounds: int
) -> dict[str, float]:
    """Median CPU seconds of one decode by each decoder, taken in turn."""
    spent: dict[str, list[float]] = {name: [] for name in decoders}
    for _ in range(rounds):
        for name, decode in decoders.items():
            before = cpu_seconds()
            decode(path, num_frames, size)
            spent[name].append(cpu_seconds() - before)
    return {name: statistics.median(values) for name, values in spent.items()}


def peak_memory(name: str, path: Path, num_frames: int, size: int) -> int:
    """Bytes that one decode adds to a fresh process (see ``measure_here``), with its largest child process."""
    command = [sys.executable, __file__, "--measure", name, str(path), str(num_frames), str(size)]
    return int(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def measure_here(name: str, path: Path, num_frames: int, size: int) -> int:
    """Peak resident bytes of one decode over what the imports take. Linux only: it reads ``/proc``."""
    package, decode = CONTESTANTS[name]
    importlib.import_module(package)
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the imports' own peak is forgotten
    decode(path, num_frames, size)
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return status_bytes("VmHWM") - before + children


def status_bytes(field: str) -> int:
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def missing_package(package: str) -> str | None:
    """Why ``package`` cannot be imported, in one line, or none. Some fail on a library that they find too late."""
    try:
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:
        return str(error).strip().splitlines()[0]
    return None


def worst_difference(theirs: Pixels, frames: Pixels) -> float:
    """Mean absolute difference of the worst frame in grey levels; infinite when a frame or pixel row is missing."""
    if theirs.shape != frames.shape:
        return float("inf")
    return float(np.abs(theirs.astype(np.int16) - frames).mean(axis=(1, 2, 3)).max())


def compare(
    decoders: dict[str, Decoder], video: Video, path: Path, num_frames: int, size: int, rounds: int
) -> list[Row]:
    """All peers among ``decoders`` against ``decode_clip`` on one file."""
    frames = {name: decode(path, num_frames, size) for name, decode in decoders.items()}  # and all are warm now
    cpu = interleaved_cpu_seconds(decoders, path, num_frames, size, rounds)
    memory = {name: peak_memory(name, path, num_frames, size) for name in decoders}
    return [
        Row(
            video.name, num_frames, name, cpu[OURS] / cpu[name], memory[OURS], memory[name],
            worst_difference(frames[name], frames[OURS]),
        )
        for name in decoders
        if name != OURS
    ]  # fmt: skip


def print_row(row: Row) -> None:
    """One line of the table."""
    memory = f"{row.our_memory / 2**20:6.1f} : {row.peer_memory / 2**20:6.1f}"
    print(
        f"{row.video:<22} {row.num_frames:>6}  {row.peer:<17} {row.cpu_ratio:>7.2f}  {row.memory_ratio:>7.2f}  "
        f"{memory}  {row.difference:>7.2f}",
        flush=True,
    )


def summary(rows: Sequence[Row], peer: str) -> str:
    """``decode_clip`` against one peer over all cases, in one line."""
    own = [row for row in rows if row.peer == peer]
    cpu, memory = [row.cpu_ratio for row in own], [row.memory_ratio for row in own]
    return (
        f"decode_clip against {peer}: {statistics.median(cpu):.2f} times the CPU time ({min(cpu):.2f} to "
        f"{max(cpu):.2f}), {statistics.median(memory):.2f} times the peak memory ({min(memory):.2f} to "
        f"{max(memory):.2f}), median and range of {len(own)} cases."
    )


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="1080p of one minute instead of 720p of 10 s")
    parser.add_argument("--frames", type=int, nargs="+", default=[6, 16], help="frames per clip (default: 6 16)")
    parser.add_argument("--size", type=int, default=112, help="side of the square in pixels (default: 112)")
    parser.add_argument("--rounds", type=int, default=2, help="counted decodes by each peer and case (default: 2)")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Generate, measure, print."""
    arguments = read_arguments()
    if arguments.measure:
        name, path, num_frames, size = arguments.measure
        print(measure_here(name, Path(path), int(num_frames), int(size)))
        return
    absent = {name: why for name, (package, _) in CONTESTANTS.items() if (why := missing_package(package))}
    decoders = {name: decode for name, (_, decode) in CONTESTANTS.items() if name not in absent}
    width, height, seconds = (1920, 1080, 60) if arguments.large else (1280, 720, 10)
    print(f"{width}x{height}, {seconds} s, {FRAMES_PER_SECOND} fps; PyAV {importlib.metadata.version('av')}")
    for name, why in absent.items():
        print(f"absent: {name} ({why})")
    print("ratios are decode_clip : peer, below 1 is leaner; memory is the peak over the imports in MiB\n")
    print(
        f"{'video':<22} {'frames':>6}  {'peer':<17} {'CPU':>7}  {'memory':>7}  {'  ours :   peer':<15}  {'differs':>7}"
    )
    rows = []
    with tempfile.TemporaryDirectory(prefix="fvc-bench-") as folder:
        for video in VIDEOS:
            path = write_video(video, Path(folder), width, height, seconds)
            for num_frames in arguments.frames:
                for row in compare(decoders, video, path, num_frames, arguments.size, arguments.rounds):
                    rows.append(row)
                    print_row(row)
            path.unlink()
    print()
    for peer in dict.fromkeys(row.peer for row in rows):
        print(summary(rows, peer))


if __name__ == "__main__":
    main()
