"""Evidence on a judged file: its score over time, an occlusion map, and where it says it comes from.

One file is in memory at a time. A part that fails leaves the others as they are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from fvc_lib.services.atomic_files import path_from_text
from fvc_lib.services.errors import FvcError
from fvc_lib.services.progress import Tell, silent
from fvc_lib.tasks.video.verdicts.occlusion import OcclusionMap, occlusion_map
from fvc_lib.tasks.video.verdicts.provenance import Provenance, provenance_of
from fvc_lib.tasks.video.verdicts.rule import KnownVideos
from fvc_lib.tasks.video.verdicts.scoring import Networks
from fvc_lib.tasks.video.verdicts.windows import WindowScores, decoded, score_windows
from fvc_lib.video.clips.clip_file import Pixels

T = TypeVar("T")
NO_FRAMES = "The model sees features of the whole video and no frames, so it has no score over time and no map."
NO_NETWORK = "This is a video of the run, and the bundle does not have the network that had not seen it."


@dataclass(frozen=True)
class FileEvidence:
    """The evidence on one file; a part that failed or does not apply is None.

    Attributes:
        clips: uint8 (N, T, 3, H, W), the frames that its score is of, without black bars.
        windows: the score over time.
        occlusion: where it looks fake.
        provenance: where it says it comes from.
        notes: why parts do not apply, a sentence each.
        failures: the errors of parts that failed; trying again may help.
    """

    clips: Pixels | None = None
    windows: WindowScores | None = None
    occlusion: OcclusionMap | None = None
    provenance: Provenance | None = None
    notes: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()


def file_evidence(
    networks: Networks, known: KnownVideos, row: Mapping[str, Any], *, map_minutes: float = 0.0, tell: Tell = silent
) -> FileEvidence:
    """Gather the evidence on one file.

    Args:
        networks: that judged it.
        known: the run's videos; one of them is judged by the fold that had not seen it.
        row: of VERDICTS, with a score.
        map_minutes: the most that a map may take; 0: no map.
        tell: receives the part at work.

    Raises:
        MemoryError: and any other error that is no fault of the file.
    """
    path, failures = path_from_text(row["path"]), list[str]()

    def part(name: str, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except (FvcError, OSError, ValueError, RuntimeError) as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
            return None

    provenance = part("Provenance", lambda: provenance_of(path))
    own = known.rows.filter(content_sha256=row["sha256"]).drop_nulls("score")
    folds = (int(own["fold"][0]),) if own.height else networks.judges
    note = NO_NETWORK if not set(folds) <= set(networks.folds) else "" if networks.sees_frames else NO_FRAMES
    if note:
        return FileEvidence(provenance=provenance, notes=(note,), failures=tuple(failures))

    def from_one_pass() -> tuple[Pixels, Pixels, WindowScores | None]:
        tell("decoding the whole video", 0, 0)
        with decoded(networks, path, row["sha256"]) as video:
            shown = np.ascontiguousarray(video.without_bars(video.clips))
            return video.clips, shown, part("Score over time", lambda: score_windows(networks, folds, video, tell))

    clips, shown, windows = part("The whole video", from_one_pass) or (None,) * 3
    occlusion = None
    if clips is not None and map_minutes > 0:
        seen, most = clips, map_minutes
        occlusion = part("Map", lambda: occlusion_map(networks, folds, seen, max_minutes=most, tell=tell))
    return FileEvidence(shown, windows, occlusion, provenance, (), tuple(failures))
