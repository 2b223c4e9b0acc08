"""The three generated corpora: equal bytes everywhere, honest captions and records, and files that are made once."""

import hashlib
from itertools import combinations

import numpy as np
import polars as pl

from fvc_lib.corpus.samples import drawings
from fvc_lib.corpus.samples.drawings import draw, generate_sample_dishes, plan_clips
from fvc_lib.corpus.samples.footage import Shot, draw_camera, generator_for, render_shot
from fvc_lib.corpus.samples.videos import MANIPULATIONS, generate_new_videos, manifest_of, plan_events


def test_drawn_pixels_are_those_of_these_corpus_versions():
    # A change of a digest changes a corpus: give it another CORPUS_VERSION, so that old ones are not reused. Digests
    # are equal on every machine, whatever its threads and hash seed.
    dish = drawings.plan_dishes()[0]
    base, donor = (render_shot(Shot(role, 96, 64, 12, draw_camera(role))) for role in ("base", "donor"))
    forged = [manipulation.apply(base, donor, generator_for("forger")) for manipulation in MANIPULATIONS.values()]
    drawn = {
        "forged": np.stack(forged),
        "filmed": render_shot(Shot("pinned", 160, 120, 8, draw_camera("pinned"))),
        "captioned": draw(plan_clips()[0]),
        "dish": drawings._draw(dish, generator_for("photograph", dish.name, 0)),
    }
    assert {name: hashlib.sha256(pixels.tobytes()).hexdigest()[:16] for name, pixels in drawn.items()} == {
        "forged": "36e0d222e3cfd5bf", "filmed": "6792c179a03be61e", "captioned": "fa9f58e1440b40f3",
        "dish": "d7d78285e4d09746",
    }  # fmt: skip


def test_the_manifest_lists_every_clip_with_its_group_and_manipulation():
    events = plan_events()
    rows = manifest_of(events).rows(named=True)
    assert [row["path"] for row in rows] == [clip.path for event in events for clip in event.clips]
    real = next(event for event in events if event.label == "real" and len(event.clips) == 2)
    assert [row["variant_of"] for row in rows if row["group"] == real.name] == [None, real.clips[0].path]
    made = {(row["label"], row["manipulation"]) for row in rows}
    assert made == {("real", None), *(("fake", name) for name in MANIPULATIONS)}


def test_missing_files_are_made_again_and_those_of_another_version_too(monkeypatch, tmp_path):
    monkeypatch.setattr(drawings, "DISHES_PER_FOOD", 1)
    seen: list[tuple[int, int]] = []
    manifest = generate_sample_dishes(tmp_path, progress=lambda *done: seen.append(done))
    assert seen == [(3 * number, 18) for number in range(1, 7)]
    files = {path: path.read_bytes() for path in sorted((tmp_path / "images").iterdir())}
    assert [f"images/{path.name}" for path in files] == sorted(pl.read_csv(manifest)["path"])
    (tmp_path / "images/mine.txt").write_text("kept")
    next(iter(files)).unlink()
    for notice in (manifest.with_name("NOTICE.txt").read_text(), "version 0"):
        manifest.with_name("NOTICE.txt").write_text(notice)
        generate_sample_dishes(tmp_path)
        assert {path: path.read_bytes() for path in files} == files
        list(files)[5].write_bytes(b"of another version")
    assert (tmp_path / "images/mine.txt").exists()


def test_missing_new_videos_are_made_and_others_left_alone(tmp_path):
    generate_new_videos(tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(path.stem for path in files) == ["fake", "real"]
    first, second = files
    first.unlink()
    second.write_bytes(b"kept")
    generate_new_videos(tmp_path)
    assert {path: path.read_bytes() for path in files} == {first: files[first], second: b"kept"}


def test_no_test_caption_is_in_training_but_every_two_of_its_words_are():
    by_part = {
        part: {clip.caption: (clip.colour, clip.shape, clip.motion, clip.ground) for clip in plan_clips()
               if clip.part == part}
        for part in ("train", "validation", "test")
    }  # fmt: skip
    assert [len(by_part[part]) for part in by_part] == [280, 40, 64]
    assert not any(by_part[one].keys() & by_part[other].keys() for one, other in combinations(by_part, 2))
    pairs = {pair for words in by_part["train"].values() for pair in combinations(words, 2)}
    assert {pair for part in by_part.values() for words in part.values() for pair in combinations(words, 2)} <= pairs
