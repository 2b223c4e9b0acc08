"""What runs of tasks image and video_text say of files: the stored test part again, new files, and damaged ones."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner

from fvc_lib.analysis.pages.predictions_page import worth_of
from fvc_lib.command_line.verdicts.predict import predict
from fvc_lib.corpus.samples.captions import make_clip, plan_clips
from fvc_lib.detectors.frames.backbone import ImageModel
from fvc_lib.detectors.own.video_text import VideoTextNetwork
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, FvcError, UsageError
from fvc_lib.services.memory import policy as memory_policy
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import (
    CAPTIONS,
    IMAGE_PREDICTIONS,
    TARGET_PREDICTIONS,
    VIDEO_TEXTS,
    read_table,
    write_table,
)
from fvc_lib.tasks.image.results import image_results
from fvc_lib.tasks.image.training import calibration_file, train_images
from fvc_lib.tasks.predicting import predictor_of
from fvc_lib.tasks.video_text.results import read_embeddings, video_text_results
from fvc_lib.tasks.video_text.training import train_video_text
from tests.kits.image_kit import image_tables, write_image_tables

SMALL = {
    "epochs": 1, "memory_preflight": False, "bootstrap_replicates": 100, "device": "cpu", "early_stopping_epochs": 0,
}  # fmt: skip


class NoLog:
    def log(self, **_):
        pass


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A trained run of task image, and the folder of its pictures."""
    root, folder = tmp_path_factory.mktemp("pictures"), tmp_path_factory.mktemp("runs")
    images, targets = image_tables(root, (36, 12, 18))
    contents = [hashlib.sha256((root / path).read_bytes()).hexdigest() for path in images["path"]]
    paths = RunPaths(folder / "images" / "run_0")
    settings = {"task": "image", "image_size": 16, "effective_batch_size": 12, "batch_size": 12, "epochs": 2}
    places = {"runs_dir": str(folder), "cache_dir": str(folder / "cache")}
    config = RunConfig(**(SMALL | settings | places), corpus=str(root))
    write_image_tables(paths, images.with_columns(content_sha256=pl.Series(contents)), targets)
    paths.params_yaml.write_text(config.to_yaml())
    paths.run_json.write_text("{}")
    train_images(paths, config, metric_log=NoLog())
    image_results(paths, config)
    return paths, root


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
    stored = json.loads(calibration_file(paths).read_text())
    assert (stored["num_validation"], stored["num_test"]) == (11, 17)  # pictures with a class
    copy = RunPaths(shutil.copytree(paths.root, tmp_path / "images" / "run_0"))
    calibration_file(copy).write_text(json.dumps(stored | {"temperature": 1.0}))
    (warm,) = predictor_of(copy).predictions([root / "test/0.png"], workers=1)
    assert warm.values["probability"] == warm.values["probability_uncalibrated"]
    calibration_file(copy).unlink()
    of_old = predictor_of(copy)
    (old,) = of_old.predictions([root / "test/0.png"], workers=1)
    assert (old.values["probability"], old.values["class"]) == (None, warm.values["class"])
    assert "no calibration" in of_old.notes[0]


def test_what_cannot_be_asked_is_refused_before_anything_is_written(pictures, tmp_path):
    paths, root = pictures
    for more, words in ((["--fpr", "0.01"], "--fpr"), (["--pages", "3"], "--pages")):
        arguments = [str(paths.root), str(root / "test/0.png"), "--out", str(tmp_path / "out"), *more]
        done = CliRunner().invoke(predict, arguments, standalone_mode=False)
        assert isinstance(done.exception, UsageError)
        assert words in str(done.exception)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/predictions.csv").write_text("mine")
    done = CliRunner().invoke(predict, [str(paths.root), str(root), "--out", str(tmp_path / "mine")])
    assert isinstance(done.exception, UsageError)
    assert (tmp_path / "mine/predictions.csv").read_text() == "mine"
    copy = RunPaths(shutil.copytree(paths.root, tmp_path / "images" / "run_0"))
    best = next(copy.root.glob("checkpoints/*/best_model.safetensors"))
    best.write_bytes(best.read_bytes()[:-1] + b"x")
    with pytest.raises(FvcError):
        predictor_of(copy)
    shutil.rmtree(copy.root / "checkpoints")
    with pytest.raises(FvcError, match="does not name"):
        predictor_of(copy)
    assert not (tmp_path / "out").exists()


