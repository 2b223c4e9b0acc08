"""Damaged and hostile files, in the worker processes that a run gives them to: frames or a documented error, always."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fvc_lib.corpus.probing import DEFAULT_TIMEOUT_SECONDS
from fvc_lib.services.isolated_workers import run_isolated
from fvc_lib.video.decode.source import VideoError
from tests.video.mutations import GOOD_FILES, MUTATIONS, Case, cases, elements_of, textured_frames

EXAMINE = "tests.video.mutation_worker:examine"
REASONS = {kind.reason for kind in VideoError.__subclasses__()}
TIMEOUT_SECONDS = DEFAULT_TIMEOUT_SECONDS  # what an index gives each file
WARM_UP_FILES = 50
MAX_GROWTH_BYTES = 20e6
LARGEST_REAL_BYTES = 150_000
WIDTH, HEIGHT = 96, 64
KEPT = Path(__file__).parents[2] / "build" / "fuzz"  # cases that failed, for a closer look

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of processes in /proc")


@dataclass(frozen=True)
class Outcome:
    """What became of one file: the worker's answer, or how it failed."""

    name: str
    answer: dict[str, Any] | None
    failure: str

    @property
    def reason(self) -> str:
        return self.failure.partition(":")[0] if self.answer is None else str(self.answer["probe"])


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory, encode_video: Callable[..., Path]) -> dict[str, bytes]:
    """The good files by name."""
    folder = tmp_path_factory.mktemp("good")
    frames = textured_frames(16, WIDTH, HEIGHT)
    return {
        name: encode_video(folder / name, 16, width=WIDTH, height=HEIGHT, frames=frames, **options).read_bytes()
        for name, options in GOOD_FILES.items()
    }


def examine(files: Sequence[tuple[str, Path]], *, workers: int = 1, say: Callable[[str], None] = str) -> list[Outcome]:
    """The outcomes of (name, path) pairs, in the order they were finished."""
    outcomes: list[Outcome] = []
    answers = run_isolated(EXAMINE, [str(path) for _, path in files], workers=workers, timeout_seconds=TIMEOUT_SECONDS)
    for answer in answers:
        failure = f"{answer.failure}: {answer.detail}" if answer.failure else ""
        outcomes.append(Outcome(files[answer.position][0], answer.value, failure))
        if len(outcomes) % 100 == 0:
            say(f"{len(outcomes)} of {len(files)}")
    return outcomes


def what_is_wrong(outcome: Outcome) -> str | None:
    """Which promise one outcome breaks, or none."""
    if outcome.answer is None:
        return outcome.failure
    said = {str(outcome.answer[call]) for call in ("probe", "decode")}
    if not said <= REASONS | {"frames"}:
        return f"undocumented: {said}"
    if outcome.answer["stderr_bytes"]:
        return "noise on standard error"
    if outcome.answer["probe"] != "frames" and len(outcome.answer["detail"]) < 20:
        return f"a reason without an explanation: {outcome.answer['detail']!r}"
    return None


