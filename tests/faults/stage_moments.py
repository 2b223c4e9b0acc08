"""Moments of a stage at which its processes die: told by the files it opens and renames, or by the time alone."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import IMAGES, VIDEO_TEXTS, read_table
from tests.faults.small_runs import Place

# Python reads it in every process that it starts. The interpreter tells a hook of every file that is about to be opened
# or renamed. Right before the last of the points it waits for, a process of the run dies with the runner ("die"), or
# alone ("die alone"); or the first that comes there makes a mark and waits ("hold PATH"), a kernel until it is asked to
# stop, a rank, which is not asked itself, until there is PATH.go.
SITECUSTOMIZE = """
import json, os, re, signal, sys, time

def begin(points, then):
    left = [[event, re.compile(pattern), times] for event, pattern, times in points]
    in_kernel = any("ipykernel_launcher" in word for word in sys.orig_argv)

    def watch(event, arguments):
        if not left or event not in ("open", "os.rename"):
            return
        path = arguments[1 if event == "os.rename" else 0]
        wanted, pattern, times = left[0]
        if not isinstance(path, str) or wanted not in ("", event) or not pattern.search(path):
            return
        left[0][2] -= 1
        if left[0][2]:
            return
        del left[0]
        if not left:
            hold(then[5:]) if then.startswith("hold ") else die()

    def hold(mark):
        if os.path.exists(mark):
            return
        with open(mark, "x"):
            end = time.monotonic() + 300
        stage = getattr(sys.modules["__main__"], "stage", None)
        while not (os.path.exists(mark + ".go") or stage and stage.stop_requested) and time.monotonic() < end:
            time.sleep(0.02)

    def die():
        if in_kernel and then == "die":
            os.kill(int(os.environ["JPY_PARENT_PID"]), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    is_rank = any("multiprocessing.spawn" in word for word in sys.orig_argv)
    if in_kernel or is_rank or any(word.endswith(("run_notebooks.py", "fvc_lib.tasks.rank")) for word in sys.orig_argv):
        sys.addaudithook(watch)

if "FVC_TEST_MOMENT" in os.environ:
    begin(**json.loads(os.environ["FVC_TEST_MOMENT"]))
"""


@dataclass(frozen=True)
class Point:
    """A file is about to be opened (``open``) or to get its name (``os.rename``); either, where ``event`` is empty.

    Attributes:
        event: as Python's audit hooks call it.
        pattern: of the path, or the name it gets.
        times: so many times.
    """

    event: str
    pattern: str
    times: int = 1


def renamed(name: str) -> Point:
    """A whole file is about to stand under ``name``."""
    return Point("os.rename", f"/{re.escape(name)}$")


NEXT_FILE = Point("", "")


def watching(folder: Path, points: tuple[Point, ...], then: str) -> dict[str, str]:
    """Variables for a process that shall do ``then`` at the last of ``points``; see ``SITECUSTOMIZE``."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITECUSTOMIZE)
    moment = {"points": [[point.event, point.pattern, point.times] for point in points], "then": then}
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    return {"FVC_TEST_MOMENT": json.dumps(moment), "PYTHONPATH": path}


@dataclass(frozen=True)
class AtStep:
    """Right before the last of ``points``, which come one after the other in one process.

    Attributes:
        name: what the stage is doing.
        points: see there.
        alone: the kernel dies and the runner lives to tell; else both die at once, as when a machine goes down.
    """

    name: str
    points: tuple[Point, ...]
    alone: bool = False

    def live_and_die(self, place: Place, *arguments: str) -> None:
        """Start or resume the run in ``place``, and see it die."""
        variables = watching(place.folder.parent, self.points, "die alone" if self.alone else "die")
        victim = place.start(*arguments, variables=variables)
        shown, _ = victim.communicate(timeout=600)
        assert victim.returncode == (137 if self.alone else -signal.SIGKILL), f"{self.name}: {shown}"


def at_each_step(stage: str, whole: RunPaths) -> list[AtStep]:
    """Everything such a stage does, in its order; every other time the kernel dies alone."""
    first, *outputs = _OUTPUTS[stage]
    trains = Point("open", rf"/metrics/{stage}\.jsonl$")
    chance = random.Random(stage)

    def reads(part: str, times: int) -> Point:
        return Point("open", f"(?:{'|'.join(map(re.escape, _files_of(stage, whole, part)))})$", times)

    steps = [
        ("writing the index", (renamed(first),)),
        ("before the first checkpoint", (renamed("latest_checkpoint.pt"),)),
        ("after the first checkpoint", (trains, renamed("latest_checkpoint.pt"), NEXT_FILE)),
        ("in mid-epoch", (trains, reads("train", chance.randrange(9, 20)))),
        ("evaluating the first epoch", (trains, reads("validation", chance.randrange(1, 6)))),
        ("between the latest checkpoint and the best model", (renamed("best_model.safetensors"),)),
        ("at the second epoch's end", (renamed("best_model.safetensors"), renamed("latest_checkpoint.pt"))),
        ("evaluating the test part", (trains, reads("test", chance.randrange(1, 8)))),
        *((f"writing {name}", (renamed(name),)) for name in outputs),
        ("after the outcome", (renamed("outcome.json"), NEXT_FILE)),
        ("writing the results", (renamed("task_results.feather"),)),
        ("after the results", (renamed("task_results.feather"), NEXT_FILE)),
    ]
    kills = [AtStep(name, points, alone=bool(n % 2)) for n, (name, points) in enumerate(steps)]
    return [*kills, AtStep("keeping the stage's record", (renamed(f"stage_{stage}.json"),))]


# The last table of the index, then what is written when the test part was looked at.
_OUTPUTS = {
    "10_image_recognition": (
        "image_targets.parquet", "labels.json", "image_predictions.parquet",
        "target_predictions.parquet", "outcome.json",
    ),
    "20_video_text": (
        "video_texts.parquet", "test_embeddings.safetensors", "retrieval_ranks.parquet", "captions.parquet",
        "outcome.json",
    ),
}  # fmt: skip


def _files_of(stage: str, whole: RunPaths, part: str) -> list[str]:
    """Ends of the paths by which the part's samples are read: pictures, or the clips of videos."""
    if stage == "10_image_recognition":
        table = read_table(whole.images, IMAGES)
        return [f"/{path}" for path in table.filter(table["part"] == part)["path"]]
    table = read_table(whole.video_texts, VIDEO_TEXTS)
    return [f"/{video_id}.npy" for video_id in table.filter(table["part"] == part)["video_id"]]
