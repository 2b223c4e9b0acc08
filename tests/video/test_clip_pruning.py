import os

import numpy as np
import polars as pl
import pytest

from fvc_lib.services.tables import AUGMENTED
from fvc_lib.video.augmentations import AugmentationSettings
from fvc_lib.video.clips.shards import write_shards
from fvc_lib.video.clips.store import ClipStore, prune_set, stored_sets
from fvc_lib.video.reencode import reencoded


@pytest.fixture
def store(tmp_path):
    """Two videos with a copy each, and shards of them."""
    store = ClipStore(tmp_path / "cache", 1, 16, AugmentationSettings(("flip", "noise"), 0.5))
    store.note_use()
    rows = []
    for video_id in ("aaaa", "bbbb"):
        for number in (0, 1):
            store.write(video_id, number, np.zeros(store.shape, np.uint8))
            rows.append((f"{video_id}_{number}", video_id, "g", "real", number, "[]", store.settings_hash, "x"))
    write_shards(store, pl.DataFrame(rows, schema=list(AUGMENTED.columns), orient="row"))
    return store


def test_sets_have_settings_size_and_last_use(store):
    augmented, original, shards = stored_sets(store.cache_dir)
    assert [each.kind for each in (augmented, original, shards)] == ["augmented", "original", "shards"]
    assert (original.folder, augmented.folder) == (store.originals_folder, store.augmented_folder)
    assert original.settings["fixed_size"] == 16
    assert augmented.settings["augmentations"] == ["flip", "noise"]
    assert shards.settings["clips"] == 4
    files = [path for path in original.folder.rglob("*") if path.is_file()]
    assert original.size_bytes == sum(path.stat().st_size for path in files)
    for path in files:
        os.utime(path, (1000, 1000))
    assert stored_sets(store.cache_dir)[1].last_used == 1000
    store.note_use()
    assert stored_sets(store.cache_dir)[1].last_used > 10**9


def test_one_set_goes_and_the_others_stand(store):
    before = {path: path.read_bytes() for path in store.cache_dir.rglob("*") if path.is_file()}
    prune_set(stored_sets(store.cache_dir)[0])
    assert not store.augmented_folder.exists()
    after = {path: path.read_bytes() for path in store.cache_dir.rglob("*") if path.is_file()}
    assert after == {path: data for path, data in before.items() if store.augmented_folder not in path.parents}
    for clip_set in stored_sets(store.cache_dir):
        prune_set(clip_set)
    assert list((store.cache_dir / "clips").iterdir()) == []


def test_nothing_is_deleted_through_links(store, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "aaaa.npy").write_bytes(b"precious")
    (store.originals_folder / "cc").symlink_to(outside)
    (store.originals_folder / "dddd.npy").symlink_to(outside / "aaaa.npy")
    (store.cache_dir / "clips" / ("decode_" + "0" * 32)).symlink_to(outside)
    (store.decode_folder / ("augmented_" + "1" * 32)).symlink_to(outside)
    (store.decode_folder / "notes.txt").write_text("mine")
    sets = stored_sets(store.cache_dir)
    assert len(sets) == 3
    for clip_set in sets:
        prune_set(clip_set)
    assert (outside / "aaaa.npy").read_bytes() == b"precious"
    assert {path.name for path in store.decode_folder.iterdir()} == {"notes.txt", "augmented_" + "1" * 32}


def test_re_encoded_videos_are_a_set_that_can_go(tmp_path, make_video):
    store = ClipStore(tmp_path / "cache", 1, 16, AugmentationSettings(()), recipe="canonical")
    store.note_use()
    made = reencoded(make_video("a.mp4", 2), "canonical", store.cache_dir)
    found = next(each for each in stored_sets(store.cache_dir) if each.kind == "reencoded")
    assert found.settings["recipe"] == "canonical"
    assert found.folder == made.parents[1]
    prune_set(found)
    assert not found.folder.exists()
