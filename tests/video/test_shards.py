import gc
import io
import json
import pickle
import tarfile
import warnings
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fvc_lib.services.atomic_files import sha256_of_file
from fvc_lib.services.errors import DataError
from fvc_lib.services.records.digests import write_document
from fvc_lib.services.tables import AUGMENTED
from fvc_lib.video.augmentations import AugmentationSettings
from fvc_lib.video.clips.shards import (
    MANIFEST,
    ClipShards,
    read_manifest,
    shards_folder,
    write_shards,
)
from fvc_lib.video.clips.store import ClipStore
from fvc_lib.video.decode.file_parts import contents_of

SHARD_BYTES = 4 * (128 + 2 * 3 * 16 * 16)  # four clips a shard


def filled_store(folder: Path, num_videos: int = 5, copies: int = 1) -> tuple[ClipStore, pl.DataFrame]:
    """A store of noise, and the AUGMENTED rows of what is in it, with awkward texts."""
    store = ClipStore(folder, 2, 16, AugmentationSettings(("flip",)))
    rows = []
    for video in range(num_videos):
        video_id = f"{video:016x}"
        for number in range(copies + 1):
            frames = np.random.default_rng([video, number]).integers(0, 256, store.shape, np.uint8)
            store.write(video_id, number, frames)
            path = store.clip_path(video_id, number).relative_to(store.cache_dir).as_posix()
            label, group = ("fake", "real")[video % 2], f'g "{video}"\n<b>🎬'
            rows.append((f"{video_id}_{number}", video_id, group, label, number, "[]", store.settings_hash, path))
    return store, pl.DataFrame(rows, schema=list(AUGMENTED.columns), orient="row")


def load(shards: ClipShards, video_id: str, number: int) -> np.ndarray:
    frames = np.empty(shards.shape, np.uint8)
    shards.load(video_id, number, frames)
    return frames


@pytest.fixture
def written(tmp_path):
    store, clips = filled_store(tmp_path / "cache")
    return store, clips, write_shards(store, clips, shard_bytes=SHARD_BYTES)


def test_every_clip_comes_back(written):
    store, clips, folder = written
    shards = ClipShards(folder)
    assert [len(entry.clips) for entry in shards.manifest.shards] == [4, 4, 2]
    assert (shards.settings_hash, shards.shape) == (store.settings_hash, store.shape)
    for row in clips.iter_rows(named=True):
        name = row["video_id"], row["augmentation_index"]
        assert shards.has(*name)
        frames = load(shards, *name)
        np.testing.assert_array_equal(frames, store.read(*name))
    assert not shards.has("0" * 16, 7)
    with pytest.raises(DataError):
        load(shards, "0" * 16, 7)


def test_the_bytes_depend_on_the_clips_alone(written, tmp_path):
    """Other folder, other order of rows, another day, and clips that were written at other times."""
    _, clips, folder = written
    other, _ = filled_store(tmp_path / "elsewhere" / "cache")
    again = write_shards(other, clips.sample(fraction=1, shuffle=True, seed=3), shard_bytes=SHARD_BYTES)
    assert again.name == folder.name
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["clips-000000.tar", "clips-000001.tar", "clips-000002.tar", MANIFEST, "settings.json"]
    for name in names:
        assert (again / name).read_bytes() == (folder / name).read_bytes(), name
    with tarfile.open(folder / names[0]) as tar:
        assert {(member.mtime, member.uid, member.gid, member.uname, member.mode) for member in tar} == {
            (0, 0, 0, "", 0o644)
        }


def test_tar_files_hold_a_clip_and_its_row_side_by_side(written):
    store, clips, folder = written
    rows = {row["clip_id"]: row for row in clips.iter_rows(named=True)}
    read = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            names = tar.getnames()
            for pixels_name, row_name in zip(names[::2], names[1::2], strict=True):
                key = pixels_name.removesuffix(".npy")
                assert row_name == f"{key}.json"
                row = json.loads(tar.extractfile(row_name).read())
                assert row == rows[key]
                pixels = np.load(io.BytesIO(tar.extractfile(pixels_name).read()))
                np.testing.assert_array_equal(pixels, store.read(row["video_id"], row["augmentation_index"]))
                read.append(key)
    assert read == [f"{video_id}_{number}" for video_id, number in ClipShards(folder).clips]


