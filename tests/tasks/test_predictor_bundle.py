"""Runs and bundles of tasks image and video_text asked about files.

A run gives its test part the stored answers again, a bundle answers as its run, and nothing damaged or hostile is read.
"""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner, Result
from filelock import FileLock

from fvc_lib.command_line.main import main
from fvc_lib.command_line.models import load_detector, verdict_detector
from fvc_lib.detectors.own.video_text import VideoTextNetwork
from fvc_lib.public import Detector
from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import (
    CAPTIONS,
    IMAGE_PREDICTIONS,
    IMAGES,
    TARGET_PREDICTIONS,
    VIDEO_TEXTS,
    read_table,
)
from fvc_lib.tasks.predicting import predictor_of
from fvc_lib.tasks.split_results import read_embeddings
from tests.kits.bundle_kit import edited, sealed
from tests.kits.split_runs import caption_run, picture_run
from tests.kits.video_text_kit import write_tiny_bert
from tests.kits.warm_workers import forked_workers

pytestmark = pytest.mark.usefixtures("warm_workers")

TASKS = ("image", "video_text")
TABLES = ("predictions.csv", "predictions.jsonl")


@pytest.fixture(scope="module")
def home_of(session_folder) -> Callable[[str], Path]:
    """Of a task a folder with ``files`` to ask about and a ``bundle``; run and corpus have gone to ``away``.

    Made once for all test processes: whoever comes second waits, and finds it.
    """

    def found(task: str) -> Path:
        home = session_folder / f"bundle_of_{task}"
        with FileLock(f"{home}.lock"):
            if not (home / "away").is_dir():
                shutil.rmtree(home, ignore_errors=True)
                make_home(home, task)
        return home

    return found


def make_home(home: Path, task: str) -> None:
    home.mkdir()
    run, corpus = (picture_run if task == "image" else caption_run)(home)
    export = CliRunner().invoke(main, ["export", str(run.root), "--to", str(home / "bundle")])
    assert export.exit_code == 0, export.output
    (home / "files").mkdir()
    for part in ("train", "validation", "test"):
        paths = pl.read_parquet(run.images if task == "image" else run.video_texts).filter(part=part)["path"]
        file = corpus / paths[0]
        shutil.copy(file, home / "files" / f"{part}{file.suffix}")
    (home / "files" / f"torn{file.suffix}").write_bytes(file.read_bytes()[:200])
    with (home / "files" / f"<b>new{file.suffix}").open("wb") as new:
        new.write(file.read_bytes() + bytes(8))
    with forked_workers():
        done = predict_in(home / "by_run", run.root, home / "files", "-j", "2")
    assert done.exit_code == 0, done.output
    (home / "moving").mkdir()
    for each in (run.root.parent, corpus):
        each.rename(home / "moving" / each.name)
    (home / "moving").rename(home / "away")  # last: it says that the home is whole


@pytest.fixture(params=TASKS)
def home(request, home_of) -> Path:
    return home_of(request.param)


@pytest.fixture
def picture_home(home_of) -> Path:
    return home_of("image")


@pytest.fixture
def caption_home(home_of) -> Path:
    return home_of("video_text")


def predict_in(out: Path, model: Path, *more: str | Path) -> Result:
    """What ``predict`` does of ``model``, with the files to ask about first in ``more``."""
    return CliRunner().invoke(main, ["predict", str(model), "-j", "1", *map(str, more), "--out", str(out)])


def rows_of(folder):
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def test_a_bundle_says_what_its_run_said_to_the_bit_without_run_and_corpus(home, tmp_path):
    assert predict_in(tmp_path / "out", home / "bundle", home / "files").exit_code == 0
    for name in TABLES:
        assert (tmp_path / "out" / name).read_bytes() == (home / "by_run" / name).read_bytes()
    rows = rows_of(tmp_path / "out")
    assert {Path(row["path"]).stem: row["part"] for row in rows} == {
        "train": "train", "validation": "validation", "test": "test", "torn": None, "<b>new": None,
    }  # fmt: skip
    assert [Path(row["path"]).stem for row in rows if row["failure"]] == ["torn"]
    detector = load_detector(home / "bundle")
    table = Detector(detector).predict([row["path"] for row in rows])
    assert table.columns == ["path", *detector.columns, "failure"]
    for row, found in zip(rows, table.rows(named=True), strict=True):
        assert {name: row[name] for name in found} == found
    assert detector.standing.sentences
    assert not detector.cautions


def run_in(home: Path) -> RunPaths:
    (root,) = (home / "away").glob("*/run_0")
    return RunPaths(root)


