"""Videos in tars and in folders of pictures: the same results as unpacked files, and headers that lie cost nothing."""

import errno
import gzip
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fvc_lib.corpus.probing import file_state, probe_file
from fvc_lib.services.atomic_files import sha256_of_file
from fvc_lib.services.registry import View
from fvc_lib.video.decode.clip import decode_clip
from fvc_lib.video.decode.file_parts import contents_of, part_at, picture_names, sha256_of_video
from fvc_lib.video.decode.probe import probe_video
from fvc_lib.video.decode.source import CorruptVideo, UnreadableVideo, UnsupportedVideo, VideoError
from fvc_lib.video.decode.views import decode_view
from tests.kits.tars import write_tar


@pytest.fixture
def two(tmp_path, make_video):
    """Two videos, and a tar, with a comma and a colon in its name, that has both."""
    videos = [make_video(f"{length}.mp4", length) for length in (9, 14)]
    tar = write_tar(
        tmp_path / "a,b:c.tar", {"x/first one.mp4": videos[0], "note.txt": b"text", "second.mp4": videos[1]}
    )
    return videos, [tar / "x/first one.mp4", tar / "second.mp4"]


def test_a_video_in_a_tar_is_the_video(two):
    view = View("window:1", "crop")
    for video, member in zip(*two, strict=True):
        assert probe_file(str(member)) == probe_file(str(video))
        assert sha256_of_video(member) == sha256_of_file(video)
        (frames, seen), (of_file, seen_of_file) = decode_view(member, 3, 32, view), decode_view(video, 3, 32, view)
        np.testing.assert_array_equal(frames, of_file)
        assert seen == seen_of_file


def test_videos_of_many_kinds_and_broken_ones_give_the_same_from_a_tar(tmp_path, shared_media):
    every = [path for name in ("decode", "broken") for path in sorted((shared_media / name).iterdir())]
    chosen = [path for path in every if path.stat().st_size < 300_000][::9]
    tar = write_tar(tmp_path / "all.tar", {f"{number}{path.suffix}": path for number, path in enumerate(chosen)})
    assert len(chosen) > 3
    for number, path in enumerate(chosen):
        assert probe_file(str(tar / f"{number}{path.suffix}")) == probe_file(str(path)), path.name


def test_unusable_members_are_errors(tmp_path, two, make_video):
    (video, _), (member, _) = two
    tar = write_tar(
        tmp_path / "odd.tar", {"empty.mp4": b"", "page.mp4": b"<html>", "cut.mp4": video.read_bytes()[:900]}
    )
    for path in (*(tar / f"{name}.mp4" for name in ("empty", "page", "cut", "gone")), tmp_path / "no.tar/a.mp4"):
        with pytest.raises(UnreadableVideo):
            probe_video(path)
    assert file_state(member.parent / "gone.mp4") is None
    (tmp_path / "old.tar").mkdir()  # a folder called like a tar is a folder
    assert probe_video(make_video("old.tar/a.mp4", 8)).num_frames == 8


def test_a_changed_tar_is_read_again(tmp_path):
    tar = write_tar(tmp_path / "a.tar", {"one.mp4": b"1"})
    before = file_state(tar / "one.mp4")
    write_tar(tar, {"other.mp4": b"222", "one.mp4": b"33"})
    assert list(contents_of(tar).members) == ["other.mp4", "one.mp4"]
    assert part_at(tar / "one.mp4").read() == b"33"
    assert file_state(tar / "one.mp4") != before


def header(name: str, kind: bytes, size: int, *extra: tuple[int, bytes]) -> bytes:
    """One header block; ``extra`` are (place, bytes) to put into it. A size beyond octal digits is binary, as GNU's."""
    info = tarfile.TarInfo(name)
    info.type = kind
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"%011o\0" % size if 0 <= size < 8**11 else size.to_bytes(12, "big", signed=size < 0)
    block[124] |= 0x80 * (size >= 8**11)
    for place, content in extra:
        block[place : place + len(content)] = content
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


TIB = 1 << 40
# Headers that state more than there is, or that nobody needs.
LIES = {
    "a long name of a TiB": header("a", tarfile.GNUTYPE_LONGNAME, TIB),
    "a PAX header of a TiB": header("a", tarfile.XHDTYPE, TIB),
    "a PAX header for all of a TiB": header("a", tarfile.XGLTYPE, TIB),
    "an old map of holes without end": header("a.mp4", tarfile.GNUTYPE_SPARSE, 0, (482, b"\x01"))
    + (b"00000000001\0" * 42 + b"\x01" + bytes(7)) * 3000,
    **{f"a member of {size} bytes": header("1.mp4", tarfile.REGTYPE, size) for size in (TIB, 2**63, 2**87, -512)},
    "a chain of headers": header("a", tarfile.XHDTYPE, 0) * 2000 + header("a.mp4", tarfile.REGTYPE, 0),
}  # fmt: skip
FIRST = header("0.mp4", tarfile.REGTYPE, 3) + b"abc".ljust(512, b"\0")


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.fault(50)
def test_a_header_that_states_too_much_costs_its_tar_alone(tmp_path, lie):
    (tmp_path / "first.tar").write_bytes(LIES[lie] + bytes(1024))
    (tmp_path / "later.tar").write_bytes(FIRST + LIES[lie] + bytes(1024))
    tracemalloc.start()
    if not lie.startswith("a member"):
        with pytest.raises(OSError, match=r"first\.tar"):
            contents_of(tmp_path / "first.tar")
    found = contents_of(tmp_path / "later.tar")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert list(found.members) == ["0.mp4"]
    assert found.damage
    assert peak < 2 << 20


