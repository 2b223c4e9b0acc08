from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fvc_lib.services.atomic_files import sha256_of_file
from fvc_lib.services.config import AUGMENTATIONS
from fvc_lib.services.path_text import path_to_text
from fvc_lib.services.tables import AUGMENTED, read_table
from fvc_lib.video.augmentation import AugmentationPlan, AugmentationSettings, apply_augmentation
from fvc_lib.video.clip_making import make_clips
from fvc_lib.video.clip_store import ClipStore
from fvc_lib.video.decode import decode_clip

ID = "0123456789abcdef"


def _store(folder: Path, **changes) -> ClipStore:
    arguments = {"num_frames": 4, "fixed_size": 16, "augmentation": AugmentationSettings(AUGMENTATIONS), **changes}
    return ClipStore(folder, **arguments)


@pytest.fixture
def corpus(tmp_path, make_video):
    """Three videos with awkward names, and their rows of the index that making clips reads."""
    root = tmp_path / "corpus"
    root.mkdir()
    rows = []
    for number, name in enumerate(('a "q", b.mp4', "new\nline 🎬.mp4", "\udcff\\x.mp4")):
        path = make_video("made.mp4", 6 + number).rename(root / name)
        digest = sha256_of_file(path)
        rows.append(
            {
                "video_id": digest[:16],
                "path": path_to_text(name),
                "label": "fake" if number else "real",
                "group_id": f'group,"{number}"\n',
                "content_sha256": digest,
            }
        )
    return root, pl.DataFrame(rows)


def test_clips_are_made_once_and_are_what_their_plan_says(tmp_path, corpus):
    root, index = corpus
    store, table = _store(tmp_path / "cache"), tmp_path / "tables" / "augmented_metadata.csv"
    seen = []
    report = make_clips(store, index, root, 2, table, progress=lambda done, total: seen.append((done, total)))
    assert (report.made, report.reused, report.failed) == (9, 0, ())
    assert seen == [(1, 3), (2, 3), (3, 3)]
    rows = read_table(table, AUGMENTED)
    assert rows["video_id"].to_list() == [video_id for video_id in index["video_id"] for _ in range(3)]
    assert rows["augmentation_index"].to_list() == [0, 1, 2] * 3
    assert rows["group_id"].unique(maintain_order=True).to_list() == index["group_id"].to_list()
    for row in rows.iter_rows(named=True):
        clip = np.load(store.cache_dir / row["clip_path"])
        np.testing.assert_array_equal(clip, store.read(row["video_id"], row["augmentation_index"]))
        original = store.read(row["video_id"], 0)
        plan = AugmentationPlan.from_json(row["operations"])
        np.testing.assert_array_equal(clip, apply_augmentation(original, plan))
    first = next(root.iterdir())
    digest = sha256_of_file(first)
    np.testing.assert_array_equal(store.read(digest[:16], 0), decode_clip(first, 4, 16).frames)
    before = table.read_bytes()
    again = make_clips(store, index, root, 2, table)
    assert (again.made, again.reused) == (0, 9)
    assert table.read_bytes() == before


def test_the_clips_do_not_depend_on_workers_or_on_the_place_of_the_corpus(tmp_path, corpus):
    root, index = corpus
    one, two = _store(tmp_path / "one"), _store(tmp_path / "two")
    make_clips(one, index, root, 2, tmp_path / "one.csv", workers=1)
    moved = root.rename(tmp_path / "moved")
    make_clips(two, index.reverse(), moved, 2, tmp_path / "two.csv", workers=3)
    for path in sorted((tmp_path / "one").rglob("*.npy")):
        assert path.read_bytes() == (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes()
    assert (tmp_path / "one.csv").read_bytes() != (tmp_path / "two.csv").read_bytes()
    assert sorted((tmp_path / "one.csv").read_text()) == sorted((tmp_path / "two.csv").read_text())


def test_a_video_that_fails_is_reported_and_the_others_are_made(tmp_path, corpus):
    root, index = corpus
    paths = sorted(root.iterdir())
    gone, changed = paths[0], paths[1]
    ids = {path: sha256_of_file(path)[:16] for path in paths}
    gone.unlink()
    changed.write_bytes(paths[2].read_bytes())
    report = make_clips(_store(tmp_path / "cache"), index, root, 1, tmp_path / "t.csv")
    assert {video_id for video_id, _ in report.failed} == {ids[gone], ids[changed]}
    reasons = dict(report.failed)
    assert "no such file" in reasons[ids[gone]]
    assert "changed since it was indexed" in reasons[ids[changed]]
    assert report.made == 2
    assert read_table(tmp_path / "t.csv", AUGMENTED)["video_id"].unique().to_list() == [ids[paths[2]]]


def test_no_readable_video_leaves_a_valid_empty_table(tmp_path, corpus):
    root, index = corpus
    for path in root.iterdir():
        path.unlink()
    report = make_clips(_store(tmp_path / "cache"), index, root, 1, tmp_path / "t.csv")
    assert (report.made, report.reused, len(report.failed)) == (0, 0, 3)
    assert read_table(tmp_path / "t.csv", AUGMENTED).is_empty()


def test_the_table_grows_with_each_video_and_a_killed_run_is_continued(tmp_path, corpus):
    root, index = corpus
    store, table = _store(tmp_path / "cache"), tmp_path / "t.csv"

    def die(done: int, total: int) -> None:
        with table.open(newline="") as stream:
            assert len(list(csv.reader(stream))) == 1 + 2 * done
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_clips(store, index, root, 1, table, progress=die, workers=1)
    table.write_bytes(table.read_bytes()[:-9])  # as a kill in the middle of a write leaves it
    stale = store.clip_path(ID, 0).with_name(f".{ID}.npy.1.999999999.tmp")
    stale.parent.mkdir(parents=True, exist_ok=True)
    stale.touch()
    report = make_clips(store, index, root, 1, table)
    assert report.reused >= 4
    assert report.made + report.reused == 6
    assert len(read_table(table, AUGMENTED)) == 6
    assert not stale.exists()