def test_the_package_webdataset_reads_our_shards(written):
    webdataset = pytest.importorskip("webdataset")
    store, clips, folder = written
    rows = {row["clip_id"]: row for row in clips.iter_rows(named=True)}
    tars = sorted(str(path) for path in folder.glob("*.tar"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves files open
        read = list(webdataset.WebDataset(tars, shardshuffle=False).decode())
        gc.collect()
    assert [sample["__key__"] for sample in read] == [f"{name}_{number}" for name, number in ClipShards(folder).clips]
    for sample in read:
        row = rows[sample["__key__"]]
        assert sample["json"] == row
        np.testing.assert_array_equal(sample["npy"], store.read(row["video_id"], row["augmentation_index"]))


def test_our_reader_reads_shards_of_the_package_webdataset(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(3):
            writer.write({"__key__": f"deep/v{number}", "mp4": bytes([number]) * 700, "json": {"label": "real"}})
    contents = contents_of(tmp_path / "a.tar")
    assert contents.damage == ""
    assert list(contents.members) == [f"deep/v{number}.{kind}" for number in range(3) for kind in ("json", "mp4")]
    assert contents.members["deep/v2.mp4"].read() == b"\2" * 700
    assert json.loads(contents.members["deep/v0.json"].read()) == {"label": "real"}


def test_what_is_there_and_whole_is_not_written_again(written):
    store, clips, folder = written
    before = {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.glob("clips-*")}
    seen = []
    write_shards(store, clips, progress=lambda done, total: seen.append((done, total)))
    assert seen == []
    assert {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.glob("clips-*")} == before
    (folder / "clips-000001.tar").write_bytes(b"damaged")
    (folder / "clips-000009.tar").touch()
    write_shards(store, clips, shard_bytes=SHARD_BYTES, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(4, 10), (8, 10), (10, 10)]
    assert {path.name: path.read_bytes() for path in folder.glob("clips-*")} == {n: c for n, (_, c) in before.items()}


def test_a_manifest_of_other_clips_or_settings_is_written_anew(written):
    store, clips, folder = written
    path = folder / MANIFEST
    whole = path.read_bytes()
    document = json.loads(whole)
    for other in (
        {"settings_hash": "0" * 64},
        {"shards": document["shards"][:2]},
        {"shards": [], "shape": [1, 3, 8, 8]},
    ):
        write_document(path, {**document, **other})
        ClipShards(folder).verify()  # the shards fit it
        write_shards(store, clips, shard_bytes=SHARD_BYTES)
        assert path.read_bytes() == whole


def test_any_flipped_bit_and_any_cut_is_found_before_a_clip_is_given(written):
    _, _, folder = written
    path = folder / "clips-000000.tar"
    whole = path.read_bytes()
    first, *_, other = ClipShards(folder).clips
    flips = [bytes(whole[:at]) + bytes([whole[at] ^ 16]) + whole[at + 1 :] for at in range(7, len(whole), 499)]
    for content in (*flips, b"", whole[:511], whole[: len(whole) // 2], whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=path.name):
            load(ClipShards(folder), *first)
    load(ClipShards(folder), *other)  # the other shards are whole
    path.unlink()
    with pytest.raises(DataError, match=path.name):
        ClipShards(folder).verify()


def replace_members(folder: Path, change) -> None:
    """Rewrite the first shard through ``change`` (member, content) -> list of such, and sign it in the manifest."""
    path = folder / "clips-000000.tar"
    with tarfile.open(path) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar]
    with tarfile.open(path, "w") as tar:
        for number, (member, content) in enumerate(members):
            for new, data in change(member, content) if number == 0 else [(member, content)]:
                new.size = len(data)
                tar.addfile(new, io.BytesIO(data))
    document = json.loads((folder / MANIFEST).read_text())
    document["shards"][0].update(sha256=sha256_of_file(path), size_bytes=path.stat().st_size)
    write_document(folder / MANIFEST, document)


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def pickled_array(value: object) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array([value], object), allow_pickle=True)
    return stream.getvalue()


def named(name: str, **attributes: object) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    for attribute, value in attributes.items():
        setattr(member, attribute, value)
    return member


def hostile_members(bomb: Bomb) -> dict[str, object]:
    return {
        "pickle": lambda m, c: [(m, c), (named("0.pyd"), pickle.dumps(bomb))],
        "pickle under a clip's name": lambda m, c: [(m, pickle.dumps(bomb).ljust(len(c), b"\0"))],
        "pickled array": lambda m, c: [(m, pickled_array(bomb).ljust(len(c), b"\0"))],
        "path that leaves": lambda m, c: [(named("../../outside.npy"), c)],
        "absolute path": lambda m, c: [(named("/tmp/outside.npy"), c)],
        "link": lambda m, c: [(named(m.name, type=tarfile.SYMTYPE, linkname="/etc/passwd"), b"")],
        "hard link": lambda m, c: [(named(m.name, type=tarfile.LNKTYPE, linkname="x.json"), b"")],
        "folder": lambda m, c: [(named(m.name, type=tarfile.DIRTYPE), b"")],
        "device": lambda m, c: [(named(m.name, type=tarfile.CHRTYPE), b"")],
        "another size": lambda m, c: [(m, c[:-1])],
        "another clip": lambda m, c: [(named("f" * 16 + "_0.npy"), c)],
        "twice": lambda m, c: [(m, c), (m, c)],
        "nothing": lambda m, c: [],
    }


@pytest.mark.fault(36, 37)
@pytest.mark.parametrize("kind", hostile_members(Bomb(Path())))
def test_hostile_members_are_refused_by_name_and_never_executed(written, tmp_path, kind):
    _, _, folder = written
    bomb = Bomb(tmp_path / "bomb went off")
    before = set(tmp_path.rglob("*"))
    replace_members(folder, hostile_members(bomb)[kind])
    shards = ClipShards(folder)
    for clip in shards.clips[:4]:
        with pytest.raises(DataError, match=r"clips-000000\.tar"):
            load(shards, *clip)
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "change",
    [
        {"format": "something else"},
        {"shape": [2, 3, 16]},
        {"more": 1},
        {"shards": [{"name": "../clips-000000.tar", "sha256": "0" * 64, "size_bytes": 1, "clips": []}]},
        {"shards": [{"name": "clips-000000.tar\n", "sha256": "0" * 64, "size_bytes": 1, "clips": []}]},
        {"shards": [{"name": "clips-000000.tar", "sha256": "0" * 64, "size_bytes": 1, "clips": [["../x", 0]]}]},
        {"shards": [{"name": "clips-000000.tar", "sha256": "0" * 64, "size_bytes": 1, "clips": [["x", 0], ["x", 0]]}]},
    ],
    ids=str,
)
def test_a_manifest_that_cannot_be_meant_is_refused(written, change):
    _, _, folder = written
    path = folder / MANIFEST
    write_document(path, {**json.loads(path.read_text()), **change})
    with pytest.raises(DataError, match=MANIFEST):
        read_manifest(folder)


def test_torn_and_absent_manifests_are_refused(written):
    path = written[2] / MANIFEST
    for break_it in (lambda: path.write_bytes(path.read_bytes()[:-20]), path.unlink):
        break_it()
        with pytest.raises(DataError, match=MANIFEST):
            ClipShards(path.parent)


def test_a_clip_that_is_missing_in_the_store_is_named_and_leaves_no_manifest(tmp_path):
    store, clips = filled_store(tmp_path)
    store.clip_path(f"{3:016x}", 1).unlink()
    with pytest.raises(DataError, match="0000000000000003_1"):
        write_shards(store, clips, shard_bytes=SHARD_BYTES)
    assert not (shards_folder(store, clips) / MANIFEST).exists()


def test_a_shard_for_each_clip_also_in_a_spawned_process(written):
    store, clips, _ = written
    folder = write_shards(store, clips.head(3), shard_bytes=1)
    shards = pickle.loads(pickle.dumps(ClipShards(folder)))
    assert len(shards.manifest.shards) == 3
    for clip in shards.clips:
        np.testing.assert_array_equal(load(shards, *clip), store.read(*clip))