def row_of(home: Path, part: str) -> dict[str, object]:
    """What the run said of the first file of a part."""
    (row,) = [row for row in rows_of(home / "by_run") if Path(row["path"]).stem == part]
    return row


def test_a_run_gives_its_test_picture_the_stored_answers(picture_home, tmp_path):
    run, row = run_in(picture_home), row_of(picture_home, "test")
    path = read_table(run.images, IMAGES).filter(part="test")["path"][0]
    (stored,) = read_table(run.image_predictions, IMAGE_PREDICTIONS).filter(path=path).to_dicts()
    assert row["class"] == stored["predicted_label"]
    labels = json.loads((picture_home / "bundle" / "labels.json").read_text())
    plain = Path(shutil.copytree(picture_home / "bundle", tmp_path / "plain"))  # the stored answers have no temperature
    (plain / "labels.json").write_text(json.dumps(labels | {"temperature": 1.0}))
    (answer,) = load_detector(sealed(plain)).findings([Path(row["path"])], workers=1)
    assert answer.values["probability"] == pytest.approx(stored["probability"], abs=1e-5)
    assert (answer.values["class"], answer.values["runner_up"]) == (row["class"], row["runner_up"])
    for number in read_table(run.target_predictions, TARGET_PREDICTIONS).filter(path=path).to_dicts():
        assert row[f"{number['target']} ({number['unit']})"] == pytest.approx(number["predicted"], rel=1e-4)
    assert "trained on this very file" in row_of(picture_home, "train")["remarks"]
    assert "epoch was chosen" in row_of(picture_home, "validation")["remarks"]
    new = row_of(picture_home, "<b>new")
    assert (new["remarks"], new["class"]) == ("", row["class"])
    paths = [each["path"] for each in rows_of(picture_home / "by_run")]
    with (picture_home / "by_run" / "predictions.csv").open(newline="") as table:
        assert [each["path"] for each in csv.DictReader(table)] == paths
    page = (picture_home / "by_run" / "predictions.html").read_text()
    assert "<b>new" not in page
    assert "trained on this very file" in page
    assert page.count(row["class"]) >= 4


def test_a_run_gives_its_test_video_the_stored_caption_and_similarities(caption_home, monkeypatch):
    run, row = run_in(caption_home), row_of(caption_home, "test")
    test = read_table(run.video_texts, VIDEO_TEXTS).filter(part="test")
    video_id, path = test.select("video_id", "path").row(0)
    assert row["caption"] == read_table(run.captions, CAPTIONS).filter(path=path)["caption"][0]
    stored = read_embeddings(run.embeddings)
    video = stored["video_embeddings"][sorted(test["video_id"].unique()).index(video_id)]
    texts = dict(zip(sorted(test["text_id"].unique()), stored["text_embeddings"], strict=True))
    by_text = {text: float(video @ texts[text_id]) for text_id, text in test.select("text_id", "text").iter_rows()}
    found = {row[f"text_{place}"]: row[f"similarity_{place}"] for place in range(1, 6)}
    assert list(found.values()) == sorted(found.values(), reverse=True)
    compared = found.keys() & by_text.keys()
    assert compared
    assert [found[text] for text in compared] == pytest.approx([by_text[text] for text in compared], abs=1e-5)
    forward = VideoTextNetwork.forward
    monkeypatch.setattr(VideoTextNetwork, "forward", lambda self, *given: forward(self, *given))
    assert "VideoTextNetwork.forward" in predictor_of(run).cautions[0]


def test_what_cannot_be_asked_is_refused_before_anything_is_written(picture_home, tmp_path):
    out, bundle, files = tmp_path / "out", picture_home / "bundle", picture_home / "files"
    for options, why in (
        (("--fpr", "0.01"), "--fpr"),
        (("--pages", "3"), "--pages"),
        (("--dry-run",), "Give that as well"),
        (("--shard", "0/2", "--executor", "slurm"), "leave --executor out"),
        (("--shard", "2/2"), "wanted NUMBER/OF"),
    ):
        done = predict_in(out, bundle, files, *options)
        assert (done.exit_code, why in done.output) == (2, True), done.output
    assert not out.exists()
    done = CliRunner().invoke(main, ["predict", str(bundle), str(files), "--shard", "0/2"])
    assert (done.exit_code, "name the shards' folder with --out" in done.output) == (2, True), done.output
    with pytest.raises(UsageError, match="is of task image, which gives no verdicts"):
        verdict_detector(bundle)
    copy = RunPaths(shutil.copytree(run_in(picture_home).root, tmp_path / "images" / "run_0"))
    best = next(copy.root.glob("checkpoints/*/best_model.safetensors"))
    best.write_bytes(best.read_bytes()[:-1] + b"x")
    with pytest.raises(FvcError):
        predictor_of(copy)
    shutil.rmtree(copy.root / "checkpoints")
    with pytest.raises(UsageError, match="not finished"):
        predictor_of(copy)
    done = predict_in(out, bundle, tmp_path / "gone.png")  # no file can be read
    assert (done.exit_code, f"error: {tmp_path / 'gone.png'}: " in done.stderr) == (3, True), done.output
    (row,) = rows_of(out)
    assert (Path(row["path"]).name, row["failure"].partition(":")[0]) == ("gone.png", "unreadable")


