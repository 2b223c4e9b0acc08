"""What runs of tasks image and video_text say of files: the stored test part again, new files, and damaged ones."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

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


def test_a_run_gives_its_test_pictures_the_stored_answers_and_goes_on_after_bad_files(pictures, tmp_path):
    paths, root = pictures
    inbox = tmp_path / "in"
    inbox.mkdir()
    (inbox / "torn.png").write_bytes((root / "test/0.png").read_bytes()[:300])
    (inbox / "none.jpg").write_bytes(b"<script>alert(1)</script>")
    (inbox / "a <b>new.png").write_bytes((root / "test/1.png").read_bytes() + b"changed")
    files = [root / "train/0.png", root / "validation/0.png", inbox, root / "test", tmp_path / "gone.png"]
    done, rows = asked(paths, files, tmp_path / "out")
    assert done.exception is None, done.output
    by_path = {row["path"]: row for row in rows}
    for stored in read_table(paths.image_predictions, IMAGE_PREDICTIONS).to_dicts():
        row = by_path[str(root / stored["path"])]
        assert (row["class"], row["part"]) == (stored["predicted_label"], "test")
        assert row["probability_uncalibrated"] == pytest.approx(stored["probability"], abs=1e-5)
    for stored in read_table(paths.target_predictions, TARGET_PREDICTIONS).to_dicts():
        column = f"{stored['target']} ({stored['unit']})"
        assert by_path[str(root / stored["path"])][column] == pytest.approx(stored["predicted"], rel=1e-4)
    assert "trained on this very file" in by_path[str(root / "train/0.png")]["remarks"]
    assert "epoch was chosen" in by_path[str(root / "validation/0.png")]["remarks"]
    new = by_path[str(inbox / "a <b>new.png")]
    assert (new["part"], new["remarks"], new["class"]) == (None, "", by_path[str(root / "test/1.png")]["class"])
    assert {Path(row["path"]).name for row in rows if row["failure"]} == {"torn.png", "none.jpg", "gone.png"}
    with (tmp_path / "out/predictions.csv").open(newline="") as table:
        assert [row["path"] for row in csv.DictReader(table)] == [row["path"] for row in rows]
    page = (tmp_path / "out/predictions.html").read_text()
    assert not [word for word in ("<b>new", "<script") if word in page]
    assert page.count("data:image/jpeg") == len(rows) - 3


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


def test_a_run_gives_its_test_videos_the_stored_captions_and_similarities(tmp_path, monkeypatch):
    paths, root = caption_run(tmp_path)
    pairs = read_table(paths.video_texts, VIDEO_TEXTS)
    test = pairs.filter(part="test")
    captions = dict(read_table(paths.captions, CAPTIONS).select("path", "caption").iter_rows())
    some, trained = sorted(captions), pairs.filter(part="train")["path"][0]
    (tmp_path / "torn.mp4").write_bytes((root / some[0]).read_bytes()[:200])
    files = [*(root / path for path in (*some, trained)), tmp_path / "torn.mp4", tmp_path / "gone.mp4"]
    done, rows = asked(paths, files, tmp_path / "out")
    assert done.exception is None, done.output
    stored = read_embeddings(paths.embeddings)
    videos = dict(zip(sorted(test["video_id"].unique()), stored["video_embeddings"], strict=True))
    texts = dict(zip(sorted(test["text_id"].unique()), stored["text_embeddings"], strict=True))
    text_of, id_of = (dict(test.select(*names).iter_rows()) for names in (("text", "text_id"), ("path", "video_id")))
    compared = []
    for path, row in zip(some, rows, strict=False):
        assert (row["caption"], row["part"]) == (captions[path], "test")
        similarities = [row[f"similarity_{place}"] for place in range(1, 6)]
        assert similarities == sorted(similarities, reverse=True)
        for place, similarity in enumerate(similarities, start=1):
            if (text_id := text_of.get(row[f"text_{place}"])) is not None:
                compared.append((similarity, float(videos[id_of[path]] @ texts[text_id])))
    assert compared
    assert [one for one, _ in compared] == pytest.approx([other for _, other in compared], abs=1e-5)
    assert "trained on this very file" in rows[4]["remarks"]
    assert all(row["failure"] and row["caption"] is None for row in rows[5:])
    forward = VideoTextNetwork.forward
    monkeypatch.setattr(VideoTextNetwork, "forward", lambda self, *given: forward(self, *given))
    assert "VideoTextNetwork.forward" in predictor_of(paths).cautions[0]
