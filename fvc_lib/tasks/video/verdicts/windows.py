"""When is a video suspicious? A score for every window over the whole of it, from one pass through the file.

What a window is says ``video/decode/windows.py``. The networks that judged the file judge its windows. They were
evaluated on whole videos and not on windows, so the curve shows where scores are higher, and not how surely.
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
from fvc_lib.tasks.video.verdicts.scoring import FileToScore, Networks, item_to_decode, scratch_folder
from fvc_lib.video.clips.clip_file import Pixels
from fvc_lib.video.clips.making import decode_limits
from fvc_lib.video.decode.windows import MOST_WINDOWS, Windows, unpacked

Floats = npt.NDArray[np.floating]

DECODE_SECONDS = 900.0  # for a whole video; then its curve is given up
_FUNCTION = "fvc_lib.video.clips.worker:make_windows"
LIMIT = "The run was evaluated on whole videos and not on windows: the curve shows where, and not how surely."


class WholeVideo:
    """A decoded video: its own clips and every window. Valid inside ``decoded``.

    Attributes:
        clips: uint8 (N, T, 3, S, S), those that the run's eyes take of the video.
        found: where the clips, and behind them the windows, lie.
    """

    def __init__(self, found: Windows, frames: Pixels) -> None:
        self.found, self._frames = found, frames
        self.clips: Pixels = frames[found.stored[: found.num_clips]]

    @property
    def num_windows(self) -> int:
        """W, at least 1."""
        return len(self.found.places) - self.found.num_clips

    def without_bars(self, frames: Pixels) -> Pixels:
        """The picture in ``frames``, uint8 (..., S, S)."""
        left, top, width, height = self.found.content
        return frames[..., top : top + height, left : left + width]

    def in_order(self) -> tuple[Pixels, Floats]:
        """Every frame that is stored, uint8 (F, 3, H, W) without black bars, and its second; not with ``View.crop``.

        Frames between two whose times are known are taken to be evenly spaced.
        """
        found, places = self.found, np.unique(self.found.places)
        known = np.concatenate([found.places[:, 0], found.places[:, -1] + 1])
        at, first = np.unique(known, return_index=True)
        seconds = np.interp(places, at, np.concatenate([found.begins, found.ends])[first])
        return self.without_bars(self._frames), seconds

    def windows(self, first: int, end: int) -> Pixels:
        """uint8 (end - first, T, 3, S, S): a copy of windows ``first`` to ``end``, half-open."""
        behind = self.found.num_clips
        return np.asarray(self._frames[self.found.stored[behind + first : behind + end]])


@dataclass(frozen=True)
class WindowScores:
    """The curve.

    Attributes:
        begins, ends: float64 (W,), seconds from the video's first frame, ascending.
        scores: float64 (W, K), the calibrated probability of fake by each network.
        middles: uint8 (W, 3, H, W), the middle frame of each window as the networks saw it, without black bars.
        seconds: of the whole video.
        share_seen: of the video's frames, how many some window shows.
        notes: what to know of this video's windows, a sentence each.
    """

    begins: Floats
    ends: Floats
    scores: Floats
    middles: Pixels
    seconds: float
    share_seen: float
    notes: tuple[str, ...] = ()

    @property
    def mean(self) -> Floats:
        """float64 (W,), over the networks, as a video's score is."""
        return np.asarray(self.scores.mean(1))


@contextmanager
def decoded(networks: Networks, path: Path, content_sha256: str) -> Iterator[WholeVideo]:
    """Decode a whole video with the run's own eyes, in a process of its own; its frames lie on the disk.

    Raises:
        DataError: it cannot be decoded within the limits, or is not the file that was judged.
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
        problem = f"the decoder gave up: {answer.detail}" if answer.failure else ""
        problem = problem or value.get("video_error") or value.get("crop_error") or ""
        problem = "the code that decodes was changed since it was loaded here" if "code_changed" in value else problem
        if problem:
            raise DataError(problem)
        num_stored, value["middle"] = int(value.pop("num_stored")), unpacked(value["middle"])
        fields: dict[str, Any] = {n: np.array(each) if isinstance(each, list) else each for n, each in value.items()}
        frames = np.memmap(folder / "windows.raw", np.uint8, "r", shape=(num_stored, 3, side, side))
        yield WholeVideo(Windows(**fields), frames)


def score_windows(networks: Networks, folds: tuple[int, ...], video: WholeVideo, tell: Tell = silent) -> WindowScores:
    """Have the networks of ``folds`` judge every window, as many at once as the run has in a batch."""
    found, behind = video.found, video.found.num_clips
    logits = np.empty((video.num_windows, len(folds)))
    middles = []
    for first in range(0, video.num_windows, networks.batch_size):
        tell("judging windows over the whole video", first, video.num_windows)
        some = video.windows(first, first + networks.batch_size)
        middles.append(video.without_bars(some[:, some.shape[1] // 2]).copy())
        for column, fold in enumerate(folds):
            said = networks.logits(fold, some[:, None])
            logits[first : first + len(some), column] = said / networks.folds[fold].temperature
    places = found.places[behind:]
    return WindowScores(
        found.begins[behind:],
        found.ends[behind:],
        probabilities(logits, 1.0),
        np.concatenate(middles),
        found.seconds,
        len(np.unique(places)) / found.num_source_frames,
        tuple(_notes(networks, found)),
    )


def _notes(networks: Networks, found: Windows) -> Iterator[str]:
    places, view = found.places[found.num_clips :], networks.store.view
    n, number, frames = found.num_source_frames, len(places), places.shape[1]
    if n == 1:
        yield "A still: the video has one frame, so there is no when."
        return
    if number == 1:
        yield f"Too short for a curve: of its {n:,} frames a window needs {frames}."
        return
    length = float((found.ends - found.begins)[found.num_clips :].mean())
    told = f"Each of the {number} windows shows {frames} frames of about {length:.2g} seconds"
    if (places[1:, 0] <= places[:-1, -1]).all():
        yield f"{told} and begins within the one before."
    else:
        seen = len(np.unique(places)) / n
        yield f"{told}, with gaps between: together they show {100 * seen:.0f} % of the video's frames."
    if number >= MOST_WINDOWS and not view.stride:
        yield f"The video is long, so that {number} windows are longer than those of a shorter one."