def some_captions(folder, counts):
    """VIDEO_TEXTS of so many of the sample captions' clips of each part, which are written into ``folder``."""
    planned, rows = plan_clips(), []
    for part, count in counts.items():
        for clip in [each for each in planned if each.part == part][:count]:
            content, text = make_clip(clip.drawing), clip.drawing.caption
            (folder / clip.path).parent.mkdir(parents=True, exist_ok=True)
            (folder / clip.path).write_bytes(content)
            digest, text_id = (hashlib.sha256(each).hexdigest() for each in (content, text.encode()))
            rows.append(
                {
                    "pair_id": f"pair{len(rows):04d}", "video_id": digest[:16], "path": clip.path, "text_id": text_id,
                    "text": text, "group_id": clip.path, "part": part, "split_source": "official", "num_frames": 12,
                    "duration_seconds": None, "content_sha256": digest,
                }
            )  # fmt: skip
    (folder / "manifest.csv").touch()
    return pl.DataFrame(rows, schema={name: column.dtype.type for name, column in VIDEO_TEXTS.columns.items()})


def test_a_network_of_changed_code_answers_where_it_says_what_it_said_and_is_refused_else(
    pictures, monkeypatch, caplog
):
    before = ImageModel.forward

    def same(self, images):
        return before(self, images)

    def other(self, images):
        return {name: each + 0.01 for name, each in before(self, images).items()}

    monkeypatch.setattr(ImageModel, "forward", same)
    predictor_of(pictures[0])
    assert "says what it said then" in caplog.text
    monkeypatch.setattr(ImageModel, "forward", other)
    with pytest.raises(UsageError, match=r"ImageModel is not what it was.*says something else.*train again"):
        predictor_of(pictures[0])


def test_where_no_file_is_read_that_is_an_error_with_its_table(pictures, tmp_path):
    done, rows = asked(pictures[0], [tmp_path / "gone.png"], tmp_path / "out")
    assert isinstance(done.exception, DataError)
    assert "gone.png" in rows[0]["failure"]


def test_a_run_says_of_its_test_videos_what_it_stored(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(memory_policy, "frozen_garbage", nullcontext)
    pairs, manifest = (
        some_captions(tmp_path / "clips", {"train": 3, "validation": 1, "test": 4}),
        tmp_path / "clips" / "manifest.csv",
    )
    settings = {
        "task": "video_text", "corpus": str(manifest), "num_frames": 2, "fixed_size": 16, "text_width": 16,
        "text_heads": 2, "text_layers": 1, "embedding_size": 8, "max_text_tokens": 16, "effective_batch_size": 16,
        "batch_size": 16, "workers": 1, "masked_weight": 0.5,
        "cache_dir": str(tmp_path / "cache"), "runs_dir": str(tmp_path),
    }  # fmt: skip
    config = resolve_config(SMALL | settings, environ={})
    paths = RunPaths(tmp_path / "captions" / "run_0")
    write_table(pairs, VIDEO_TEXTS, paths.video_texts)
    paths.params_yaml.write_text(config.to_yaml())
    paths.run_json.write_text("{}")
    train_video_text(paths, config, metric_log=NoLog())
    video_text_results(paths, config)

    test = pairs.filter(pl.col("part") == "test")
    captions = {row["path"]: row["caption"] for row in read_table(paths.captions, CAPTIONS).to_dicts()}
    some = sorted(captions)
    trained = pairs.filter(pl.col("part") == "train")["path"][0]
    (tmp_path / "torn.mp4").write_bytes((manifest.parent / some[0]).read_bytes()[:200])
    files = [*(manifest.parent / path for path in some), manifest.parent / trained, tmp_path / "torn.mp4"]
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
    predictor_of(paths)
    assert "VideoTextNetwork is not what it was when it was trained. Asked about generated samples" in caplog.text
