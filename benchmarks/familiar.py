"""What a run calls unfamiliar, and which copies of its videos it knows again, on generated videos.

``python -m benchmarks.familiar FOLDER [GENERATOR]`` makes a corpus like the sample corpus, of 100 events with one clip
each, without one generator, one codec and one size; trains a run of the demo's network on it; and asks about new
events: familiar ones, and such with the generator, codec or size that was left out. Then its videos are edited and
asked about again. It prints the tables of docs/verdicts.md, and goes on where it was stopped.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.edited_copies import Frames, read_frames, scaled, write_frames
from fvc_lib import CHECKOUT
from fvc_lib.command_line.models import verdict_detector
from fvc_lib.corpus.samples.footage import Encoding, generator_for
from fvc_lib.corpus.samples.videos import MANIPULATIONS, ClipPlan, EventPlan, make_event, manifest_of
from fvc_lib.services.run_paths import list_runs
from fvc_lib.tasks.video.predicting import VideoDetector

_SIZES, _OTHER_SIZE = ((240, 180), (176, 240), (208, 208), (288, 216)), (352, 288)
_CONTAINERS = (("libx264", "mp4"), ("libx264", "mkv"), ("mpeg4", "avi"))
_OTHER_CODEC = ("libvpx-vp9", "webm")
_LEFT_OUT = sys.argv[2] if len(sys.argv) > 2 else "resynth"  # the generator
_TRAINED, _FAMILIAR, _OF_EACH, _COPIED = 100, 60, 24, 30


def events(name: str, number: int, *, size: bool = False, codec: bool = False, fakes: str = "") -> list[EventPlan]:
    """``number`` of them; ``size`` and ``codec`` are the left-out ones, all are ``fakes`` of a generator."""
    known = [each for each, of in MANIPULATIONS.items() if of.generator != _LEFT_OUT]
    asked = [each for each, of in MANIPULATIONS.items() if of.generator == fakes] or known
    found = []
    for place in range(number):
        rng = generator_for("familiar", name, place)
        is_fake = bool(fakes) or place % 2 == 0
        width, height = _OTHER_SIZE if size else _SIZES[rng.integers(len(_SIZES))]
        kind, suffix = _OTHER_CODEC if codec else _CONTAINERS[rng.integers(len(_CONTAINERS))]
        rate = int(rng.choice([12, 15, 20, 24, 30]))
        clip = ClipPlan(
            f"{name}_{place:03d}.{suffix}", "original", Encoding(kind, suffix, rate, rng.uniform(0.22, 0.42))
        )
        found.append(
            EventPlan(
                name=f"{name}_{place:03d}",
                label="fake" if is_fake else "real",
                manipulation=asked[place // 2 % len(asked)] if is_fake else None,
                width=width,
                height=height,
                num_frames=round(rate * rng.uniform(1.6, 2.6)),
                clips=(clip,),
            )
        )
    return found


def written(folder: Path, planned: Sequence[EventPlan]) -> list[Path]:
    """Their files, made where they are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for event in planned:
        path = folder / event.clips[0].path
        if not path.is_file():
            (content,) = make_event(event)
            path.with_suffix(".part").write_bytes(content)
            path.with_suffix(".part").rename(path)
    manifest_of(planned).write_csv(folder / "manifest.csv")
    return [folder / event.clips[0].path for event in planned]


def trained(folder: Path) -> VideoDetector:
    """That of a run on the corpus, which is made or gone on with."""
    runs = list_runs(folder / "runs")
    given = ["--resume", runs[-1].root] if runs else []
    for name, value in {
        "corpus": folder / "trained" / "manifest.csv", "runs_dir": folder / "runs", "cache_dir": folder / "cache",
        "num_folds": 3, "shuffled_label_control": False, "real_source_control": False, "model": "frame_cnn",
        "num_frames": 6, "fixed_size": 96, "epochs": 12, "early_stopping_epochs": 0,
    }.items():  # fmt: skip
        given += ["-p", name, value] if not runs else []
    subprocess.run([sys.executable, CHECKOUT / "run_notebooks.py", *map(str, given)], check=True)
    return verdict_detector(list_runs(folder / "runs")[-1].root)


