"""Tars in WebDataset's layout, and pictures that are frames: what is read as one video, and what is refused."""

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from PIL import Image

from fvc_lib.corpus.images import list_images
from fvc_lib.corpus.index import group_annotations
from fvc_lib.corpus.listing import Listing, read_corpora, read_corpus
from fvc_lib.corpus.video_texts import read_tar_pairs, video_text_root
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.video.decode.clip import decode_clip
from fvc_lib.video.decode.probe import probe_video
from fvc_lib.video.decode.still_image import decode_image
from tests.corpus.indexing import index_of
from tests.corpus.published import text, touch
from tests.kits.tars import write_tar


class Trap:
    """Unpickled it says so."""

    def __reduce__(self):
        return (pytest.fail, ("a member was unpickled",))


@pytest.fixture
def tars(tmp_path, make_video):
    """Labels in every way that is read, and members that are not."""
    videos = [make_video(tmp_path / "videos" / f"{number}.mp4", number).read_bytes() for number in range(5)]
    folder = tmp_path / "corpus"
    write_tar(folder / "a-001.tar", {"s3.mp4": videos[3], "s3.json": {"label": "fake", "split": "test"}})
    write_tar(
        folder / "a-000.tar",
        {
            "x/s0.mp4": videos[0], "x/s0.cls": "1\n",
            "x/s1.MP4": videos[1], "x/s1.json": {"label": "real", "group": "g", "source": "tv", "score": 3},
            "s2.seg.mp4": videos[2], "s2.json": {"cls": 0, "group": "g", "generator": "net"},
            "s2.pyd": pickle.dumps(Trap()), "s2.npy": pickle.dumps(Trap()),
            "s4.mp4": videos[4], "s5.mp4": videos[4], "s5.json": "{", "s6.mp4": videos[4], "s6.cls": "7",
            "._s2.mp4": b"of macOS", "s7.json": {"label": "real", "status": "failed_to_download"},
            "s8.mp4": videos[4], "s8.cls": "real", "s8.json": {"is_fake": True}, "v1.2.cls": "real",
        },
    )  # fmt: skip
    return folder


def test_labels_groups_and_parts_are_read_beside_each_video(tars):
    listing = read_corpus(tars, label_map={"1": "fake", "0": "real"})
    found = {
        entry.path: (entry.label, entry.stated_group, entry.generator, entry.real_source, entry.official_split)
        for entry in listing.entries
    }
    assert found == {
        "a-000.tar/s2.seg.mp4": ("real", "g", "net", None, None),
        "a-000.tar/x/s0.mp4": ("fake", None, None, None, None),
        "a-000.tar/x/s1.MP4": ("real", "g", None, "tv", None),
        "a-001.tar/s3.mp4": ("fake", None, None, None, "test"),
    }
    assert (listing.kind, listing.name, listing.root) == ("tar_shards", "corpus", tars)
    assert dict(listing.rejected.select("path", "reason").iter_rows()) == {
        "a-000.tar/s2.npy": "unknown_extension",
        "a-000.tar/s2.pyd": "unknown_extension",
        "a-000.tar/s4.mp4": "label_not_used",
        "a-000.tar/s5.mp4": "malformed_row",
        "a-000.tar/s6.mp4": "label_not_used",
        "a-000.tar/s7": "missing_video",
        "a-000.tar/s8.mp4": "conflicting_labels",
        "a-000.tar/v1.2.cls": "unknown_extension",
    }
    (unclear,) = listing.rejected.filter(reason="conflicting_labels")["detail"]
    assert all(word in unclear for word in ("'.cls'", "'is_fake'"))


def test_tars_without_a_usable_label_are_refused_with_what_to_write(tmp_path):
    with pytest.raises(DataError, match=r"labelled real or fake; got 1 x '7'.*KEY\.cls.*label_map "):
        read_corpus(write_tar(tmp_path / "b.tar", {"s.mp4": b"", "s.cls": "7"}))
    with pytest.raises(DataError, match="got no data row"):
        read_corpus(write_tar(tmp_path / "c.tar", {"s.txt": "a text"}))


