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
from fvc_lib.video.augmentations import AugmentationSettings
from fvc_lib.video.clips.shards import MANIFEST, ClipShards, shards_folder, write_shards
from fvc_lib.video.clips.store import ClipStore
from fvc_lib.video.decode.file_parts import contents_of
from tests.video.conftest import filled_store

SHARD_BYTES = 4 * (128 + 2 * 3 * 16 * 16)  # four clips a shard


def filled(folder: Path) -> tuple[ClipStore, pl.DataFrame]:
    store = ClipStore(folder, 2, 16, AugmentationSettings(("flip",)))
    return store, filled_store(store, [f"{video:016x}" for video in range(5)])


def load(shards: ClipShards, video_id: str, number: int) -> np.ndarray:
    frames = np.empty(shards.shape, np.uint8)
    shards.load(video_id, number, frames)
    return frames


@pytest.fixture
def written(tmp_path):
    store, clips = filled(tmp_path / "cache")
    return store, clips, write_shards(store, clips, shard_bytes=SHARD_BYTES)


def test_every_clip_comes_back_also_in_another_process(written):
    store, clips, folder = written
    shards = ClipShards(folder)
    assert [len(entry.clips) for entry in shards.manifest.shards] == [4, 4, 2]
    assert (shards.settings_hash, shards.shape) == (store.settings_hash, store.shape)
    for reader in (shards, pickle.loads(pickle.dumps(ClipShards(folder)))):
        for name in clips.select("video_id", "augmentation_index").iter_rows():
            assert reader.has(*name)
            np.testing.assert_array_equal(load(reader, *name), store.read(*name))
    assert not shards.has("0" * 16, 7)
    with pytest.raises(DataError):
        load(shards, "0" * 16, 7)


def test_the_bytes_depend_on_the_clips_alone(written, tmp_path):
    """Other folder, other order of rows, another day, and clips that were written at other times."""
    _, clips, folder = written
    other, _ = filled(tmp_path / "elsewhere" / "cache")
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


def samples_by_tarfile(tars: list[str]) -> list[dict]:
    """Return the key, the row and the pixels of every clip, as ``webdataset`` returns them."""
    samples = []
    for path in tars:
        with tarfile.open(path) as tar:
            members = [(member.name, tar.extractfile(member).read()) for member in tar]
        for (pixels_name, pixels), (row_name, row) in zip(members[::2], members[1::2], strict=True):
            key = pixels_name.removesuffix(".npy")
            assert row_name == f"{key}.json"
            samples.append({"__key__": key, "npy": np.load(io.BytesIO(pixels)), "json": json.loads(row)})
    return samples


def samples_by_webdataset(tars: list[str]) -> list[dict]:
    webdataset = pytest.importorskip("webdataset")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves files open
        samples = list(webdataset.WebDataset(tars, shardshuffle=False).decode())
        gc.collect()
    return samples


@pytest.mark.parametrize("samples_of", [samples_by_tarfile, samples_by_webdataset])
def test_tars_hold_a_clip_and_its_row_side_by_side(written, samples_of):
    store, clips, folder = written
    rows = {row["clip_id"]: row for row in clips.iter_rows(named=True)}
    samples = samples_of(sorted(str(path) for path in folder.glob("*.tar")))
    assert [sample["__key__"] for sample in samples] == [
        f"{name}_{number}" for name, number in ClipShards(folder).clips
    ]
    for sample in samples:
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


def test_undamaged_shards_of_these_clips_are_not_written_again(written):
    store, clips, folder = written
    before = {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()}
    write_shards(store, clips)
    assert {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()} == before
    for name in ("clips-000001.tar", MANIFEST):
        (folder / name).write_bytes(b"damaged")
        write_shards(store, clips, shard_bytes=SHARD_BYTES)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {n: c for n, (_, c) in before.items()}


def test_any_flipped_bit_and_any_cut_is_found_before_a_clip_is_given(written):
    _, _, folder = written
    path = folder / "clips-000000.tar"
    whole = path.read_bytes()
    flips = [bytes(whole[:at]) + bytes([whole[at] ^ 16]) + whole[at + 1 :] for at in range(7, len(whole), 499)]
    for content in (*flips, b"", whole[:511], whole[: len(whole) // 2], whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=path.name):
            ClipShards(folder)
    path.unlink()
    with pytest.raises(DataError, match=path.name):
        ClipShards(folder)


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
    document["shards"][0]["sha256"] = sha256_of_file(path)
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


def named(name: str, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd"
    return member


def hostile_members(bomb: Bomb) -> dict[str, object]:
    return {
        "pickle": lambda m, c: [(m, c), (named("0.pyd"), pickle.dumps(bomb))],
        "pickle under a clip's name": lambda m, c: [(m, pickle.dumps(bomb).ljust(len(c), b"\0"))],
        "pickled array": lambda m, c: [(m, pickled_array(bomb).ljust(len(c), b"\0"))],
        "path that leaves": lambda m, c: [(named("../../outside.npy"), c)],
        "absolute path": lambda m, c: [(named("/tmp/outside.npy"), c)],
        "link": lambda m, c: [(named(m.name, tarfile.SYMTYPE), b"")],
        "hard link": lambda m, c: [(named(m.name, tarfile.LNKTYPE), b"")],
        "device": lambda m, c: [(named(m.name, tarfile.CHRTYPE), b"")],
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
    with pytest.raises(DataError, match=r"clips-000000\.tar"):
        ClipShards(folder)
    assert set(tmp_path.rglob("*")) == before


def test_a_manifest_that_is_damaged_absent_or_names_another_file_is_refused(written):
    path = written[2] / MANIFEST
    document = json.loads(path.read_text())
    outside = {"name": "../clips-000000.tar", "sha256": "0" * 64, "clips": []}
    for break_it in (
        lambda: write_document(path, {**document, "format": "something else"}),
        lambda: write_document(path, {**document, "shards": [outside]}),
        lambda: path.write_bytes(path.read_bytes()[:-20]),
        path.unlink,
    ):
        break_it()
        with pytest.raises(DataError, match=MANIFEST):
            ClipShards(path.parent)


def test_a_clip_that_is_missing_in_the_store_is_named_and_leaves_no_manifest(tmp_path):
    store, clips = filled(tmp_path)
    store.clip_path(f"{3:016x}", 1).unlink()
    with pytest.raises(DataError, match="0000000000000003_1"):
        write_shards(store, clips, shard_bytes=SHARD_BYTES)
    assert not (shards_folder(store, clips) / MANIFEST).exists()
