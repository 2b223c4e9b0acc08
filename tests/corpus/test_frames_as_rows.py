"""Pictures that are frames: one video for each folder of them, in every layout, or a refusal that names the layout."""

import io
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fvc_lib.corpus.index import group_annotations
from fvc_lib.corpus.listing import Listing, read_corpora, read_corpus
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.video.decode.clip import decode_clip
from fvc_lib.video.decode.probe import probe_video
from tests.corpus.indexing import index_of

UNASSIGNED = "unassigned_picture"


def picture(name: str) -> bytes:
    """A picture of its own for each name."""
    stream = io.BytesIO()
    colours = np.random.default_rng(list(name.encode())).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    kind = {"jpg": "jpeg"}.get(ending := name.rpartition(".")[2].lower(), ending)
    Image.fromarray(colours).save(stream, kind)
    return stream.getvalue()


def content_of(name: str, text: str) -> bytes:
    return picture(name) if not text and name.endswith((".png", ".jpg", ".jpeg", ".webp")) else text.encode() or b"x"


def folder_of(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content_of(name, text))
    return folder


def manifest_of(folder: Path, files: Mapping[str, str]) -> Path:
    """Each file's text is the rest of its row; a text of the empty name is the header."""
    folder_of(folder, {name: "" for name in files if name and not name.endswith("/")})
    rows = ["path," + files.get("", "label"), *(f"{name.rstrip('/')},{rest}" for name, rest in files.items() if name)]
    (folder / "list.csv").write_text("\n".join(rows) + "\n")
    return folder / "list.csv"


def tar_of(folder: Path, files: Mapping[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / "0.tar", "w") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content := content_of(name, text))
            tar.addfile(member, io.BytesIO(content))
    return folder


def frames(folder: str, count: int = 3, ending: str = "png", rest: str = "") -> dict[str, str]:
    return {f"{folder}/{number:03d}.{ending}": rest for number in range(count)}


@dataclass(frozen=True)
class Case:
    make: Callable[[Path, Mapping[str, str]], Path]
    files: Mapping[str, str]
    videos: Mapping[str, str]  # label by path
    rejected: Mapping[str, int] = field(default_factory=dict)  # files by reason
    groups: tuple[tuple[str, ...], ...] = ()  # videos that are of one group
    label_map: Mapping[str, str] = field(default_factory=dict)
    num_frames: Mapping[str, int] = field(default_factory=dict)  # of folders of pictures that have not three


