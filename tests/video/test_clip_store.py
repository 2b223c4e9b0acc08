from pathlib import Path

import numpy as np
import pytest

from fvc_lib.services.errors import DataError
from fvc_lib.services.registry import AUGMENTATIONS
from fvc_lib.video.augmentations import AugmentationSettings
from fvc_lib.video.clips.store import ClipStore

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
    stronger = _store(tmp_path, augmentation=AugmentationSettings(ALL, 2.0))
    assert stronger.clip_path(ID, 0) == base.clip_path(ID, 0)
    assert stronger.clip_path(ID, 1) != base.clip_path(ID, 1)
    stores = [base, stronger, _store(tmp_path, num_frames=5), _store(tmp_path, fixed_size=17)]
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