# --- Copies


def cropped(frames: Frames, share: float) -> Frames:
    """Without ``share`` of each side, half of it at each end."""
    top, left = (round(side * share / 2) for side in frames.shape[1:3])
    return frames[:, top : frames.shape[1] - top, left : frames.shape[2] - left]


def beside(frames: Frames) -> Frames:
    """With a grey picture of the same size to the right."""
    return np.concatenate([frames, np.full_like(frames, 128)], axis=2)


EDITS: dict[str, tuple[int, Callable[[Frames], Frames]]] = {
    **{f"H.264, crf {crf}": (crf, lambda frames: frames) for crf in (23, 35, 45)},
    "scaled to 1/2": (23, lambda frames: scaled(frames, 0.5)),
    "scaled to 1/4": (23, lambda frames: scaled(frames, 0.25)),
    **{
        f"cropped by {share:.0%}": (23, lambda frames, of=share: cropped(frames, of)) for share in (0.05, 0.1, 0.2, 0.3)
    },
    "scaled to 1/2, cropped by 10%, crf 35": (35, lambda frames: scaled(cropped(frames, 0.1), 0.5)),
    "mirrored": (23, lambda frames: frames[:, :, ::-1]),
    "beside a grey picture (hstack)": (23, beside),
}


def copies(folder: Path, of: Sequence[Path]) -> Iterator[tuple[str, list[Path]]]:
    """Name and files of each edit."""
    for number, (name, (crf, edit)) in enumerate(EDITS.items()):
        made = [folder / f"{number:02d}_{path.stem}.mp4" for path in of]
        folder.mkdir(parents=True, exist_ok=True)
        for path, target in zip(of, made, strict=True):
            if not target.is_file():
                frames, rate = read_frames(path)
                write_frames(target, edit(frames), rate, "libx264", {"crf": str(crf)})
        yield name, made


def main() -> None:
    """Print both tables."""
    folder = Path(sys.argv[1]).absolute()
    own = written(folder / "trained", events("trained", _TRAINED))
    asked = {
        "like the run's": events("familiar", _FAMILIAR),
        f"a generator left out ({_LEFT_OUT})": events("generator", _OF_EACH, fakes=_LEFT_OUT),
        f"a codec left out ({_OTHER_CODEC[0]})": events("codec", _OF_EACH, codec=True),
        f"a size left out ({_OTHER_SIZE[0]} x {_OTHER_SIZE[1]})": events("size", _OF_EACH, size=True),
    }
    files = {name: written(folder / "asked", of) for name, of in asked.items()}
    detector = trained(folder)
    assert detector.distance is not None
    print(f"\nnear_duplicate_bits {detector.networks.config.near_duplicate_bits}; {detector.distance.limit()}\n")
    print("| new videos | number | flagged | by codec, size, length or rate | by features | taken for copies |")
    print("|---|---|---|---|---|---|")
    for name, paths in files.items():
        found = list(detector.findings(paths))
        features = [any("features are unlike" in told for told in each.unfamiliar) for each in found]
        else_ = [any("features are unlike" not in told for told in each.unfamiliar) for each in found]
        either = sum(map(max, features, else_))
        copied = sum(bool(each.no_prediction) for each in found)
        print(f"| {name} | {len(found)} | {either} | {sum(else_)} | {sum(features)} | {copied} |")
    print("\n| copies of its videos | number | known again | also the label is right |\n|---|---|---|---|")
    labels = {path.stem: event.label for path, event in zip(own, events("trained", _TRAINED), strict=True)}
    for name, paths in copies(folder / "copies", own[:_COPIED]):
        found = list(detector.findings(paths))
        known = [each for each in found if "near-duplicate" in " ".join(each.no_prediction)]
        right = sum(f"labelled {labels[Path(each.path).stem[3:]]}" in each.no_prediction[0] for each in known)
        print(f"| {name} | {len(found)} | {len(known)} | {right} |", flush=True)


if __name__ == "__main__":
    main()
