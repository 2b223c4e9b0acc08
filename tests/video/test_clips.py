"""The store of clips, its sets and their deletion, and clips that are made from an index."""

import io
import shutil
from pathlib import Path

import av
import numpy as np
import polars as pl
import pytest

from fvc_lib.services.atomic_files import path_to_text, sha256_of_file
from fvc_lib.services.errors import DataError, FvcError
from fvc_lib.services.registry import AUGMENTATIONS
from fvc_lib.services.tables import AUGMENTED, read_table
from fvc_lib.video.augmentations import AugmentationSettings, apply_augmentation
from fvc_lib.video.clips import making as clip_making
from fvc_lib.video.clips.making import make_clips
from fvc_lib.video.clips.store import ClipStore, contact_sheet
from fvc_lib.video.decode.clip import decode_clip
from tests.video.conftest import plan_of

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


def test_rows_are_clips_and_columns_are_frames():
    clips = np.random.default_rng(0).integers(0, 200, (2, 3, 3, 4, 5)).astype(np.uint8)
    with av.open(io.BytesIO(contact_sheet(clips, gap=2))) as container:  # another decoder
        (frame,) = container.decode(video=0)
    cells = np.full((2, 3, 3, 6, 7), 255)
    cells[..., :4, :5] = clips
    wanted = cells.transpose(0, 3, 1, 4, 2).reshape(2 * 6, 3 * 7, 3)
    np.testing.assert_array_equal(frame.to_ndarray(format="rgb24"), wanted)


@pytest.fixture(scope="module")
def made_corpus(tmp_path_factory, encode_video):
    """Three videos with awkward names, and their rows of the index that making clips reads."""
    root = tmp_path_factory.mktemp("made") / "corpus"
    root.mkdir()
    rows = []
    for number, name in enumerate(('a "q", b.mp4', "new\nline 🎬.mp4", "\udcff\\x.mp4")):
        digest = sha256_of_file(encode_video(root / "made.mp4", 6 + number).rename(root / name))
        rows.append((digest[:16], path_to_text(name), "fake" if number else "real", f'group,"{number}"\n', digest))
    return root, pl.DataFrame(rows, ["video_id", "path", "label", "group_id", "content_sha256"], orient="row")


@pytest.fixture
def corpus(tmp_path, made_corpus):
    """A copy of ``made_corpus`` that the test may change."""
    return shutil.copytree(made_corpus[0], tmp_path / "corpus"), made_corpus[1]


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
        np.testing.assert_array_equal(clip, apply_augmentation(original, plan_of(row["operations"])))
    first = next(root.iterdir())
    np.testing.assert_array_equal(store.read(sha256_of_file(first)[:16], 0), decode_clip(first, 4, 16).frames)
    before = table.read_bytes()
    again = make_clips(store, index, root, 2, table)
    assert (again.made, again.reused, table.read_bytes()) == (0, 9, before)