def test_a_tar_that_is_cut_gives_the_samples_before_the_cut(tars):
    path = tars / "a-000.tar"
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"s2.json") + 600])
    listing = read_corpus(tars, label_map={"1": "fake"})
    assert [entry.path for entry in listing.entries] == ["a-000.tar/x/s0.mp4", "a-000.tar/x/s1.MP4", "a-001.tar/s3.mp4"]
    assert listing.rejected.select("path", "reason").rows() == [
        ("a-000.tar", "truncated"),
        ("a-000.tar/s2.seg.mp4", "truncated"),
    ]
    assert "1 tars cannot be read, or not to their end: 'a-000.tar'" in listing.notes[0]
    assert len(decode_clip(listing.root / "a-000.tar/x/s0.mp4", 3, 16).frames) == 3


@pytest.mark.parametrize(
    ("beside", "label"),
    [
        ({"a.json": {"Is_Fake": True}}, "fake"),
        ({"a.json": {"label": "FAKE", "is_fake": True}, "a.cls": "fake"}, "fake"),
        ({"a.json": {"label": "real", "fake": True}}, None),
        ({"a.json": {"label": ["fake"]}}, None),
        ({"a.cls": b"\xff\xfe"}, None),
        ({"a.json": '{"label": "fake", "group": "\\ud800"}'}, None),
        ({"a.json": "[" * 100_000}, None),
    ],
)
def test_a_label_is_read_where_it_is_clear_and_refused_where_it_is_not(tmp_path, beside, label):
    write_tar(tmp_path / "0.tar", {"a.mp4": b"", **beside, "z.mp4": b"", "z.cls": "real"})
    listing = read_corpus(tmp_path, label_map={"true": "fake"})
    assert {entry.path: entry.label for entry in listing.entries}.get("0.tar/a.mp4") == label
    assert listing.rejected["path"].to_list() == ([] if label else ["0.tar/a.mp4"])


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ([("a.cls", b"real"), ("a.cls", b"fake")], ".cls is there more than once"),
        ([("a.json", b'{"label": "real", "Label": "fake"}')], "a name in two spellings"),
        ([("a.json", b'{"label": "real"}'), ("./a.json", b'{"label": "fake"}')], ".json is there more than once"),
        ([("a.cls", b"fake"), ("a.mp4", b"other")], "'a.mp4' in 0.tar is there more than once"),
    ],
)
def test_what_a_tar_says_twice_is_refused_and_named(tmp_path, members, named):
    write_tar(tmp_path / "0.tar", {"z.mp4": b"", "z.cls": b"real", "a.mp4": b"video"}, *members)
    listing = read_corpus(tmp_path)
    assert [entry.path for entry in listing.entries] == ["0.tar/z.mp4"]
    assert listing.rejected["path"].to_list() == ["0.tar/a.mp4"]
    assert named in listing.rejected["detail"][0]


def test_a_pattern_is_a_corpus_named_after_the_folder_it_begins_with(tars):
    label_map = {"1": "fake", "0": "real"}
    whole, listing = (read_corpus(path, label_map=label_map) for path in (tars, tars / "a-{000..001}.tar"))
    assert (listing.entries, listing.root, listing.name) == (whole.entries, tars, "corpus")
    with pytest.raises(UsageError, match=r"Did you mean '.*corpus'"):
        read_corpus(tars.parent)


def test_a_manifest_beside_the_tars_labels_their_members(tars):
    rows = ["path,label,group", "a-000.tar/s4.mp4,real,g", "a-001.tar/s3.mp4,fake,g", "a-001.tar/none.mp4,fake,h"]
    (tars / "manifest.csv").write_text("\n".join(rows))
    for corpus in (tars, tars / "manifest.csv"):
        listing = read_corpus(corpus)
        assert [(entry.path, entry.label, entry.stated_group) for entry in listing.entries] == [
            ("a-000.tar/s4.mp4", "real", "g"),
            ("a-001.tar/s3.mp4", "fake", "g"),
        ]
        assert listing.rejected["reason"].to_list() == ["missing_video"]


