"""Moments of a stage at which its processes die, recognised by the files that they open and rename."""

import json
import os
import random
import re
import signal
from pathlib import Path
from typing import NamedTuple

from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import IMAGES, VIDEO_TEXTS, read_table
from tests.faults.small_runs import Place

# Python reads it in every process that it starts. An audit hook sees every file that is about to be opened or renamed.
# Right before the last point, a process of the run dies with the runner ("die") or alone ("die alone"). With
# "hold PATH" the first process that comes there makes PATH and waits: a kernel until it is asked to stop, a rank until
# PATH.go exists.
SITECUSTOMIZE = """
import json, os, re, signal, sys, time

def begin(points, then):
    left = [[event, re.compile(pattern), times] for event, pattern, times in points]
    in_kernel = any("ipykernel_launcher" in word or "kernel_server" in word for word in sys.orig_argv)

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
            end = time.monotonic() + 1200
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


class Point(NamedTuple):
    """A file is about to be opened (``open``) or named (``os.rename``) for the n-th time; either if ``event`` is empty.

    Attributes:
        event: The name of Python's audit event.
        pattern: Searched in the path, or in the new name.
        times: The number n.
    """

    event: str
    pattern: str
    times: int = 1


def renamed(name: str) -> Point:
    """Return the moment before a whole file gets its ``name``."""
    return Point("os.rename", f"/{re.escape(name)}$")


NEXT_FILE = Point("", "")


def watching(folder: Path, points: tuple[Point, ...], then: str) -> dict[str, str]:
    """Return variables for a process that shall do ``then`` at the last of ``points``; see ``SITECUSTOMIZE``."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITECUSTOMIZE)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    return {"FVC_TEST_MOMENT": json.dumps({"points": points, "then": then}), "PYTHONPATH": path}


def live_and_die(place: Place, name: str, points: tuple[Point, ...], alone: bool, *arguments: str) -> None:
    """Start or resume the run in ``place`` and see it die right before the last of ``points``.

    The kernel dies ``alone`` and the runner reports it, or both die at once, as when a machine goes down.
    """
    variables = watching(place.folder.parent, points, "die alone" if alone else "die")
    victim = place.start(*arguments, variables=variables)
    shown, _ = victim.communicate(timeout=600)
    assert victim.returncode == (137 if alone else -signal.SIGKILL), f"{name}: {shown}"


def at_each_step(stage: str, whole: RunPaths) -> list[tuple[str, tuple[Point, ...]]]:
    """Return everything that such a stage does, in its order: a name and the points that lead there."""
    first, *outputs = _OUTPUTS[stage]
    trains = Point("open", rf"/metrics/{stage}\.jsonl$")
    chance = random.Random(stage)

    def reads(part: str, times: int) -> Point:
        return Point("open", f"(?:{'|'.join(map(re.escape, _files_of(stage, whole, part)))})$", times)

    return [
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
        ("writing the stage's record", (renamed(f"stage_{stage}.json"),)),
    ]


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
    """Return ends of the paths of the part's samples: pictures, or the clips of videos."""
    if stage == "10_image_recognition":
        table = read_table(whole.images, IMAGES)
        return [f"/{path}" for path in table.filter(table["part"] == part)["path"]]
    table = read_table(whole.video_texts, VIDEO_TEXTS)
    return [f"/{video_id}.npy" for video_id in table.filter(table["part"] == part)["video_id"]]
