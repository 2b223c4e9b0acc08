"""What judging files costs beside decoding them and the networks' forward passes.

``predict``'s judging (``judge_files``: facts, hashes, copies, isolated decoding, scoring, journal, tables) of a
finished run or a bundle, against decoding the same frames with the project's decoder and the same networks in one
process; and against plain loops as people write them: PyAV through the whole file, and torchcodec's exact frames.
Videos are made here: 640 x 360, 10 s, H.264, each under several names. Every side is a process of its own, in turns;
processor time is of it and its children, without imports and loading weights, one thread each.

    python -m benchmarks.verdicts [RUN_OR_BUNDLE] [--files 24] [--rounds 9] [--json FILE]

With ``--windows FILE``, once or more: what decoding every window of a file costs (``video/decode/views.py``) against
a loop that decodes the whole file and converts the same frames by the same scaler, in one process, in turns.

    python -m benchmarks.verdicts --windows a.mp4 --windows b.mp4
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import av
import numpy as np
import torch

from fvc_lib.command_line.models import find_model, verdict_detector
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.registry import PLAIN_VIEW
from fvc_lib.tasks.video.predicting import VideoDetector
from fvc_lib.tasks.video.verdicts.judging import judge_files
from fvc_lib.tasks.video.verdicts.rule import rule_of
from fvc_lib.video.decode.clip import uniform_places
from fvc_lib.video.decode.pixels import FrameConverter, Pixels
from fvc_lib.video.decode.views import Windows, decode_view, decode_windows

OURS, FLOOR = "ours", "decoding and forward"
WANTED, WANTED_OF_WINDOWS = 1.15, 1.05
WINDOW_FRAMES, WINDOW_SIDE = 16, 224
WIDTH, HEIGHT, SECONDS, RATE, CONTENTS = 640, 360, 10, 25, 3


def write_videos(folder: Path, count: int) -> list[Path]:
    """``count`` files of ``CONTENTS`` contents: textures that drift, with noise."""
    paths = []
    for number in range(count):
        paths.append(folder / f"{number:05d}.mp4")
        if number >= CONTENTS:
            os.link(paths[number % CONTENTS], paths[-1])
            continue
        generator = np.random.default_rng(number)
        texture = generator.integers(0, 255, (12, 20, 3), np.uint8).repeat(60, 0).repeat(64, 1)
        with av.open(str(paths[-1]), "w") as output:
            stream = output.add_stream("libx264", rate=RATE, options={"preset": "veryfast"})
            stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
            for frame in range(RATE * SECONDS):
                picture = np.roll(texture, (frame, 2 * frame), (0, 1))[:HEIGHT, :WIDTH] // 2
                picture = picture + generator.integers(0, 40, (HEIGHT, WIDTH, 1), np.uint8)
                output.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            output.mux(stream.encode(None))
    return paths


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def judged(detector: VideoDetector, files: list[Path]) -> list[float | None]:
    """As ``predict`` does it; scores (N,)."""
    with tempfile.TemporaryDirectory() as folder:
        return judge_files(detector, files, rule_of(), Path(folder), workers=1).table["score"].to_list()


def looped(clips: Callable[[Path], np.ndarray], detector: VideoDetector, files: list[Path]) -> list[float | None]:
    """Clips uint8 (N T, 3, S, S) of each file, a batch at a time through all networks; scores (N,)."""
    networks, scores = detector.networks, list[float | None]()
    number = networks.config.clips_per_video
    size = max(1, networks.batch_size // number)
    for start in range(0, len(files), size):
        some = np.stack(
            [clips(path).reshape(number, -1, *networks.store.shape[1:]) for path in files[start : start + size]]
        )
        logits = networks.logits(networks.judges, some)
        temperatures = [networks.folds[fold].temperature for fold in networks.judges]
        scores += probabilities(logits / temperatures, 1.0).mean(1).tolist()
    return scores


def plain_pyav(path: Path, num_frames: int, side: int) -> np.ndarray:
    """Every frame is decoded, the wanted ones are scaled into a square; uint8 (T, 3, S, S)."""
    with av.open(str(path)) as opened:
        wanted = set(uniform_places(opened.streams.video[0].frames, num_frames).tolist())
        kept = [frame.to_ndarray(width=side, height=side, format="rgb24")
                for place, frame in enumerate(opened.decode(video=0)) if place in wanted]  # fmt: skip
    return np.moveaxis(np.stack(kept), -1, 1)


def plain_torchcodec(path: Path, num_frames: int, side: int) -> np.ndarray:
    """As its documentation shows it; uint8 (T, 3, S, S)."""
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(str(path), num_ffmpeg_threads=1)
    frames = decoder.get_frames_at(uniform_places(len(decoder), num_frames).tolist()).data
    return torch.nn.functional.interpolate(frames.float(), (side, side), mode="bilinear").byte().numpy()


def sides(detector: VideoDetector) -> dict[str, Callable[[list[Path]], list[float | None]]]:
    """By name; peers that are not installed are left out. Theirs are stretched pictures, so other scores."""
    store = detector.networks.store
    frames, side = store.num_frames * store.view.clips, store.fixed_size
    found = {
        OURS: lambda files: judged(detector, files),
        FLOOR: lambda files: looped(
            lambda path: decode_view(path, store.num_frames, side, store.view)[0], detector, files
        ),
        "PyAV, plain loop": lambda files: looped(lambda path: plain_pyav(path, frames, side), detector, files),
    }
    if importlib.util.find_spec("torchcodec"):
        found["torchcodec, plain loop"] = lambda files: looped(
            lambda path: plain_torchcodec(path, frames, side), detector, files
        )
    return found


def measure_side(name: str, model: Path, files: list[Path]) -> None:
    """In a process of its own: prints CPU seconds and scores as JSON."""
    torch.set_num_threads(1)
    detector = verdict_detector(model)
    detector.networks.load(detector.networks.folds)
    if detector.networks.families:
        raise SystemExit("The loops beside it measure no forensic features: name a run with -p views frames.")
    before = cpu_seconds()
    scores = sides(detector)[name](files)
    print(json.dumps({"cpu_seconds": cpu_seconds() - before, "scores": scores}))


def rounds_of(model: Path, folder: Path, names: list[str], rounds: int) -> Iterator[dict[str, float]]:
    """CPU seconds of each side, round by round.

    Raises:
        SystemExit: judging has other scores than the same frames and networks.
    """
    for number in range(rounds):
        found: dict[str, dict[str, list[float]]] = {}
        for name in names if number % 2 == 0 else names[::-1]:
            command = [sys.executable, "-m", "benchmarks.verdicts", str(model), "--side", name, "--folder", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[name] = json.loads(done.stdout.splitlines()[-1])
        if not np.allclose(found[OURS]["scores"], found[FLOOR]["scores"], atol=1e-4):
            sys.exit("judging gives other scores than the same frames and networks do")
        seconds = {name: float(each["cpu_seconds"]) for name, each in found.items()}  # type: ignore[arg-type]
        print({name: round(value, 2) for name, value in seconds.items()}, flush=True)
        yield seconds


def measure_windows(path: Path, rounds: int, folder: Path) -> None:
    """Prints the ratio of CPU seconds.

    Raises:
        SystemExit: the loop gives other frames.
    """
    kept = [folder / "windows.raw", folder / "loop.raw"]

    def windows() -> Windows:
        with kept[0].open("wb") as stream:

            def store(number: int, frame: Pixels) -> None:
                stream.seek(number * frame.nbytes)
                stream.write(frame.data)

            return decode_windows(path, WINDOW_FRAMES, WINDOW_SIDE, PLAIN_VIEW, store)

    def loop() -> None:
        with av.open(str(path)) as opened, kept[1].open("wb") as stream:
            video = opened.streams.best("video")
            video.codec_context.thread_count = 1
            converter = FrameConverter(WINDOW_SIDE, video.sample_aspect_ratio)
            for place, frame in enumerate(opened.decode(video)):
                if place in wanted:
                    converter.convert(frame, picture)
                    stream.write(picture.data)

    found, picture = windows(), np.empty((3, WINDOW_SIDE, WINDOW_SIDE), np.uint8)
    wanted = set(np.unique(found.places).tolist())
    loop()
    if kept[0].read_bytes() != kept[1].read_bytes():
        sys.exit(f"{path}: the loop gives other frames")
    sides: list[Callable[[], object]] = [windows, loop]
    seconds: list[list[float]] = [[], []]
    for number in range(rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            before = cpu_seconds()
            sides[side]()
            seconds[side].append(cpu_seconds() - before)
    ratios = [ours / plain for ours, plain in zip(*seconds, strict=True)]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"{path.name}: {len(wanted):,} of {found.num_source_frames:,} frames kept, loop {min(seconds[1]):.2f} s, "
          f"windows over loop: {spread}, wanted at most {WANTED_OF_WINDOWS}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="latest", help="a finished run or a bundle")
    parser.add_argument("--files", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--windows", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        measure_side(asked.side, Path(asked.model), sorted(asked.folder.glob("*.mp4")))
        return
    if asked.windows:
        with tempfile.TemporaryDirectory() as folder:
            for path in asked.windows:
                measure_windows(path, asked.rounds, Path(folder))
        return
    model = find_model(resolve_config().runs_dir, asked.model)
    detector = verdict_detector(model)
    names = list(sides(detector))
    with tempfile.TemporaryDirectory() as folder:
        files = write_videos(Path(folder), asked.files)
        measured = list(rounds_of(model, Path(folder), names, asked.rounds))
    ratios = {name: [each[OURS] / each[name] for each in measured] for name in names if name != OURS}
    config = detector.networks.config
    print(f"{len(files)} files, {len(detector.networks.folds)} x {config.model}, load {os.getloadavg()[0]:.1f}")
    for name, values in ratios.items():
        goal = f", wanted at most {WANTED}" if name == FLOOR else ""
        spread = f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
        print(f"judging over {name}: {spread} of its processor time{goal}")
    if asked.json:
        asked.json.write_text(json.dumps({"rounds": measured, "ratios": ratios}, indent=2))


if __name__ == "__main__":
    main()