def test_clips_that_video2dataset_cut_from_one_video_are_of_one_group(tmp_path):
    members: dict[str, bytes | str | dict[str, object]] = {f"0_{number}.mp4": b"" for number in range(4)}
    for number in range(4):
        facts = {"key": f"0_{number}", "status": "success", "url": f"u{number // 2}", "label": "real"}
        members[f"0_{number}.json"] = facts
    listing = read_corpus(write_tar(tmp_path / "0.tar", members))
    assert listing.memberships == tuple((f"0.tar/0_{number}.mp4", f"url u{number // 2}") for number in range(4))


def test_what_webdatasets_own_writer_wrote_is_read(tmp_path):
    """``two_samples.tar`` was written by ``webdataset.ShardWriter`` (1.0.2) from dicts with the keys beside it."""
    listing = read_corpus(Path(__file__).parent / "two_samples.tar", label_map={"1": "fake", "false": "real"})
    assert [(entry.path, entry.label, entry.stated_group) for entry in listing.entries] == [
        ("two_samples.tar/set/000000.mp4", "fake", None),
        ("two_samples.tar/set/000001.mp4", "real", "g"),
    ]
    assert probe_video(listing.root / listing.entries[0].path).num_frames == 8
    assert listing.rejected["path"].to_list() == ["two_samples.tar/set/000001.pyd"]


def test_texts_stand_beside_videos_in_txt_or_json(tmp_path, make_video):
    videos = [make_video(tmp_path / f"{number}.mp4", number).read_bytes() for number in range(4)]
    folder = tmp_path / "pairs"
    write_tar(folder / "0.tar", {"a.mp4": videos[0], "a.txt": " a  red\nsquare ", "a.json": {"caption": "no"}})
    write_tar(folder / "1.tar", {
        "b.mp4": videos[1], "b.json": {"caption": "a blue one", "group": "g", "split": "test"},
        "c.mp4": videos[2], "d.mp4": videos[3], "d.json": {"text": "a green one", "split": "some"},
    })  # fmt: skip
    listing = read_tar_pairs(folder)
    assert listing.rows.select("path", "text", "part", "stated_group").rows() == [
        ("0.tar/a.mp4", "a red square", None, None),
        ("1.tar/b.mp4", "a blue one", "test", "g"),
    ]
    assert [row[4] for row in listing.rejections.rows] == ["no_text", "unknown_split"]
    assert listing.memberships == (("1.tar/b.mp4", "g"),)


def test_tables_called_like_tars_are_no_manifest_of_videos_and_texts(tmp_path, make_video):
    """video2dataset puts ``00000.parquet`` and ``00000_stats.json`` beside ``00000.tar``."""
    video = make_video(tmp_path / "a.mp4", 0).read_bytes()
    folder = write_tar(tmp_path / "v2d" / "00000.tar", {"0.mp4": video, "0.txt": "a red square"}).parent
    pl.DataFrame({"key": ["0"], "caption": ["a red square"]}).write_parquet(folder / "00000.parquet")
    (folder / "00000_stats.json").write_text("{}")
    for corpus in (folder, folder / "{00000..00000}.tar"):
        assert video_text_root(RunConfig(task="video_text", corpus=str(corpus))) == folder
        assert read_tar_pairs(corpus).rows["text"].to_list() == ["a red square"]


UNASSIGNED = "unassigned_picture"


def picture(name: str) -> bytes:
    """A picture of its own for each name."""
    stream = io.BytesIO()
    colours = np.random.default_rng(list(name.encode())).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    kind = {"jpg": "jpeg"}.get(ending := name.rpartition(".")[2].lower(), ending)
    Image.fromarray(colours).save(stream, kind)
    return stream.getvalue()


def content_of(name: str, content: str) -> bytes:
    return (
        picture(name) if not content and name.endswith((".png", ".jpg", ".jpeg", ".webp")) else content.encode() or b"x"
    )


def folder_of(folder: Path, files: Mapping[str, str]) -> Path:
    touch(folder, *files)
    for name, content in files.items():
        (folder / name).write_bytes(content_of(name, content))
    return folder


