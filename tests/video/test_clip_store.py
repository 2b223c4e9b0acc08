import io
import os
from pathlib import Path

import av
import numpy as np
import pytest

from fvc_lib.services.errors import DataError
from fvc_lib.services.registry import AUGMENTATIONS
from fvc_lib.video.augmentations import AugmentationSettings
from fvc_lib.video.clips.shards import write_shards
from fvc_lib.video.clips.store import ClipStore, contact_sheet, prune_set, stored_sets
from fvc_lib.video.reencode import reencoded
from tests.video.conftest import filled_store

ID = "0123456789abcdef"

ALL = tuple(AUGMENTATIONS.names())


def _store(folder: Path, **changes) -> ClipStore:
    arguments = {"num_frames": 4, "fixed_size": 16, "augmentation": AugmentationSettings(ALL), **changes}
    return ClipStore(folder, **arguments)


def _clip(value: int = 9) -> np.ndarray:
    return np.full((4, 3, 16, 16), value, np.uint8)


def test_a_clip_comes_back_whole_and_in_parts(tmp_path):
    store = _store(tmp_path)
    assert not store.has(ID, 1)
    clip = np.random.default_rng(0).integers(0, 256, store.shape, np.uint8)
    store.write(ID, 1, clip)
    assert store.has(ID, 1)
    for read in (store.read(ID, 1), np.load(store.clip_path(ID, 1))):
        np.testing.assert_array_equal(read, clip)
    part = np.empty((2, *store.shape[1:]), np.uint8)
    store.load(ID, 1, part, 1)
    np.testing.assert_array_equal(part, clip[1:3])


def test_clips_of_other_settings_never_meet_but_originals_are_shared(tmp_path):
    base = _store(tmp_path)
    fewer = _store(tmp_path, augmentation=AugmentationSettings(ALL[1:]))
    assert fewer.clip_path(ID, 0) == base.clip_path(ID, 0)
    assert fewer.clip_path(ID, 1) != base.clip_path(ID, 1)
    stores = [base, fewer, _store(tmp_path, num_frames=5), _store(tmp_path, fixed_size=17)]
    assert len({store.settings_hash for store in stores}) == 4
    assert len({store.clip_path(ID, 0) for store in stores}) == 3
    assert _store(tmp_path / "elsewhere").settings_hash == base.settings_hash


@pytest.mark.parametrize("video_id", ["", "../../etc/passwd", "a/b", "x" * 200, "a\n"])
def test_an_id_that_is_no_plain_name_is_refused(tmp_path, video_id):
    with pytest.raises(ValueError, match="clip"):
        _store(tmp_path).clip_path(video_id, 0)


def test_damaged_and_foreign_files_are_not_clips(tmp_path):
    store = _store(tmp_path)
    with pytest.raises(ValueError, match="uint8"):
        store.write(ID, 0, _clip()[:2])
    store.write(ID, 0, _clip())
    with pytest.raises(ValueError, match="uint8"):
        store.load(ID, 0, _clip()[..., :2])
    path = store.clip_path(ID, 0)
    for damage in (
        lambda: path.write_bytes(path.read_bytes()[:-1]),
        lambda: np.save(path, np.zeros((1, 3, 16, 16), np.uint8)),
        lambda: np.save(path, np.array([{"a": 1}], object), allow_pickle=True),
        path.unlink,
    ):
        damage()
        assert not store.has(ID, 0)
        with pytest.raises(DataError, match=ID):
            store.read(ID, 0)


@pytest.fixture
def store(tmp_path):
    """Two videos with a copy each, and shards of them."""
    store = ClipStore(tmp_path / "cache", 1, 16, AugmentationSettings(("flip", "noise")))
    store.note_use()
    write_shards(store, filled_store(store, ["aaaa", "bbbb"]))
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


def test_rows_are_clips_and_columns_are_frames():
    clips = np.random.default_rng(0).integers(0, 200, (2, 3, 3, 4, 5)).astype(np.uint8)
    with av.open(io.BytesIO(contact_sheet(clips, gap=2))) as container:  # another decoder
        (frame,) = container.decode(video=0)
    cells = np.full((2, 3, 3, 6, 7), 255)
    cells[..., :4, :5] = clips
    wanted = cells.transpose(0, 3, 1, 4, 2).reshape(2 * 6, 3 * 7, 3)
    np.testing.assert_array_equal(frame.to_ndarray(format="rgb24"), wanted)
