"""Videos in tar files: read where they lie, with the results of the same files unpacked."""

import errno
import io
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from fvc_lib.corpus.probing import file_state, probe_file
from fvc_lib.services.atomic_files import sha256_of_file
from fvc_lib.services.clip_settings import View
from fvc_lib.video.decode.clip import decode_clip, probe_video
from fvc_lib.video.decode.source import UnreadableVideo, VideoError, sha256_of_video, size_of_video
from fvc_lib.video.decode.tar_members import contents_of, member_at
from fvc_lib.video.decode.views import decode_view
from fvc_lib.video.decode.windows import decode_windows


def packed(tar: Path, files: dict[str, Path | bytes]) -> Path:
    with tarfile.open(tar, "w") as archive:
        for name, source in files.items():
            content = source if isinstance(source, bytes) else source.read_bytes()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return tar


@pytest.fixture
def two(tmp_path, make_video):
    """Two videos, and a tar, with a comma and a colon in its name, that has both."""
    videos = [make_video(f"{length}.mp4", length) for length in (9, 14)]
    tar = packed(tmp_path / "a,b:c.tar", {"x/first one.mp4": videos[0], "note.txt": b"text", "second.mp4": videos[1]})
    return videos, [tar / "x/first one.mp4", tar / "second.mp4"]


def test_a_video_in_a_tar_is_the_video(two):
    for video, member in zip(*two, strict=True):
        assert probe_video(member) == probe_video(video)
        np.testing.assert_array_equal(decode_clip(member, 4, 32).frames, decode_clip(video, 4, 32).frames)
        assert sha256_of_video(member) == sha256_of_file(video)
        assert size_of_video(member) == video.stat().st_size
        assert probe_file(str(member)) == probe_file(str(video))


def test_windows_and_views_of_a_video_in_a_tar_are_those_of_the_video(two):
    view = View("window:1", "crop")
    for video, member in zip(*two, strict=True):
        (frames, seen), (wanted, its_seen) = decode_view(member, 3, 32, view), decode_view(video, 3, 32, view)
        np.testing.assert_array_equal(frames, wanted)
        assert seen == its_seen
        found: list[dict[int, list[int]]] = [{}, {}]
        for path, into in ((member, found[0]), (video, found[1])):
            decode_windows(path, 3, 32, view, lambda number, frame, into=into: into.update({number: frame.tolist()}))
        assert found[0] == found[1]
        assert found[0]


def test_videos_of_many_kinds_and_broken_ones_are_told_alike_from_a_tar(tmp_path, shared_media):
    every = [path for name in ("decode", "broken") for path in sorted((shared_media / name).rglob("*"))]
    chosen = [path for path in every if path.is_file() and path.stat().st_size < 300_000][::3]
    tar = packed(tmp_path / "all.tar", {f"{number}{path.suffix}": path for number, path in enumerate(chosen)})
    assert len(chosen) > 10
    for number, path in enumerate(chosen):
        assert probe_file(str(tar / f"{number}{path.suffix}")) == probe_file(str(path)), path.name


def test_what_is_wrong_with_a_member_is_named(tmp_path, two):
    (video, _), (member, _) = two
    tar = packed(tmp_path / "odd.tar", {"empty.mp4": b"", "page.mp4": b"<html>", "cut.mp4": video.read_bytes()[:900]})
    for name, words in (("empty", "an empty file"), ("page", "a web page"), ("cut", "moov"), ("none", "no file")):
        with pytest.raises(VideoError, match=words):
            probe_video(tar / f"{name}.mp4")
    assert member_at(video) is None
    assert member_at(tmp_path / "missing.tar" / "a.mp4") is None
    with pytest.raises(UnreadableVideo):
        probe_video(tmp_path / "missing.tar" / "a.mp4")
    assert file_state(member.parent / "gone.mp4") is None


def test_a_folder_called_like_a_tar_is_a_folder(tmp_path, make_video):
    (tmp_path / "old.tar").mkdir()
    video = make_video("old.tar/a.mp4", 8)
    assert member_at(video) is None
    assert probe_video(video).num_frames == 8