def manifest_of(folder: Path, files: Mapping[str, str]) -> Path:
    """Each file's text is the rest of its row; a text of the empty name is the header."""
    folder_of(folder, {name: "" for name in files if name and not name.endswith("/")})
    rows = [f"{name.rstrip('/')},{rest}" for name, rest in files.items() if name]
    return text(folder, "list.csv", ["path," + files.get("", "label"), *rows])


def tar_of(folder: Path, files: Mapping[str, str]) -> Path:
    return write_tar(folder / "0.tar", {name: content_of(name, text) for name, text in files.items()}).parent


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
    "a tar of pictures, which only a manifest names": Case(
        tar_of,
        {"b.cls": "fake", **frames("b"), "c.mp4": "", "c.jpg": "", "c.cls": "real"},
        {"0.tar/c.mp4": "real"},
        {"unknown_extension": 4, "missing_video": 1},
    ),
    "a manifest of what lies in a tar": Case(
        lambda folder, files: (tar_of(folder, files), manifest_of(folder, {f"0.tar/{n}/": "real" for n in "a"}))[1]
        and write_rows(folder, ["0.tar/a,real", *(f"0.tar/{name},fake" for name in frames("b"))]),
        {**frames("a"), **frames("b")},
        {"0.tar/a": "real", "0.tar/b": "fake"},
    ),
}  # fmt: skip


def write_rows(folder: Path, rows: list[str]) -> Path:
    return text(folder, "list.csv", ["path,label", *rows])


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


def named_in_tar(folder: Path, files: Mapping[str, str]) -> Path:
    """Pack the pictures; a manifest beside the tar names their folders, which begin with the label."""
    folders = sorted({str(Path(name).parent) for name in files})
    return write_rows(tar_of(folder, files), [f"0.tar/{name},{name.partition('/')[0]}" for name in folders])


@pytest.mark.parametrize("make", [folder_of, named_in_tar], ids=["folder", "tar"])
def test_frames_are_read_in_the_order_of_their_numbers(tmp_path, make):
    files = {f"real/v/f_{number}.png": "" for number in (10, 9, 8, 11)}
    listing = read_corpus(make(tmp_path, {**files, "fake/w/0.png": ""}))
    (video,) = [entry.path for entry in listing.entries if entry.label == "real"]
    wanted = [np.asarray(Image.open(io.BytesIO(picture(f"real/v/f_{number}.png")))) for number in range(8, 12)]
    assert np.array_equal(decode_clip(listing.root / video, 4).frames.transpose(0, 2, 3, 1), np.stack(wanted))


def test_an_index_of_frames_in_tars_and_folders_is_the_same_and_is_known_again(tmp_path):
    files = {name: "" for path in ("real/a_seg1", "real/a_seg2", "fake/b", "fake/c") for name in frames(path)}
    made = index_of(folder_of(tmp_path / "folder", files), tmp_path / "one")
    index = made.index
    assert index["path"].sort().to_list() == ["fake/b", "fake/c", "real/a_seg1", "real/a_seg2"]
    assert index["frames_per_second"].null_count() == index["duration_seconds"].null_count() == index.height
    assert dict(index["group_id"].value_counts().iter_rows())["parts of real/a"] == 2
    assert index["group_id"].n_unique() == 3
    assert made.rejected.is_empty()
    assert any(note.startswith("2 videos are parts of") for note in made.report.notes)
    named = named_in_tar(tmp_path / "tar", files)
    of_tar = index_of(named, tmp_path / "two").index
    same = ["video_id", "num_frames", "size_bytes", "width", "perceptual_hash"]
    assert of_tar.select(same).equals(index.select(same))
    assert index_of(named, tmp_path / "two").index.equals(of_tar)


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


def test_a_manifest_names_images_in_a_tar(tmp_path):
    write_tar(tmp_path / "0.tar", {"a.png": picture("a.png")})
    manifest = text(tmp_path, "m.csv", ["path,label", "0.tar/a.png,x", "0.tar/gone.png,y"])
    _, _, listing = list_images(manifest)
    assert [image.path for image in listing.images] == ["0.tar/a.png"]
    assert listing.rejections.frame()["reason"].to_list() == ["missing_image"]
    assert decode_image(tmp_path / "0.tar/a.png").shape == (16, 24, 3)