WEB = {"original": "real", "deepfakes": "fake"}
CASES = {
    "folders, PNG and JPEG": Case(
        folder_of,
        {**frames("real/a"), **frames("Fake/deep/b", ending="jpg"), **frames("Fake/c", ending="jpeg")},
        {"real/a": "real", "Fake/deep/b": "fake", "Fake/c": "fake"},
    ),
    "folders called after their videos": Case(
        folder_of,
        {**frames("real/a.mp4"), **frames("fake/b.mp4")},
        {"real/a.mp4": "real", "fake/b.mp4": "fake"},
    ),
    "pictures in a label's folder": Case(
        folder_of, {**frames("real", 4, "jpg"), **frames("fake/b")}, {"fake/b": "fake"}, {UNASSIGNED: 4}
    ),
    "a thumbnail beside a video": Case(
        folder_of,
        {"real/a.mp4": "", "real/a.jpg": "", "fake/b/b.mp4": "", "fake/b/poster.webp": ""},
        {"real/a.mp4": "real", "fake/b/b.mp4": "fake"},
        {"unknown_extension": 2},
    ),
    "names that are not of one sequence": Case(
        folder_of,
        {
            **{f"real/people/{name}.jpg": "" for name in ("ann", "bob")},
            **{f"real/two/{name}.png": "" for name in ("000_001", "000_002", "003_001", "003_002")},
            **{f"fake/kinds/{name}": "" for name in ("1.png", "2.webp")},
            **frames("fake/b"),
        },
        {"fake/b": "fake"},
        {UNASSIGNED: 8},
    ),
    "parts by a word, not by a number": Case(
        folder_of,
        {f"real/{name}.mp4": "" for name in ("talk", "talk_seg1", "talk-shot2_crop1", "walk_1", "walk_2", "real_clip1")}
        | frames("fake/b_frame9")
        | {"fake/b_clip4.mp4": "", "fake/talk_seg1.avi": "", "fake/c (2).mp4": "", "fake/c.mp4": "", "fake/c.avi": ""},
        {f"real/{name}.mp4": "real" for name in ("talk", "talk_seg1", "talk-shot2_crop1", "walk_1", "walk_2")}
        | {"real/real_clip1.mp4": "real", "fake/b_frame9": "fake", "fake/b_clip4.mp4": "fake", "fake/c.avi": "fake"}
        | {"fake/talk_seg1.avi": "fake", "fake/c (2).mp4": "fake", "fake/c.mp4": "fake"},
        groups=(
            ("real/talk.mp4", "real/talk_seg1.mp4", "real/talk-shot2_crop1.mp4"), ("real/walk_1.mp4",),
            ("real/walk_2.mp4",), ("real/real_clip1.mp4",), ("fake/b_frame9", "fake/b_clip4.mp4"),
            ("fake/talk_seg1.avi",), ("fake/c (2).mp4",), ("fake/c.mp4",), ("fake/c.avi",),
        ),
    ),
    "rows that name frames": Case(
        manifest_of,
        {"": "label,frame,kind", **frames("v/1", rest="fake,,"), "v/0/0.png": "real,0,tv", "v/0/1.png": "real,1,tv"},
        {"v/0": "real", "v/1": "fake"},
        num_frames={"v/0": 2},
    ),
    "rows that name folders": Case(
        lambda folder, files: write_rows(folder_of(folder, files), ["a,real", "b/,fake", "c,fake", "gone,fake"]),
        {**frames("a"), **frames("b", ending="jpg"), "c/notes.txt": "no picture"},
        {"a": "real", "b": "fake"},
        {"missing_video": 1, "not_a_file": 1},
    ),
    "rows of one folder with two labels": Case(
        manifest_of,
        {"x/0.png": "real", "x/1.png": "fake", **frames("a", rest="real"), **frames("b", rest="fake")},
        {"a": "real", "b": "fake"},
        {UNASSIGNED: 2},
    ),
    "rows of one folder with groups": Case(
        manifest_of,
        {"": "label,group", "x/0.png": "real,g", "x/1.png": "fake,g", "x/2.jpg": "real,h", "a/0.png": "fake,i"},
        {"x/0.png": "real", "x/1.png": "fake", "x/2.jpg": "real", "a": "fake"},
        groups=(("x/0.png", "x/1.png"), ("x/2.jpg",), ("a",)),
        num_frames={"x/0.png": 1, "x/1.png": 1, "x/2.jpg": 1, "a": 1},
    ),
    "rows beside the manifest, and in folders of labels": Case(
        manifest_of,
        {"0.png": "original", **frames("original", rest="original"), "Deepfakes/0.png": "Deepfakes"},
        {},
        {UNASSIGNED: 5},
        label_map=WEB,
    ),
    "rows of which a picture is missing": Case(
        lambda folder, files: (manifest_of(folder, files), (folder / "a/001.png").unlink())[0],
        {**frames("a", rest="real"), **frames("b", rest="fake")},
        {"a": "real", "b": "fake"},
        {"missing_video": 1},
        num_frames={"a": 2},
    ),
    "rows in several formats": Case(
        manifest_of,
        {"a/0.webp": "real", "a/1.webp": "real", "c/0.png": "real", "c/0.jpg": "real", **frames("b", rest="fake")},
        {"b": "fake"},
        {UNASSIGNED: 4},
    ),
    "a tar, labelled beside the folder": Case(
        tar_of,
        {"s/a.cls": "real", **frames("s/a"), **frames("b", ending="jpg"), "b.json": '{"label": "fake", "group": "g"}'},
        {"0.tar/s/a": "real", "0.tar/b": "fake"},
    ),
    "a tar, labelled beside each picture": Case(
        tar_of,
        {name: text for path in ("a", "b") for number in range(3) for name, text in (
            (f"{path}/{number}.png", ""), (f"{path}/{number}.cls", "fake" if path == "b" or number == 2 else "real"))},
        {"0.tar/b": "fake"},
        {UNASSIGNED: 3},
    ),
    "a tar of pictures without folders": Case(
        tar_of,
        {"0.png": "", "0.cls": "real", "v.1.png": "", "v.cls": "real", "b.cls": "fake", **frames("b"),
         "c.mp4": "", "c.jpg": "", "c.cls": "real"},
        {"0.tar/b": "fake", "0.tar/c.mp4": "real"},
        {UNASSIGNED: 2, "unknown_extension": 1},
    ),
    "a manifest of what lies in a tar": Case(
        lambda folder, files: (tar_of(folder, files), manifest_of(folder, {f"0.tar/{n}/": "real" for n in "a"}))[1]
        and write_rows(folder, ["0.tar/a,real", *(f"0.tar/{name},fake" for name in frames("b"))]),
        {**frames("a"), **frames("b")},
        {"0.tar/a": "real", "0.tar/b": "fake"},
    ),
}  # fmt: skip


