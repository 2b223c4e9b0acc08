"""What runs of tasks image and video_text say of files: the stored test part again, new files, and damaged ones."""

from __future__ import annotations

import csv
import json
import shutil
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner

from fvc_lib.analysis.pages.answers import worth_of
from fvc_lib.command_line.verdicts.predict import predict
from fvc_lib.detectors.own.video_text import VideoTextNetwork
from fvc_lib.services.errors import DataError, FvcError, UsageError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import (
    CAPTIONS,
    IMAGE_PREDICTIONS,
    TARGET_PREDICTIONS,
    VIDEO_TEXTS,
    read_table,
)
from fvc_lib.tasks.image.task import CALIBRATION
from fvc_lib.tasks.predicting import predictor_of
from fvc_lib.tasks.video_text.results import read_embeddings
from tests.kits.predicting_kit import caption_run, picture_run


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A trained run of task image, and the folder of its pictures."""
    return picture_run(tmp_path_factory.mktemp("pictures"))


def asked(paths, files, folder, *more):
    arguments = [str(paths.root), *map(str, files), "--out", str(folder), "-j", "1", *more]
    done = CliRunner().invoke(predict, arguments, standalone_mode=False)
    if done.exception is not None and not (folder / "predictions.jsonl").exists():
        raise done.exception
    rows = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    return done, rows


def test_a_run_says_of_its_test_pictures_what_it_stored_and_goes_on_after_bad_files(pictures, tmp_path):
    paths, root = pictures
    inbox = tmp_path / "in"
    inbox.mkdir()
    (inbox / "torn.png").write_bytes((root / "test/0.png").read_bytes()[:300])
    (inbox / "none.jpg").write_bytes(b"<script>alert(1)</script>")
    (inbox / "a <b>new.png").write_bytes((root / "test/1.png").read_bytes() + b"changed")
    files = [*(root / row for row in ["train/0.png", "validation/0.png"]), inbox, root / "test", tmp_path / "gone.png"]
    done, rows = asked(paths, files, tmp_path / "out")
    assert done.exception is None, done.output
    by_path = {row["path"]: row for row in rows}
    known = {str(root / path): row for row in read_table(paths.image_predictions, IMAGE_PREDICTIONS).to_dicts()
             for path in [row["path"]]}  # fmt: skip
    for path, stored in known.items():
        row = by_path[path]
        assert (row["class"], row["part"]) == (stored["predicted_label"], "test")
        assert row["probability_uncalibrated"] == pytest.approx(stored["probability"], abs=1e-5)
        assert 0 < row["runner_up_probability"] <= row["probability"] < 1
    for stored in read_table(paths.target_predictions, TARGET_PREDICTIONS).to_dicts():
        column = f"{stored['target']} ({stored['unit']})"
        assert by_path[str(root / stored["path"])][column] == pytest.approx(stored["predicted"], rel=1e-4)
    assert "trained on this very file" in by_path[str(root / "train/0.png")]["remarks"]
    assert "epoch was chosen" in by_path[str(root / "validation/0.png")]["remarks"]
    new = by_path[str(inbox / "a <b>new.png")]
    assert (new["part"], new["remarks"]) == (None, "")
    assert new["class"] == by_path[str(root / "test/1.png")]["class"]
    failed = {Path(row["path"]).name: row["failure"] for row in rows if row["failure"]}
    assert failed.keys() == {"torn.png", "none.jpg", "gone.png"}
    assert all(by_path[str(inbox / name)]["class"] is None for name in ("torn.png", "none.jpg"))

    with (tmp_path / "out/predictions.csv").open(newline="") as table:
        assert [row["path"] for row in csv.DictReader(table)] == [row["path"] for row in rows]
    page = (tmp_path / "out/predictions.html").read_text()
    assert "<b>new" not in page
    assert "<script" not in page
    assert "http" not in page.split("</style>")[-1]
    assert page.count("data:image/jpeg") == len(rows) - 3
    first = worth_of(paths)[0]
    assert done.output.index(first[:60]) < done.output.index("train/0.png")


def test_probabilities_are_calibrated_on_the_validation_part(pictures, tmp_path):
    paths, root = pictures
    calibration = paths.stage_training("10_image_recognition") / CALIBRATION
    stored = json.loads(calibration.read_text())
    assert (stored["num_validation"], stored["num_test"]) == (11, 17)  # pictures with a class
    copy = RunPaths(shutil.copytree(paths.root, tmp_path / "images" / "run_0"))
    calibration = copy.root / calibration.relative_to(paths.root)
    calibration.write_text(json.dumps(stored | {"temperature": 1.0}))
    (warm,) = predictor_of(copy).predict(root / "test/0.png", workers=1)
    assert warm.values["probability"] == warm.values["probability_uncalibrated"]
    calibration.unlink()
    of_old = predictor_of(copy)
    (old,) = of_old.predict(root / "test/0.png", workers=1)
    assert (old.values["probability"], old.values["class"]) == (None, warm.values["class"])
    assert "no calibration" in of_old.notes[0]


def test_what_cannot_be_asked_is_refused_before_anything_is_written(pictures, tmp_path):
    paths, root = pictures
    for more, words in ((["--fpr", "0.01"], "--fpr"), (["--pages", "3"], "--pages")):
        arguments = [str(paths.root), str(root / "test/0.png"), "--out", str(tmp_path / "out"), *more]
        done = CliRunner().invoke(predict, arguments, standalone_mode=False)
        assert isinstance(done.exception, UsageError)
        assert words in str(done.exception)
    copy = RunPaths(shutil.copytree(paths.root, tmp_path / "images" / "run_0"))
    best = next(copy.root.glob("checkpoints/*/best_model.safetensors"))
    best.write_bytes(best.read_bytes()[:-1] + b"x")
    with pytest.raises(FvcError):
        predictor_of(copy)
    shutil.rmtree(copy.root / "checkpoints")
    with pytest.raises(UsageError, match="not finished"):
        predictor_of(copy)
    assert not (tmp_path / "out").exists()


def test_where_no_file_is_read_that_is_an_error_with_its_table(pictures, tmp_path):
    done, rows = asked(pictures[0], [tmp_path / "gone.png"], tmp_path / "out")
    assert isinstance(done.exception, DataError)
    assert "gone.png" in rows[0]["failure"]


def test_a_run_says_of_its_test_videos_what_it_stored(tmp_path, monkeypatch):
    paths, root = caption_run(tmp_path)
    pairs = read_table(paths.video_texts, VIDEO_TEXTS)
    test = pairs.filter(pl.col("part") == "test")
    captions = {row["path"]: row["caption"] for row in read_table(paths.captions, CAPTIONS).to_dicts()}
    some = sorted(captions)
    trained = pairs.filter(pl.col("part") == "train")["path"][0]
    (tmp_path / "torn.mp4").write_bytes((root / some[0]).read_bytes()[:200])
    files = [*(root / path for path in some), root / trained, tmp_path / "torn.mp4"]
    done, rows = asked(paths, [*files, tmp_path / "gone.mp4"], tmp_path / "out")
    assert done.exception is None, done.output

    stored = read_embeddings(paths.embeddings)
    ids = sorted(test["video_id"].unique())
    texts = dict(zip(sorted(test["text_id"].unique()), stored["text_embeddings"], strict=True))
    text_of = dict(test.select("text", "text_id").iter_rows())
    id_of = dict(test.select("path", "video_id").iter_rows())
    compared = 0
    for path, row in zip(some, rows, strict=False):
        assert (row["caption"], row["part"]) == (captions[path], "test")
        assert "test part" in row["remarks"]
        video = stored["video_embeddings"][ids.index(id_of[path])]
        found = [row[f"similarity_{place}"] for place in range(1, 6)]
        assert all(one >= other for one, other in pairwise(found))
        for place in range(1, 6):
            if row[f"text_{place}"] in text_of:
                wanted = float(video @ texts[text_of[row[f"text_{place}"]]])
                assert row[f"similarity_{place}"] == pytest.approx(wanted, abs=1e-5)
                assert "test" in row[f"text_{place}_part"]
                compared += 1
    assert compared
    assert "trained on this very file" in rows[4]["remarks"]
    assert rows[5]["failure"]
    assert rows[6]["failure"]
    assert rows[5]["caption"] is None
    page = (tmp_path / "out/predictions.html").read_text()
    assert page.count("data:image/jpeg") == 5

    forward = VideoTextNetwork.forward
    monkeypatch.setattr(VideoTextNetwork, "forward", lambda self, *given: forward(self, *given))
    assert "VideoTextNetwork.forward" in predictor_of(paths).cautions[0]
