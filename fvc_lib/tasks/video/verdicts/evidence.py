"""What there is to look at: of each file that got a score, one after the other, with the memory of one.

A part that fails is said to have failed and costs itself alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import polars as pl

from fvc_lib.metrics.calibration import probabilities
from fvc_lib.services.atomic_files import path_from_text
from fvc_lib.services.errors import FvcError
from fvc_lib.services.progress import Tell, silent
from fvc_lib.tasks.video.traces import KnownTraces, Traces
from fvc_lib.tasks.video.verdicts.feature_distance import UNKNOWN, FeatureDistance, Features
from fvc_lib.tasks.video.verdicts.maps import ClipMaps, maps_within
from fvc_lib.tasks.video.verdicts.provenance import Provenance, provenance_of
from fvc_lib.tasks.video.verdicts.rule import KnownVideos
from fvc_lib.tasks.video.verdicts.scoring import Networks
from fvc_lib.tasks.video.verdicts.shots import Footage, footage_of, length_sentences
from fvc_lib.tasks.video.verdicts.windows import WholeVideo, WindowScores, decoded, score_windows
from fvc_lib.video.clips.clip_file import Pixels

T = TypeVar("T")
_SAME_SCORE = 0.005  # batches of another size round otherwise


@dataclass(frozen=True)
class FileEvidence:
    """Of one file; a part that failed or does not apply is None."""

    row: Mapping[str, Any]  # of VERDICTS
    folds: tuple[int, ...]  # whose networks judged it
    clips: Pixels | None = None  # uint8 (N, T, 3, S, S), the frames that its score is of
    shown: Pixels | None = None  # uint8 (N, T, 3, H, W), the same without black bars
    windows: WindowScores | None = None  # when
    maps: ClipMaps | None = None  # where
    footage: Footage | None = None  # what the video is
    provenance: Provenance | None = None  # where it says it comes from
    traces: Traces | None = None  # what its pixels and packets show
    familiar: str = ""  # how far its features are from those of the run's videos, a sentence
    failures: tuple[str, ...] = field(default=())  # what could not be found out, a sentence each
    may_pass: bool = False  # whether one of them may not come again


def file_evidence(
    networks: Networks,
    known: KnownVideos,
    row: Mapping[str, Any],
    *,
    map_minutes: float = 0.0,
    distance: FeatureDistance | None = None,
    traces: KnownTraces | None = None,
    judged_alone: bool = True,
    tell: Tell = silent,
) -> FileEvidence:
    """All parts of one file; ``row`` is of VERDICTS, with a score; maps where they take at most ``map_minutes``.

    ``distance`` tells how far a file's features are from those of the run's videos; None: not known.
    ``traces`` is what its own are set beside; None: they are not looked for.
    ``judged_alone`` says whether the row's score is of ``networks`` alone, and so can be compared with theirs.
    ``tell`` is told which part is looked for.

    Raises:
        MemoryError: and whatever else is no fault of the file.
    """
    own, failures, familiar, raised = _fold_of_own(known, row), list[str](), list[str](), list[Exception]()
    is_new, features = own is None, dict[int, Features]()
    folds = networks.judges if own is None else (own,)

    def part(name: str, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except (FvcError, OSError, ValueError, RuntimeError) as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
            raised.append(error)
            return None

    provenance = part("Where it says it comes from", lambda: provenance_of(path_from_text(row["path"])))

    def from_one_pass() -> tuple[Pixels, Pixels, WindowScores | None, Footage | None, Pixels]:
        tell("decoding the whole video", 0, 0)
        with decoded(networks, path_from_text(row["path"]), row["sha256"]) as video:
            if networks.measurer is not None:
                failures.append(f"When and where: {_NO_FRAMES}")
                looked = part("What the video is", lambda: _footage(networks, video, provenance))
                return video.clips, video.clips, None, looked, video.found.middle
            other = _other_score(networks, folds, video, row, features if distance else None)
            failures.extend(other if judged_alone else ())
            shown = np.ascontiguousarray(video.without_bars(video.clips))
            windows = part("When", lambda: score_windows(networks, folds, video, tell))
            if is_new:
                is_known = len(features) == len(folds)  # not after out of memory
                familiar.append(
                    distance.sentence(float(distance.quantiles(features)[0])) if distance and is_known else UNKNOWN
                )
            tell("looking for cuts, stills and black frames", 0, 0)
            looked = part("What the video is", lambda: _footage(networks, video, provenance))
            return video.clips, shown, windows, looked, video.found.middle

    if not set(folds) <= set(networks.folds):
        failures.append(
            "When and where: this is a video of the run, and the bundle has not the network that had not seen it."
        )
        return FileEvidence(row, (), provenance=provenance, failures=tuple(failures))
    clips, shown, windows, footage, middle = part("The whole video", from_one_pass) or (None,) * 5
    what = None
    if traces is not None and middle is not None:
        tell("looking for traces, and for the nearest of the run's videos", 0, 0)
        what = part("What it shows", lambda: traces.of(row, middle, features))
    wanted = clips if map_minutes > 0 and networks.measurer is None else None
    maps = None if wanted is None else part("Where", lambda: maps_within(networks, folds, wanted, map_minutes, tell))
    return FileEvidence(
        row, folds, clips, shown, windows, maps, footage, provenance, what, " ".join(familiar), tuple(failures),
        bool(raised),
    )  # fmt: skip


_NO_FRAMES = (
    "the model sees features of the whole video and no frames, so there are no scores of windows and no maps of where "
    "it is called fake."
)


def _footage(networks: Networks, video: WholeVideo, stated: Provenance | None) -> Footage:
    """Sentences on its length go before the others."""
    found, shape, view = video.found, networks.config.clips, networks.store.view
    frames, seconds = (stated.stated_frames, stated.stated_seconds) if stated else (None, None)
    told = tuple(length_sentences(found.num_source_frames, found.seconds, shape.num_frames, frames, seconds))
    if view.crop:
        return Footage(np.empty(0), 0.0, 0.0, (*told, "Shots were not looked for: the networks see a crop alone."))
    shown = footage_of(*video.in_order())
    return replace(shown, sentences=(*told, *shown.sentences))


def _fold_of_own(known: KnownVideos, row: Mapping[str, Any]) -> int | None:
    """Of a video of the run the fold whose network had not seen it, which alone may judge it; None: a new video."""
    own = known.rows.filter(pl.col("content_sha256") == row["sha256"]).drop_nulls("score")
    return int(own["fold"][0]) if own.height else None


def _other_score(
    networks: Networks,
    folds: tuple[int, ...],
    video: WholeVideo,
    row: Mapping[str, Any],
    features: dict[int, Features] | None,
) -> list[str]:
    """A sentence where the frames decoded here do not get the score that the file was given.

    ``features``, where it is given, is filled with what goes into each network's head, float32 (1, F).
    """
    found = []
    for fold in folds:
        taken: list[Features] | None = None if features is None else []
        logits = networks.logits(fold, video.clips[None], taken)
        found.append(logits[0] / networks.folds[fold].temperature)
        if features is not None and taken:
            features[fold] = taken[0]
    score = float(probabilities(np.array(found), 1.0).mean())
    if abs(score - row["score"]) <= _SAME_SCORE:
        return []
    return [f"Decoded again the file gets the score {score:.3f}, and not {row['score']:.3f}: what follows is of that."]