def test_the_clips_do_not_depend_on_workers_or_on_the_place_of_the_corpus(tmp_path, corpus, made_corpus):
    root, index = corpus
    make_clips(_store(tmp_path / "one"), index, root, 2, tmp_path / "one.csv", workers=1)
    make_clips(_store(tmp_path / "two"), index.reverse(), made_corpus[0], 2, tmp_path / "two.csv", workers=3)
    for path in sorted((tmp_path / "one").rglob("*.npy")):
        assert path.read_bytes() == (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes()
    one, two = (read_table(tmp_path / name, AUGMENTED) for name in ("one.csv", "two.csv"))
    assert not one.equals(two)
    assert one.sort("clip_id").equals(two.sort("clip_id"))


def test_a_video_that_fails_is_reported_and_the_others_are_made(tmp_path, corpus):
    root, index = corpus
    (gone, gone_id), (changed, changed_id), (whole, whole_id) = (
        (path, sha256_of_file(path)[:16]) for path in sorted(root.iterdir())
    )
    gone.unlink()
    changed.write_bytes(whole.read_bytes())
    report = make_clips(_store(tmp_path / "cache"), index, root, 1, tmp_path / "t.csv")
    assert {video_id for video_id, _ in report.failed} == {gone_id, changed_id}
    assert report.made == 2
    assert read_table(tmp_path / "t.csv", AUGMENTED)["video_id"].unique().to_list() == [whole_id]


def test_a_killed_run_is_continued(tmp_path, corpus):
    root, index = corpus
    store, table = _store(tmp_path / "cache"), tmp_path / "t.csv"

    def die(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_clips(store, index, root, 1, table, progress=die, workers=1)
    assert not table.exists()
    missing = store.clip_path(index["video_id"][0], 1)
    missing.unlink(missing_ok=True)
    stale = missing.with_name(f".{missing.name}.1.999999999.tmp")
    stale.parent.mkdir(parents=True, exist_ok=True)
    stale.touch()
    report = make_clips(store, index, root, 1, table)
    assert report.reused >= 2
    assert report.made + report.reused == 6
    assert len(read_table(table, AUGMENTED)) == 6
    assert not stale.exists()


DANGEROUS = """
import ctypes, os, sys, time
from pathlib import Path
from fvc_lib.video.clips.worker import make_original

def dangerous(item):
    (Path(os.environ["MARKS"]) / str(os.getpid())).touch()
    name = Path(item["source"]).name
    if name.startswith("new"):
        ctypes.string_at(0)
    if name.startswith("\\udcff"):
        time.sleep(1000)
    assert not {"torch", "polars"} & set(sys.modules)
    return make_original(item)
"""


@pytest.fixture
def dangerous(tmp_path, monkeypatch) -> None:
    """A decoder that dies of the second video and hangs on the third; it leaves a mark per process."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "dangerous.py").write_text(DANGEROUS)
    (tmp_path / "marks").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.setenv("MARKS", str(tmp_path / "marks"))
    monkeypatch.setattr(clip_making, "DECODE_FUNCTION", "dangerous:dangerous")


def test_a_crash_and_a_hang_of_the_decoder_cost_their_video_only(tmp_path, corpus, dangerous, monkeypatch):
    monkeypatch.setattr(clip_making, "TIMEOUT_SECONDS", 2.5)
    root, index = corpus
    report = make_clips(_store(tmp_path / "cache"), index, root, 1, tmp_path / "t.csv", workers=2)
    ids = index["video_id"].to_list()
    assert [video_id for video_id, _ in report.failed] == ids[1:]
    assert "crashed" in report.failed[0][1]
    assert r"new\nline 🎬.mp4" in report.failed[0][1]
    assert "timeout" in report.failed[1][1]
    assert report.made == 2
    assert read_table(tmp_path / "t.csv", AUGMENTED)["video_id"].to_list() == [ids[0]] * 2


def test_a_store_that_cannot_be_written_is_an_error_and_no_fault_of_the_video(tmp_path, corpus):
    root, index = corpus
    store = _store(tmp_path / "cache")
    store.originals_folder.mkdir(parents=True)
    for video_id in index["video_id"]:
        (store.originals_folder / video_id[:2]).touch()  # a file where a folder has to be
    with pytest.raises(OSError):  # noqa: PT011 - of either of two classes
        make_clips(store, index, root, 1, tmp_path / "t.csv")


def test_edited_code_never_stores_under_the_name_of_the_code_before(tmp_path, corpus, monkeypatch):
    """As when decode.py is edited while a notebook's kernel, which has loaded it, makes clips."""
    root, index = corpus
    store = _store(tmp_path / "cache")
    monkeypatch.setattr(ClipStore, "decode_code", "the code before")
    with pytest.raises(FvcError):
        make_clips(store, index, root, 1, tmp_path / "t.csv")
    assert not list(store.decode_folder.rglob("*.npy"))
