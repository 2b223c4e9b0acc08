"""The generated corpus of task video_text: clips of drawn things that move, with captions that say what is seen.

Training, validation and test show different combinations of colour, shape, motion and ground: a test caption was never
read in training, though every two of its words were. Whoever finds the right one has understood the parts.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from fvc_lib.corpus.sample_captions_drawing import COLOURS, GROUNDS, MOTIONS, SHAPES, Drawing, make_clip
from fvc_lib.corpus.sample_record import PlannedFile, make_missing, write_if_other
from fvc_lib.corpus.sample_scenes import generator_for

# Any change that alters a byte of the corpus needs another version: finished corpora are recognised by it.
CORPUS_VERSION = "1"
MANIFEST = "manifest.csv"
RECORD = "sample_captions.json"
NOTICE = "NOTICE.txt"
_PARTS = (("test", 64, 8), ("validation", 40, 0), ("train", 280, 40))  # captions, and how many have a second clip
_NOTICE_TEXT = """This corpus is synthetic.

Every clip was drawn by FVC's generator (version {version}): no place or thing in it exists. manifest.csv says what is
seen in each. Use it to see that the pipeline runs and reports honestly. Results on it say nothing about real videos.
"""


@dataclass(frozen=True)
class CaptionedClip:
    """One file of the corpus."""

    path: str  # relative to the corpus folder, with '/'
    part: str
    drawing: Drawing


def plan_clips() -> tuple[CaptionedClip, ...]:
    """All clips in the order of their names; the same on every call."""
    combinations = list(product(COLOURS, SHAPES, MOTIONS, GROUNDS))
    dealt = [combinations[i] for i in generator_for("captions", CORPUS_VERSION).permutation(len(combinations))]
    shown: list[tuple[str, tuple[str, str, str, str]]] = []
    for part, num_captions, num_repeated in _PARTS:
        chosen, dealt = dealt[:num_captions], dealt[num_captions:]
        shown.extend((part, combination) for combination in [*chosen, *chosen[:num_repeated]])
    order = generator_for("caption order", CORPUS_VERSION).permutation(len(shown))
    return tuple(_clip(number, *shown[place]) for number, place in enumerate(order))


def _clip(number: int, part: str, combination: tuple[str, str, str, str]) -> CaptionedClip:
    drawing = Drawing(f"drawing_{number:03d}", *combination)
    return CaptionedClip(f"videos/{drawing.name}.{drawing.encoding.suffix}", part, drawing)


def generate_sample_captions(
    folder: Path, *, progress: Callable[[int, int], None] | None = None, stop: Callable[[], bool] | None = None
) -> Path:
    """Write the corpus to ``folder``, or what is missing of it.

    Clips that an earlier call finished are recognised by their checksums and kept; damaged, missing or foreign ones are
    written again. Equal versions of this code, numpy and PyAV write equal bytes.

    Args:
        folder: created when missing; files in it that the corpus does not name are left alone.
        progress: called with (clips done, clips in all) after each clip.
        stop: asked after each clip.

    Returns:
        The path of ``manifest.csv``: columns path, text, split (train, validation, test), group.

    Raises:
        StoppedError: ``stop`` said so; a later call goes on.
        OSError: as the file system gave it; a later call finishes what was begun.
    """
    clips = plan_clips()
    files = [[PlannedFile(clip.path, partial(make_clip, clip.drawing))] for clip in clips]
    make_missing(folder, folder / RECORD, CORPUS_VERSION, files, "clips", progress, stop)
    write_if_other(folder / NOTICE, _NOTICE_TEXT.format(version=CORPUS_VERSION))
    write_if_other(folder / MANIFEST, manifest_text(clips))
    return folder / MANIFEST


def manifest_text(clips: Sequence[CaptionedClip]) -> str:
    """The manifest's CSV text, one row per clip."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["path", "text", "split", "group"])
    writer.writerows([clip.path, clip.drawing.caption, clip.part, clip.drawing.name] for clip in clips)
    return text.getvalue()