def test_links_holes_names_that_lead_out_and_names_that_are_there_twice_are_refused(tmp_path):
    empty = [("link.mp4", tarfile.SYMTYPE), ("hard.mp4", tarfile.LNKTYPE), ("pipe.mp4", tarfile.FIFOTYPE)]
    empty += [(name, tarfile.REGTYPE) for name in ("../up.mp4", "/etc/shadow", "a/../b.mp4", "a.mp4", "./a.mp4")]
    empty += [("holes.mp4", tarfile.GNUTYPE_SPARSE), ("e.mp4", tarfile.REGTYPE)]
    content = FIRST + b"".join(header(name, kind, 0) for name, kind in empty)
    (tmp_path / "a.tar").write_bytes(content + bytes(1024))
    found = contents_of(tmp_path / "a.tar").members
    assert len(found) == 7 + 3
    assert {name for name, part in found.items() if not isinstance(part, str)} == {"0.mp4", "e.mp4"}
    with pytest.raises(VideoError, match=r"a\.mp4"):
        probe_video(tmp_path / "a.tar" / "a.mp4")


def test_a_tar_that_is_compressed_or_none_is_refused_whole(tmp_path):
    for name, content in {"text": b"no tar at all" * 99, "empty": b"", "gzip": gzip.compress(FIRST)}.items():
        path = tmp_path / f"{name}.tar"
        path.write_bytes(content)
        with pytest.raises(OSError, match=name) as caught:
            contents_of(path)
        assert caught.value.errno == errno.EBADMSG, name


def test_what_lies_whole_before_a_cut_or_a_damaged_header_is_found(tmp_path):
    path = write_tar(tmp_path / "a.tar", {f"{number}.mp4": bytes([number]) * 5000 for number in range(4)})
    assert (contents_of(path).damage, contents_of(path).last) == ("", "3.mp4")
    whole = path.read_bytes()
    start = whole.index(b"2.mp4")
    damaged = whole[: start + 3] + b"\xff" + whole[start + 4 :]
    bad = {"content": whole[: start + 600], "header": whole[: start + 200], "end": whole[:start], "damaged": damaged}
    for name, content in bad.items():
        path = tmp_path / f"{name}.tar"
        path.write_bytes(content)
        found = contents_of(path)
        assert (list(found.members), bool(found.damage)) == (["0.mp4", "1.mp4"], True), name
        assert found.last == ("2.mp4" if name == "content" else "1.mp4"), name
        assert part_at(path / "0.mp4").read() == bytes(5000)


# Folders of pictures


def picture(number: int, width: int = 48, height: int = 40) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


def write(folder: Path, numbers: range, suffix: str = "png", prefix: str = "") -> Path:
    folder.mkdir(parents=True)
    for number in numbers:
        Image.fromarray(picture(number)).save(folder / f"{prefix}{number}.{suffix}")
    return folder


def test_pictures_are_frames_in_the_order_of_their_numbers_also_in_a_tar(tmp_path):
    folder = write(tmp_path / "sequence", range(8, 13))
    (folder / ".DS_Store").write_bytes(b"x")
    (folder / "notes.txt").write_text("no picture")
    names = ["8.png", "9.png", "10.png", "11.png", "12.png"]
    tar = write_tar(tmp_path / "a.tar", {f"x/{name}": folder / name for name in names})
    pictures = np.stack([picture(number).transpose(2, 0, 1) for number in range(8, 13)])
    for path in (folder, tar / "x"):
        assert picture_names(path) == names
        np.testing.assert_array_equal(decode_clip(path, 5).frames, pictures)
        windows, (seen,) = decode_view(path, 2, 40, View(sampling="window:2", fit="crop"))
        np.testing.assert_array_equal(windows[1], pictures[3, :, :, 4:44])
        assert (seen.first_frame, seen.last_frame) == (1, 3)
        probe = probe_video(path)
        assert (probe.num_frames, probe.width, probe.height) == (5, 48, 40)
        assert probe.frames_per_second is probe.duration_seconds is probe.bits_per_second is None
        assert probe.size_bytes == sum((folder / name).stat().st_size for name in names)
    assert sha256_of_video(folder) == sha256_of_video(tar / "x")


def test_the_content_is_that_of_the_pictures_in_their_order_whatever_they_are_called(tmp_path):
    one, other = write(tmp_path / "one", range(3)), write(tmp_path / "other", range(3), prefix="frame_")
    assert sha256_of_video(one) == sha256_of_video(other)
    (other / "frame_2.png").rename(other / "frame_0b.png")  # the third becomes the second
    assert sha256_of_video(one) != sha256_of_video(other)


@pytest.mark.parametrize("name", ["png cut", "png bit", "png zeros", "png empty", "jpg cut", "jpg zeros", "jpg empty"])
def test_a_damaged_picture_costs_its_sequence(tmp_path, name):
    suffix, damage = name.split()
    folder = write(tmp_path / "sequence", range(4), suffix)
    path = folder / f"2.{suffix}"
    content = path.read_bytes()
    damaged = {
        "cut": content[:-30],
        "bit": content[:900] + bytes([content[900] ^ 1]) + content[901:],  # a JPEG has no checksum
        "zeros": content[:900] + bytes(len(content) - 900),
        "empty": b"",
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(CorruptVideo):
        decode_clip(folder, 4)


def test_folders_that_are_no_sequence_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnreadableVideo):
        probe_video(tmp_path / "empty")
    mixed = write(tmp_path / "mixed", range(2))
    Image.fromarray(picture(2)).save(mixed / "2.jpg")
    with pytest.raises(UnsupportedVideo):
        probe_video(mixed)
