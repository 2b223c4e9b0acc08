"""What was measured, as plain values."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from fvc_lib.services.atomic_files import write_bytes

# Scalers differ by one or two grey levels; frames of other moments differ by tens.
LARGEST_DIFFERENCE_OF_SCALERS = 6.0


@dataclass(frozen=True)
class Case:
    """One clip from one generated video."""

    video: str
    num_frames: int
    size: int


@dataclass(frozen=True)
class CpuCost:
    """One contestant on one case.

    Attributes:
        seconds: CPU time of each round.
        difference: mean absolute difference to ours of the worst frame, in grey levels; 255 for another shape.
        wrong_frames: how many of the frames are not the ones asked for, by the number they carry.
    """

    case: Case
    peer: str
    seconds: tuple[float, ...]
    difference: float
    wrong_frames: int

    @property
    def median_seconds(self) -> float:
        """Of the rounds; targets are judged by it."""
        return statistics.median(self.seconds)

    @property
    def least_seconds(self) -> float:
        """Of the rounds: neighbours on the machine only ever add to CPU time, on a virtual one up to two thirds."""
        return min(self.seconds)

    def ratio_to(self, peer: CpuCost) -> float:
        """Median over the rounds that both took, each round's own time over the peer's beside it."""
        return statistics.median(own / other for own, other in zip(self.seconds, peer.seconds, strict=False))

    @property
    def gave_the_same(self) -> bool:
        """Whether it decoded what was asked for; if not, its cost is no measure."""
        return not self.wrong_frames and self.difference <= LARGEST_DIFFERENCE_OF_SCALERS


@dataclass(frozen=True)
class FloorCount:
    """Packets that must be decoded for a case, of those in the file."""

    case: Case
    necessary: int
    there: int


@dataclass(frozen=True)
class PeakMemory:
    """Bytes over the imports that one decode takes in a fresh process."""

    case: Case
    peer: str
    peak_bytes: int


@dataclass(frozen=True)
class Throughput:
    """A corpus decoded by several workers at once.

    Attributes:
        how: ``threads`` of one process, or ``processes``.
        seconds: wall-clock time of each round.
        cpu_seconds: of each round, over all workers.
        busy_elsewhere: processors that other programs kept busy meanwhile, the mean over the rounds.
        wrong_clips: clips in which a frame is not the one asked for.
    """

    peer: str
    how: Literal["threads", "processes"]
    workers: int
    num_clips: int
    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    busy_elsewhere: float
    wrong_clips: int

    @property
    def clips_per_second(self) -> float:
        """Of the median round."""
        return self.num_clips / statistics.median(self.seconds)


@dataclass(frozen=True)
class Footprint:
    """Memory of whole processes.

    Attributes:
        worker_peak_bytes: of a process that only decodes one 1080p clip; everything counts.
        worker_has_torch: torch was imported there.
        resident_bytes: of one process after each of many decodes.
    """

    worker_peak_bytes: int
    worker_has_torch: bool
    resident_bytes: tuple[int, ...]

    @property
    def growth_bytes(self) -> int:
        """From after the first decode to after the last."""
        return self.resident_bytes[-1] - self.resident_bytes[0]


@dataclass
class Results:
    """All there is to report; parts that were not asked for stay empty.

    Attributes:
        absent: peers that cannot be imported, and why.
        versions: of the others.
        failures: what a peer could not decode, and why.
    """

    absent: dict[str, str]
    versions: dict[str, str]
    failures: dict[str, str] = field(default_factory=dict)
    cpu: list[CpuCost] = field(default_factory=list)
    floor: list[FloorCount] = field(default_factory=list)
    memory: list[PeakMemory] = field(default_factory=list)
    throughput: list[Throughput] = field(default_factory=list)
    scaling: list[Throughput] = field(default_factory=list)
    footprint: Footprint | None = None

    @classmethod
    def load(cls, path: Path) -> Results:
        """What ``save`` wrote; nothing where there is no such file."""
        return TypeAdapter(cls).validate_json(path.read_bytes()) if path.exists() else cls({}, {})

    def save(self, path: Path) -> None:
        """Replace ``path`` with all of this, as JSON."""
        write_bytes(path, TypeAdapter(Results).dump_json(self, indent=1))

    def keep_newest(self) -> None:
        """Forget what was measured again later."""
        self.cpu = list({(each.case, each.peer): each for each in self.cpu}.values())
        self.floor = list({each.case: each for each in self.floor}.values())
        self.memory = list({(each.case, each.peer): each for each in self.memory}.values())
        for passes in (self.throughput, self.scaling):
            passes[:] = {(each.peer, each.how, each.workers): each for each in passes}.values()