def write_rows(folder: Path, rows: list[str]) -> Path:
    (folder / "list.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    return folder / "list.csv"


def groups_of(listing: Listing) -> set[tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for source, group in group_annotations(listing)[0].items():
        found.setdefault(group, []).append(source)
    return {tuple(sorted(members)) for members in found.values()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.fault(48)
def test_pictures_of_a_folder_are_one_video_or_are_refused(tmp_path, name):
    case = CASES[name]
    listing = read_corpus(case.make(tmp_path / "corpus", case.files), label_map=case.label_map)
    assert {entry.path: entry.label for entry in listing.entries} == dict(case.videos)
    assert dict(listing.rejected["reason"].value_counts().iter_rows()) == dict(case.rejected)
    assert all("real/VIDEO/000.png" in detail for detail in listing.rejected.filter(reason=UNASSIGNED)["detail"])
    if case.groups:
        assert groups_of(listing) == {tuple(sorted(group)) for group in case.groups}
    for entry in listing.entries:
        if not entry.path.endswith((".mp4", ".avi")) or (listing.root / entry.path).is_dir():
            probe = probe_video(listing.root / entry.path)
            assert probe.num_frames == case.num_frames.get(entry.path, 3)
            assert probe.frames_per_second is probe.duration_seconds is None


@pytest.mark.parametrize("make", [folder_of, tar_of], ids=["folder", "tar"])
def test_frames_are_read_in_the_order_of_their_numbers(tmp_path, make):
    files = {f"real/v/f_{number}.png": "" for number in (10, 9, 8, 11)}
    listing = read_corpus(make(tmp_path, {**files, "real/v.cls": "real", "fake/w/0.png": "", "fake/w.cls": "fake"}))
    (video,) = [entry.path for entry in listing.entries if entry.label == "real"]
    wanted = [np.asarray(Image.open(io.BytesIO(picture(f"real/v/f_{number}.png")))) for number in range(8, 12)]
    assert np.array_equal(decode_clip(listing.root / video, 4).frames.transpose(0, 2, 3, 1), np.stack(wanted))


def test_an_index_of_frames_in_tars_and_folders_is_the_same_and_is_known_again(tmp_path):
    files = {name: "" for path in ("real/a_seg1", "real/a_seg2", "fake/b", "fake/c") for name in frames(path)}
    labels = {"real/a_seg1.cls": "real", "real/a_seg2.cls": "real", "fake/b.cls": "fake", "fake/c.cls": "fake"}
    made = index_of(folder_of(tmp_path / "folder", files), tmp_path / "one")
    index = made.index
    assert index["path"].sort().to_list() == ["fake/b", "fake/c", "real/a_seg1", "real/a_seg2"]
    assert index["frames_per_second"].null_count() == index["duration_seconds"].null_count() == index.height
    assert dict(index["group_id"].value_counts().iter_rows())["parts of real/a"] == 2
    assert index["group_id"].n_unique() == 3
    assert made.rejected.is_empty()
    assert any(note.startswith("2 videos are parts of") for note in made.report.notes)
    of_tar = index_of(tar_of(tmp_path / "tar", files | labels), tmp_path / "two").index
    same = ["video_id", "num_frames", "size_bytes", "width", "perceptual_hash"]
    assert of_tar.select(same).equals(index.select(same))
    assert index_of(tmp_path / "tar", tmp_path / "two").index.equals(of_tar)


def test_frames_of_several_corpora_keep_their_parts_apart(tmp_path):
    for name in ("one", "two"):
        folder_of(tmp_path / name, {**frames("real/a_seg1"), **frames("real/a_seg2"), **frames(f"fake/{name}")})
    listing = read_corpora([tmp_path / "one", tmp_path / "two"], tmp_path / "links")
    assert ("one/real/a_seg1", "one/real/a_seg2") in groups_of(listing)
    assert len(groups_of(listing)) == 4


def test_loose_pictures_alone_and_pictures_without_a_layout_are_refused_with_the_layout(tmp_path):
    loose = folder_of(tmp_path / "loose", {**frames("real", ending="jpg"), **frames("fake", ending="jpg")})
    with pytest.raises(DataError, match=r"6 x unassigned_picture.*real/VIDEO/000\.png or \.jpg"):
        index_of(loose, tmp_path / "out")
    for folder in ("jpegs", "jpegs/deeper"):
        pictures = folder_of(tmp_path / folder, frames("x", ending="jpg") | {"0.jpg": ""})
        with pytest.raises(UsageError, match=r"real/VIDEO/000\.png or \.jpg"):
            read_corpus(pictures)
