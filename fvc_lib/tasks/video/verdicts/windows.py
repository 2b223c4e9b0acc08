"""The score over time: every window of a whole video judged from one pass through the file.

``video/decode/windows.py`` defines the windows. They are judged by the networks that judged the file.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics.calibration import probabilities
from fvc_lib.services.errors import DataError
from fvc_lib.services.isolated_workers import run_isolated
from fvc_lib.services.progress import Tell, silent
from fvc_lib.tasks.decoding import FileToScore, item_to_decode, scratch_folder
from fvc_lib.tasks.video.verdicts.scoring import Networks
from fvc_lib.video.clips.clip_file import Pixels
from fvc_lib.video.clips.making import decode_limits
from fvc_lib.video.decode.windows import Windows

Floats = npt.NDArray[np.floating]

DECODE_SECONDS = 900.0  # the limit for a whole video
LIMIT = "The run was evaluated on whole videos and not on windows: the curve shows where, and not how surely."
_FUNCTION = "fvc_lib.video.clips.worker:make_windows"


class WholeVideo:
    """A decoded video, its clips and its windows; valid inside ``decoded``.

    Attributes:
        clips: uint8 (N, T, 3, S, S), the clips that give the video's score.
        found: where the clips, and after them the windows, lie.
    """

    def __init__(self, found: Windows, frames: Pixels) -> None:
        self.found, self._frames = found, frames
        self.clips: Pixels = frames[found.stored[: found.num_clips]]

    @property
    def num_windows(self) -> int:
        """W, at least 1."""
        return len(self.found.places) - self.found.num_clips

    def without_bars(self, frames: Pixels) -> Pixels:
        """Return the picture in ``frames``, uint8 (..., S, S), without black bars."""
        left, top, width, height = self.found.content
        return frames[..., top : top + height, left : left + width]

    def windows(self, first: int, end: int) -> Pixels:
        """Return a copy of the windows ``first`` to ``end``, half-open: uint8 (end - first, T, 3, S, S)."""
        before = self.found.num_clips
        return np.asarray(self._frames[self.found.stored[before + first : before + end]])


@dataclass(frozen=True)
class WindowScores:
    """The score over time.

    Attributes:
        begins, ends: float64 (W,), seconds from the video's first frame, ascending.
        scores: float64 (W, K), the calibrated probability of fake by each network.
        middles: uint8 (W, 3, H, W), the middle frame of each window without black bars.
        seconds: length of the video.
        note: how the windows cover the video, a sentence.
    """

    begins: Floats
    ends: Floats
    scores: Floats
    middles: Pixels
    seconds: float
    note: str


@contextmanager
def decoded(networks: Networks, path: Path, content_sha256: str) -> Iterator[WholeVideo]:
    """Decode a whole video as the run decodes its clips, in a worker process; its frames lie on the disk.

    Raises:
        DataError: it cannot be decoded within the limits, or its content is another one.
        OSError: its frames cannot be written.
    """
    store, side = networks.store, networks.store.fixed_size
    with scratch_folder(networks.config) as folder:
        file = FileToScore(path, (), content_sha256=content_sha256)
        item = item_to_decode(store, file, folder / "windows.raw")
        limits = decode_limits(store, 1, recipes=bool(store.recipe)) | {"timeout_seconds": DECODE_SECONDS}
        with closing(run_isolated(_FUNCTION, [item], **limits)) as answers:
            answer = next(answers)
        value: dict[str, Any] = answer.value or {}
        if "write_error" in value:
            raise OSError(*value["write_error"])
        if answer.failure:
            raise DataError(f"the decoder gave up: {answer.detail}")
        if "num_stored" not in value:
            reasons = value.get("video_error"), value.get("crop_error"), "the decoding code was changed meanwhile"
            raise DataError(next(filter(None, reasons)))
        num_stored = int(value.pop("num_stored"))
        fields: dict[str, Any] = {n: np.array(each) if isinstance(each, list) else each for n, each in value.items()}
        frames = np.memmap(folder / "windows.raw", np.uint8, "r", shape=(num_stored, 3, side, side))
        yield WholeVideo(Windows(**fields), frames)


def score_windows(networks: Networks, folds: tuple[int, ...], video: WholeVideo, tell: Tell = silent) -> WindowScores:
    """Judge every window by the networks of ``folds``, one batch of the run's size at a time."""
    found, before, size = video.found, video.found.num_clips, networks.batch_size
    logits = np.empty((video.num_windows, len(folds)))
    middles = []
    for first in range(0, video.num_windows, size):
        tell("judging windows over the whole video", first, video.num_windows)
        some = video.windows(first, first + size)
        middles.append(video.without_bars(some[:, some.shape[1] // 2]).copy())
        for column, fold in enumerate(folds):
            of_fold = networks.logits(fold, some[:, None])
            logits[first : first + len(some), column] = of_fold / networks.folds[fold].temperature
    return WindowScores(
        begins=found.begins[before:],
        ends=found.ends[before:],
        scores=probabilities(logits, 1.0),
        middles=np.concatenate(middles),
        seconds=found.seconds,
        note=_note(found),
    )


def _note(found: Windows) -> str:
    places, num_frames = found.places[found.num_clips :], found.num_source_frames
    number, per_window = places.shape
    if num_frames == 1:
        return "A still: the video has one frame, so there is no score over time."
    if number == 1:
        return f"Too short for a score over time: it has {num_frames:,} frames, and a window needs {per_window}."
    length = float((found.ends - found.begins)[found.num_clips :].mean())
    covered = 100 * len(np.unique(places)) / num_frames
    return (
        f"Each of the {number} windows shows {per_window} frames of about {length:.2g} seconds; together they show "
        f"{covered:.0f} % of the video's frames."
    )