def test_a_changed_tar_is_read_anew(tmp_path):
    tar = packed(tmp_path / "a.tar", {"one.mp4": b"1"})
    before = file_state(tar / "one.mp4")
    packed(tar, {"other.mp4": b"222", "one.mp4": b"33"})
    assert list(contents_of(tar).members) == ["other.mp4", "one.mp4"]
    member = member_at(tar / "one.mp4")
    assert member is not None
    assert member.read() == b"33"
    assert file_state(tar / "one.mp4") != before


def test_links_devices_and_names_that_lead_out_are_no_members(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, kind in (
            ("link.mp4", tarfile.SYMTYPE),
            ("hard.mp4", tarfile.LNKTYPE),
            ("pipe.mp4", tarfile.FIFOTYPE),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
        for name in ("../up.mp4", "/etc/shadow", "a/../b.mp4"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO(b""))
    found = contents_of(tmp_path / "a.tar").members
    assert len(found) == 6
    assert {isinstance(why, str) for why in found.values()} == {True}
    with pytest.raises(OSError, match=r"'link\.mp4' in the tar is a link"):
        member_at(tmp_path / "a.tar" / "link.mp4")


def header(name: str, kind: bytes, size: int, *extra: tuple[int, bytes]) -> bytes:
    """One header block; ``extra`` are (place, bytes) to put into it. A size beyond octal digits is binary, as GNU's."""
    info = tarfile.TarInfo(name)
    info.type = kind
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    for place, content in extra:
        block[place : place + len(content)] = content
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def records(**values: str) -> bytes:
    """The records of a PAX header, with dots for double underscores, filled up to whole blocks."""
    content = b""
    for name, value in values.items():
        rest = len(name.replace("__", ".")) + len(value) + 3
        length = next(number for number in range(rest, rest + 20) if rest + len(str(number)) == number)
        content += f"{length} {name.replace('__', '.')}={value}\n".encode()
    return content


def blocks(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


TIB = 1 << 40
SPARSE = records(GNU__sparse__major="1", GNU__sparse__minor="0", GNU__sparse__name="a.mp4", GNU__sparse__realsize="9")
LONG_MAP = records(GNU__sparse__map="1," * 500_001 + "1", GNU__sparse__size="1")
OLD_MAP = (b"00000000001\0" * 42) + b"\x01" + bytes(7)
# Headers that claim more than there is, or that nobody needs.
LIES = {
    "a long name of a TiB": header("a", tarfile.GNUTYPE_LONGNAME, TIB),
    "a long link of a TiB": header("a", tarfile.GNUTYPE_LONGLINK, TIB),
    "a PAX header of a TiB": header("a", tarfile.XHDTYPE, TIB),
    "a PAX header for all of a TiB": header("a", tarfile.XGLTYPE, TIB),
    "an old map of holes without end": header("a.mp4", tarfile.GNUTYPE_SPARSE, 0, (482, b"\x01")) + OLD_MAP * 3000,
    "a PAX map of a million holes": header("a", tarfile.XHDTYPE, len(LONG_MAP)) + blocks(LONG_MAP),
    "a map of a million holes before the content": (
        header("a", tarfile.XHDTYPE, len(SPARSE)) + blocks(SPARSE) + header("a.mp4", tarfile.REGTYPE, 2_000_008)
        + b"1000000\n" + b"1\n" * 1_000_000
    ),
    "digits for a parser to try": header("a", tarfile.XHDTYPE, 1 << 20) + b"1" * (1 << 20),
    "a chain of headers": header("a", tarfile.XHDTYPE, 0) * 2000 + header("a.mp4", tarfile.REGTYPE, 0),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_claims_more_than_there_is_costs_its_tar_alone(tmp_path, lie):
    first = header("0.mp4", tarfile.REGTYPE, 3) + blocks(b"abc")
    for name, before in (("first", b""), ("later", first)):
        (tmp_path / f"{name}.tar").write_bytes(before + LIES[lie] + bytes(1024))
    tracemalloc.start()
    with pytest.raises(OSError, match="a header of more than"):
        contents_of(tmp_path / "first.tar")
    found = contents_of(tmp_path / "later.tar")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert list(found.members) == ["0.mp4"]
    assert "a header of more than" in found.damage
    assert peak < 2 << 20


@pytest.mark.parametrize("size", [TIB, 2**63, 2**87])
def test_a_member_that_claims_more_than_there_is_ends_the_reading(tmp_path, size):
    first = header("0.mp4", tarfile.REGTYPE, 3) + blocks(b"abc")
    (tmp_path / "a.tar").write_bytes(first + header("1.mp4", tarfile.REGTYPE, size) + bytes(1024))
    found = contents_of(tmp_path / "a.tar")
    assert (list(found.members), found.last) == (["0.mp4"], "1.mp4")
    assert found.damage


def test_headers_for_all_members_do_not_pile_up(tmp_path):
    def one(number: int) -> bytes:
        note = records(**{f"note{number}": "x" * 20_000})
        return header("g", tarfile.XGLTYPE, len(note)) + blocks(note) + header(f"{number}.mp4", tarfile.REGTYPE, 0)

    (tmp_path / "a.tar").write_bytes(b"".join(map(one, range(500))) + bytes(1024))
    tracemalloc.start()
    assert len(contents_of(tmp_path / "a.tar").members) == 500
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20


def test_a_name_that_is_there_twice_and_a_file_with_holes_are_named_not_read(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("a.mp4", "b.mp4", "./a.mp4"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO(b""))
    content = header("c.mp4", tarfile.REGTYPE, 0)
    holes = records(GNU__sparse__map="0,1,900,1", GNU__sparse__size=str(TIB))
    content += header("x", tarfile.XHDTYPE, len(holes)) + blocks(holes) + header("d.mp4", tarfile.REGTYPE, 2)
    (tmp_path / "b.tar").write_bytes(content + blocks(b"ab") + header("e.mp4", tarfile.REGTYPE, 0) + bytes(1024))
    found = contents_of(tmp_path / "a.tar").members | contents_of(tmp_path / "b.tar").members
    assert {name: why if isinstance(why, str) else "" for name, why in found.items()} == {
        "a.mp4": "is there more than once", "b.mp4": "", "c.mp4": "", "d.mp4": "is stored with holes (tar --sparse)",
        "e.mp4": "",
    }  # fmt: skip
    with pytest.raises(VideoError, match=r"'a\.mp4' in the tar is there more than once"):
        probe_video(tmp_path / "a.tar" / "a.mp4")


def test_a_tar_that_is_compressed_or_none_is_refused_whole(tmp_path):
    with tarfile.open(tmp_path / "b.tar", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.mp4"), io.BytesIO(b""))
    bad = {"text": b"no tar at all" * 99, "empty": b"", "b": (tmp_path / "b.tar").read_bytes()}
    for name, content in bad.items():
        path = tmp_path / f"{name}.tar"
        path.write_bytes(content)
        with pytest.raises(OSError, match="is compressed" if name == "b" else "no readable tar file") as caught:
            contents_of(path)
        assert caught.value.errno == errno.EBADMSG, name


def test_what_lies_whole_before_a_cut_or_a_damaged_header_is_found(tmp_path):
    tar = packed(tmp_path / "a.tar", {f"{number}.mp4": bytes([number]) * 5000 for number in range(4)})
    assert (contents_of(tar).damage, contents_of(tar).last) == ("", "3.mp4")
    whole = tar.read_bytes()
    start = whole.index(b"2.mp4")
    damaged = whole[: start + 3] + b"\xff" + whole[start + 4 :]
    bad = {"content": whole[: start + 600], "header": whole[: start + 200], "end": whole[:start], "damaged": damaged}
    for name, content in bad.items():
        path = tmp_path / f"{name}.tar"
        path.write_bytes(content)
        found = contents_of(path)
        assert list(found.members) == ["0.mp4", "1.mp4"], name
        assert found.damage, name
        assert found.last == ("2.mp4" if name == "content" else "1.mp4"), name
        first = member_at(path / "0.mp4")
        assert first is not None
        assert first.read() == bytes(5000)


def test_a_header_whose_size_leads_back_ends_the_reading(tmp_path):
    tar = packed(tmp_path / "a.tar", {f"{number}.mp4": b"x" * 700 for number in range(3)})
    content = bytearray(tar.read_bytes())
    start = content.index(b"1.mp4")
    header = content[start : start + 512]
    header[124:136] = (-512).to_bytes(12, "big", signed=True)  # GNU's binary sizes
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    content[start : start + 512] = header
    tar.write_bytes(content)
    assert list(contents_of(tar).members) == ["0.mp4"]
    assert "negative size" in contents_of(tar).damage