def growth_bytes(outcomes: Sequence[Outcome]) -> float:
    """The most that any worker's memory grew after its first files."""
    sizes = defaultdict(list)
    for outcome in outcomes:
        if outcome.answer is not None:
            sizes[outcome.answer["pid"]].append(outcome.answer["rss_bytes"])
    settled = {pid: rss[min(WARM_UP_FILES, len(rss) // 2) :] for pid, rss in sizes.items()}
    return max(rss[-1] - rss[0] for rss in settled.values())


def check(outcomes: Sequence[Outcome], bases: dict[str, bytes]) -> None:
    """Fail with every broken promise, and keep the files that broke one."""
    wrong = {outcome.name: reason for outcome in outcomes if (reason := what_is_wrong(outcome)) is not None}
    for name in wrong:
        base, kind, seed = name.split(":")
        KEPT.mkdir(parents=True, exist_ok=True)
        (KEPT / f"{seed}_{base}").write_bytes(Case(base, kind, int(seed)).content(bases))
    assert not wrong, f"the files are in {KEPT}"
    assert growth_bytes(outcomes) < MAX_GROWTH_BYTES
    open_files = {outcome.answer["open_files"] for outcome in outcomes if outcome.answer is not None}
    assert len(open_files) == 1, "files stay open"


def write_cases(chosen: Sequence[Case], bases: dict[str, bytes], folder: Path) -> list[tuple[str, Path]]:
    files = []
    for case in chosen:
        path = folder / f"{case.seed}{Path(case.base).suffix}"
        path.write_bytes(case.content(bases))
        files.append((case.name, path))
    return files


def table(outcomes: Sequence[Outcome]) -> str:
    """Outcome by kind of damage, with the slowest file and the memory peak."""
    counts = Counter((outcome.name.split(":")[1], outcome.reason) for outcome in outcomes)
    reasons = sorted({reason for _, reason in counts})
    lines = [f"{'':22}" + "".join(f"{reason:>12}" for reason in reasons)]
    lines += [f"{kind:22}" + "".join(f"{counts[kind, reason]:12}" for reason in reasons) for kind in MUTATIONS]
    answered = [outcome for outcome in outcomes if outcome.answer is not None]
    slowest = max(answered, key=lambda outcome: outcome.answer["seconds"])
    peak = max(outcome.answer["peak_rss_bytes"] for outcome in answered)
    lines.append(f"slowest: {slowest.name}, {slowest.answer['seconds']:.2f} s; peak memory {peak / 2**20:.0f} MiB")
    return "\n".join([*lines, f"growth after {WARM_UP_FILES} files: {growth_bytes(outcomes) / 1e6:.1f} MB"])


def test_the_good_files_are_good(bases: dict[str, bytes], tmp_path: Path) -> None:
    """Otherwise the mutations would show nothing."""
    files = []
    for name, content in bases.items():
        (tmp_path / name).write_bytes(content)
        files.append((name, tmp_path / name))
    for outcome in examine(files):
        assert what_is_wrong(outcome) is None, outcome.name
        assert (outcome.answer or {})["decode"] == "frames", outcome.name


def test_mutations_repeat_and_damage(bases: dict[str, bytes]) -> None:
    chosen = cases(sorted(bases), 10 * len(MUTATIONS))
    assert {case.kind for case in chosen} == set(MUTATIONS)
    changed = Counter(case.kind for case in chosen if case.content(bases) != bases[case.base])
    for case in chosen:
        assert case.content(bases) == case.content(bases)
    assert all(changed[kind] >= 7 for kind in MUTATIONS), changed
    structured = {name for name, content in bases.items() if len(elements_of(content)) > 10}
    assert structured >= {"h264.mp4", "h264_fragmented.mp4", "mpeg4.avi", "h264.ts", "h264.mkv", "vp9.webm"}


def test_a_seeded_sample_of_damage(bases: dict[str, bytes], tmp_path: Path) -> None:
    """``make fuzz`` runs 2,000 of these."""
    outcomes = examine(write_cases(cases(sorted(bases), 6 * len(MUTATIONS)), bases, tmp_path))
    check(outcomes, bases)
    assert len(outcomes) == 6 * len(MUTATIONS)
    assert len({outcome.reason for outcome in outcomes}) > 3


@pytest.fixture
def run_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Check many mutations and print how they end.

    ``FVC_FUZZ_SEED`` begins at another place, ``FVC_FUZZ_FILES`` takes more or fewer than 2,000.
    """
    first = int(os.environ.get("FVC_FUZZ_SEED", "0"))
    number = int(os.environ.get("FVC_FUZZ_FILES", "2000"))

    def say(text: str) -> None:
        with capsys.disabled():
            print(text, flush=True)

    def run(bases: dict[str, bytes], share: int = 1) -> None:
        files = write_cases(cases(sorted(bases), number // share, first), bases, tmp_path)
        outcomes = examine(files, workers=0, say=say)
        say(table(outcomes))
        check(outcomes, bases)
        assert len(outcomes) == number // share

    return run


@pytest.mark.long
def test_two_thousand_mutations(bases: dict[str, bytes], run_many: Callable[..., None]) -> None:
    run_many(bases)


@pytest.mark.long
def test_five_hundred_mutations_of_real_files(shared_media: Path, run_many: Callable[..., None]) -> None:
    """With sound, subtitles, metadata and whatever else cameras and services put into a file."""
    small = [path for path in (shared_media / "decode").iterdir() if path.stat().st_size <= LARGEST_REAL_BYTES]
    run_many({path.name: path.read_bytes() for path in small}, share=4)


def test_the_harness_sees_what_breaks_a_promise() -> None:
    answer = {"probe": "frames", "decode": "frames", "stderr_bytes": 0, "detail": ""}
    assert what_is_wrong(Outcome("a", answer, "")) is None
    assert what_is_wrong(Outcome("a", answer | {"stderr_bytes": 1}, "")) is not None
    assert what_is_wrong(Outcome("a", answer | {"decode": "ValueError"}, "")) is not None
    assert what_is_wrong(Outcome("a", answer | {"probe": "corrupt"}, "")) is not None
    assert what_is_wrong(Outcome("a", None, "timeout: no answer")) == "timeout: no answer"
    leaking = [Outcome("a", {"pid": 1, "rss_bytes": 1_000_000 * n}, "") for n in range(100)]
    assert growth_bytes(leaking) > MAX_GROWTH_BYTES
