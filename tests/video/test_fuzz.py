"""Damaged and hostile files, in the worker processes that a run gives them to: frames or a documented error, always."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from fvc_lib.corpus.probing import DEFAULT_TIMEOUT_SECONDS
from fvc_lib.services.isolated_workers import Answer, run_isolated
from fvc_lib.video.decode.source import VideoError
from tests.video.mutations import GOOD_FILES, MUTATIONS, Case, cases, textured_frames

EXAMINE = "tests.video.workers:examine"
OUTCOMES = {"frames", *(kind.reason for kind in VideoError.__subclasses__())}
KEPT = Path(__file__).parents[2] / "build" / "fuzz"  # cases that failed, for a closer look

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts open files in /proc")


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory, encode_video: Callable[..., Path]) -> dict[str, bytes]:
    """The good files by name."""
    folder, frames = tmp_path_factory.mktemp("good"), textured_frames(16, 96, 64)
    return {
        name: encode_video(folder / name, 16, width=96, height=64, frames=frames, **options).read_bytes()
        for name, options in GOOD_FILES.items()
    }


def examined(contents: dict[str, bytes], folder: Path, workers: int = 1) -> dict[str, Answer]:
    paths = [folder / f"{number}{Path(name.partition(':')[0]).suffix}" for number, name in enumerate(contents)]
    for path, content in zip(paths, contents.values(), strict=True):
        path.write_bytes(content)
    answers = run_isolated(EXAMINE, list(map(str, paths)), workers=workers, timeout_seconds=DEFAULT_TIMEOUT_SECONDS)
    names = list(contents)
    return {names[answer.position]: answer for answer in answers}


def what_is_wrong(answer: Answer) -> str:
    """Return which promise is broken; empty: none."""
    if answer.failure:
        return f"{answer.failure}: {answer.detail}"
    value = answer.value
    outcomes = {str(value["probe"]), str(value["decode"])}
    if not outcomes <= OUTCOMES:
        return f"undocumented: {outcomes}"
    if value["stderr_bytes"]:
        return "noise on standard error"
    return "" if value["probe"] == "frames" or len(value["detail"]) > 20 else "a reason without an explanation"


def check(chosen: list[Case], bases: dict[str, bytes], folder: Path, workers: int = 1) -> Counter[str]:
    """Fail with every broken promise, and keep the files that broke one; return how often each outcome was."""
    contents = {case.name: case.content(bases) for case in chosen}
    answers = examined(contents, folder, workers)
    wrong = {name: why for name, answer in answers.items() if (why := what_is_wrong(answer))}
    for name in wrong:
        KEPT.mkdir(parents=True, exist_ok=True)
        (KEPT / name.replace(":", "_")).write_bytes(contents[name])
    assert not wrong, f"the files are in {KEPT}"
    assert len({answer.value["open_files"] for answer in answers.values()}) == 1, "files stay open"
    assert len(answers) == len(chosen)
    return Counter(answer.value["probe"] for answer in answers.values())


def test_the_good_files_are_good(bases: dict[str, bytes], tmp_path: Path) -> None:
    for name, answer in examined(bases, tmp_path).items():
        assert what_is_wrong(answer) == "", name
        assert answer.value["decode"] == "frames", name


def test_a_seeded_sample_of_damage(bases: dict[str, bytes], tmp_path: Path) -> None:
    """``make fuzz`` runs 2,000 of these."""
    assert len(check(cases(sorted(bases), 12 * len(MUTATIONS)), bases, tmp_path)) > 3


@pytest.mark.long
def test_two_thousand_mutations(bases: dict[str, bytes], tmp_path: Path) -> None:
    """``FVC_FUZZ_SEED`` begins at another place, ``FVC_FUZZ_FILES`` takes more or fewer than 2,000."""
    number, first = int(os.environ.get("FVC_FUZZ_FILES", "2000")), int(os.environ.get("FVC_FUZZ_SEED", "0"))
    print(check(cases(sorted(bases), number, first), bases, tmp_path, workers=0))