def test_files_that_no_export_writes_are_refused(home_of, tmp_path):
    for task, name, change, why in (
        ("image", "labels.json", {"classes": []}, "weights do not fit"),
        ("image", "labels.json", {"classes": 7}, "is not what a training writes"),
        ("image", "labels.json", {"temperature": "hot"}, "is not what a training writes"),
        ("video_text", "texts.parquet", {"text": "words"}, r"texts.parquet.*text"),
        ("video_text", "tokenizer.json", {"model": None}, "no tokenizer"),
    ):
        copy = Path(shutil.copytree(home_of(task) / "bundle", tmp_path / "copy"))
        if name.endswith(".json"):
            (copy / name).write_text(json.dumps(json.loads((copy / name).read_text()) | change))
        else:
            pl.read_parquet(copy / name).rename(change).write_parquet(copy / name)
        with pytest.raises(FvcError, match=why):
            load_detector(sealed(copy))
        shutil.rmtree(copy)


def test_a_bundle_has_no_path_and_no_name_of_a_file(home):
    files = [file for file in (home / "bundle").rglob("*") if file.is_file()]
    content = b"".join(file.read_bytes() for file in files)
    names = {file.name for file in (home / "away").rglob("*.*") if file.suffix in (".png", ".mp4", ".mkv", ".avi")}
    assert str(home).encode() not in content
    assert not [name for name in names if len(name) > 8 and name.encode() in content]


@pytest.mark.slow
def test_a_text_encoder_goes_along_without_pickles(tmp_path):
    bert = write_tiny_bert(tmp_path / "bert")
    run, corpus = caption_run(tmp_path, text_encoder=bert, caption_weight=0.0)
    to = tmp_path / "bundle"
    export = CliRunner().invoke(main, ["export", str(run.root), "--to", str(to)])
    assert export.exit_code == 0, export.output
    video = next(corpus.rglob("*.mp4"))
    said = list(load_detector(run.root).findings([video], workers=1))
    shutil.rmtree(bert)
    assert list(load_detector(to).findings([video], workers=1)) == said
    assert {file.suffix for file in (to / "text_encoder").iterdir()} <= {".json", ".txt", ".safetensors"}
    params = json.loads((to / "bundle.json").read_text())["params"]
    with pytest.raises(UsageError, match="text_encoder is '/etc', wanted 'text_encoder'"):
        load_detector(edited(to, params=params | {"text_encoder": "/etc"}))


def test_shards_in_any_number_and_order_end_in_one_calls_files_to_the_byte(picture_home, tmp_path):
    bundle, files, of = picture_home / "bundle", picture_home / "files", 3
    for number in reversed(range(of)):
        done = predict_in(tmp_path / "out", bundle, files, "--shard", f"{number}/{of}")
        assert done.exit_code == 0, done.output
        assert f"predictions, shard {number}/{of}: " in done.output
    assert not (tmp_path / "out" / "predictions.csv").exists()
    shards = b"".join(path.read_bytes() for path in (tmp_path / "out").glob("findings.*_of_*"))
    together, alone = (predict_in(tmp_path / name, bundle, files) for name in ("out", "alone"))
    assert (together.exit_code, alone.exit_code) == (0, 0), together.output
    journal = (tmp_path / "out" / "findings.jsonl").read_bytes().splitlines()
    # What a torn video says may be another day's; it is looked at again.
    assert len(journal) - len(shards.splitlines()) < len(
        (tmp_path / "alone" / "findings.jsonl").read_bytes().splitlines()
    )
    for name in (*TABLES, "predictions.html", "asked.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes(), name
    assert not list((tmp_path / "out").glob("findings.*_of_*"))


def test_of_pictures_that_failed_only_those_are_remembered_that_would_fail_again(picture_home, tmp_path):
    (tmp_path / "torn.png").write_bytes(b"\x89PNG")
    files = [tmp_path / "torn.png", tmp_path / "unreadable: .png"]
    found = load_detector(picture_home / "bundle").findings(files, workers=1)
    assert {Path(each.path).name: each.lasts for each in found} == {"torn.png": True, "unreadable: .png": False}
