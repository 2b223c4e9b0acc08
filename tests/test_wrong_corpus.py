"""A corpus that nothing can be trained on is refused before anything is written, as ``corpora PATH`` refuses it."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fvc_lib.command_line.main import main
from tests.corpus.published import MINIATURES, text, touch

HEADER = "path,label"


LABELS = ("real", "fake")
NAMES = [f"{number}.mp4" for number in range(20)]
ROWS = [HEADER, *(f"{name},{LABELS[number % 2]}" for number, name in enumerate(NAMES))]
GROUPED = [f"{row},{number % 4}" if number else f"{row},group" for number, row in enumerate(ROWS)]
# The files and the manifest of each wrong corpus, the exit code, and words of the error.
WRONG = {
    "empty": ([], [], 2, ("a folder with 'real/' and 'fake/'",)),
    "one class": ([f"real/{name}" for name in NAMES], [], 3, ("'fake'", "20")),
    "three videos": (["real/a.mp4", "real/b.mp4", "fake/c.mp4"], [], 3, ("num_folds", "2 with real", "1 with fake")),
    "pictures": ([f"{number}.png" for number in range(20)], [], 2, ("a folder with 'real/' and 'fake/'",)),
    "texts": (
        [f"{label}/{number}.txt" for label in LABELS for number in range(20)],
        [],
        3,
        ("40 x unknown_extension",),
    ),
    "missing files": ([], ROWS, 3, ("no usable labelled video", "20 x missing_video")),
    "most files missing": (NAMES[:2], ROWS, 3, ("90%", "18 x missing_video")),
    "few groups": (NAMES, GROUPED, 3, ("num_folds", "4 groups")),
    "a typing error": ([], ["path,label,groop", "a.mp4,real,1"], 2, ("'group'",)),
    "an unknown part": ([], ["path,label,split", "a.mp4,real,hidden"], 2, ("'hidden'",)),
    "fakes alone": (MINIATURES["deeperforensics"], [], 3, ("'real'",)),
}


def corpus_of(root: Path, files: list[str] | Callable[[Path], object], manifest: list[str]) -> Path:
    root.mkdir()
    if callable(files):
        files(root)
    else:
        touch(root, *files)
    if manifest:
        text(root, "list.csv", manifest)
    return root / "list.csv" if manifest else root


@pytest.fixture
def call(tmp_path, monkeypatch):
    def made(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["run_notebooks.py", *arguments])
        places = {"FVC_RUNS_DIR": "runs", "FVC_CACHE_DIR": "cache", "FVC_DATA_DIR": "data"}
        here = {name: str(tmp_path / "out" / value) for name, value in places.items()}
        return CliRunner().invoke(main, list(arguments), env=here)

    return made


def error_of(done: Result) -> str:
    (line,) = [line for line in done.output.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("how", ["", "--dry-run"])
def test_a_wrong_corpus_is_refused_before_anything_is_written_or_tried_out(name, how, call, tmp_path, monkeypatch):
    def not_yet(*_: object) -> None:
        raise AssertionError("a step was tried out, or a choice was built")

    monkeypatch.setattr("fvc_lib.command_line.run_command.run_isolated", not_yet)
    files, manifest, code, words = WRONG[name]
    corpus = str(corpus_of(tmp_path / "corpus", files, manifest))
    done = call(*filter(None, [how]), "-p", "corpus", corpus)
    assert done.exit_code == code, done.output
    assert [word for word in words if word not in error_of(done)] == []
    assert not (tmp_path / "out").exists()
    alone = call("corpora", corpus)
    assert (alone.exit_code, error_of(alone)) == (code, error_of(done))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("protocol", "code"), [("official", 3), ("kfold", 0)])
def test_a_protocol_that_needs_parts_is_refused_where_there_are_none(protocol, code, call, tmp_path):
    touch(tmp_path / "corpus", *(f"{label}/{number}.mp4" for label in ("real", "fake") for number in range(5)))
    assert call("corpora", str(tmp_path / "corpus"), "-p", "protocol", protocol).exit_code == code


def test_corpora_takes_what_its_messages_advise(call, tmp_path):
    touch(tmp_path, *(f"videos/{number}.mp4" for number in range(10)))
    text(tmp_path, "lists/list.csv", [HEADER, *(f"../videos/{number}.mp4,{number % 2}" for number in range(10))])
    advised = [str(tmp_path / "lists/list.csv")]
    for advice in (("-p", "label_map", "1=fake,0=real"), ("-p", "allow_outside", "true")):
        refused = call("corpora", *advised)
        assert refused.exit_code == 3
        assert " ".join(advice) in refused.output
        advised += advice
    done = call("corpora", *advised)
    assert done.exit_code == 0, done.output
    assert "fake 5, real 5" in done.output


def test_fakes_alone_can_be_trained_with_the_reals_of_another_corpus(call, tmp_path):
    corpus_of(tmp_path / "fakes", MINIATURES["deeperforensics"], [])
    touch(tmp_path / "reals", *(f"real/{number}.mp4" for number in range(5)))
    both = ["-p", "more_corpora", str(tmp_path / "reals"), "-p", "num_folds", "2"]
    done = call("corpora", str(tmp_path / "fakes"), *both)
    assert done.exit_code == 0, done.output
    assert "DeeperForensics 3" in done.output
    assert not (tmp_path / "out").exists()


def test_annotations_alone_need_no_video(call, tmp_path):
    corpus = str(corpus_of(tmp_path / "corpus", [], ROWS))
    assert call("corpora", corpus, "-p", "annotations_only", "true").exit_code == 0
