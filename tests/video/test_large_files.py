"""Files larger than the memory of a worker: their holes take no room on the disk and are not read into memory."""

import shutil
import tarfile
from dataclasses import asdict
from pathlib import Path

import pytest

from fvc_lib.services.isolated_workers import DEFAULT_MEMORY_BYTES, run_isolated
from fvc_lib.services.registry import PLAIN_VIEW
from fvc_lib.video.clips.making import DECODE_FUNCTION
from fvc_lib.video.clips.store import crop_code, decode_code
from fvc_lib.video.decode.clip import decode_clip

HOLE = DEFAULT_MEMORY_BYTES + (1 << 20)


def _box(kind: bytes) -> bytes:
    """The header of a box that holds ``HOLE`` bytes and states its size with 64 bits."""
    return (1).to_bytes(4, "big") + kind + (16 + HOLE).to_bytes(8, "big")


def _with_hole(source: Path, target: Path, place: int, header: bytes = b"") -> Path:
    """A copy of ``source`` with ``header`` and a hole of ``HOLE`` bytes from byte ``place`` on."""
    content = source.read_bytes()
    with target.open("wb") as file:
        file.write(content[:place] + header)
        file.seek(HOLE, 1)
        file.write(content[place:])
        file.truncate(len(content) + len(header) + HOLE)
    return target


def _index_last(make_video, tmp_path):
    video = make_video("small.mp4", 9)
    return video, _with_hole(video, tmp_path / "large.mp4", video.read_bytes().index(b"moov") - 4, _box(b"free"))


def _large_frames(make_video, tmp_path):
    """The hole is in the box ``mdat`` itself, whose header grows into the empty box that ffmpeg writes before it."""
    video = make_video("small.mov", 9)
    content = video.read_bytes()
    frames, index = content.index(b"mdat") - 4, content.index(b"moov") - 4
    assert content[frames - 4 : frames] in (b"free", b"wide")
    header = (1).to_bytes(4, "big") + b"mdat" + (index - frames + 8 + HOLE).to_bytes(8, "big")
    grown = tmp_path / "grown.mov"
    grown.write_bytes(content[: frames - 8] + header + content[frames + 8 :])
    return video, _with_hole(grown, tmp_path / "large.mov", index)


def _in_a_tar(make_video, tmp_path):
    video = make_video("small.mp4", 9)
    tar, padding, member = tmp_path / "large.tar", tarfile.TarInfo("a.bin"), tarfile.TarInfo("real/b.mp4")
    padding.size, member.size = HOLE, video.stat().st_size
    with tar.open("wb") as file:
        file.write(padding.tobuf(tarfile.GNU_FORMAT))
        file.seek(HOLE, 1)
        file.write(member.tobuf(tarfile.GNU_FORMAT))
        with video.open("rb") as frames:
            shutil.copyfileobj(frames, file)
        file.write(bytes(-member.size % 512 + 1024))
    return video, tar / "real/b.mp4"


@pytest.mark.parametrize("make_large", [_index_last, _large_frames, _in_a_tar])
def test_a_file_larger_than_the_memory_gives_the_frames_of_the_small_one(make_video, tmp_path, make_large):
    small, large = make_large(make_video, tmp_path)
    target = tmp_path / "clip"
    item = {
        "source": str(large), "target": str(target), "content_sha256": "", "num_frames": 6, "fixed_size": 32,
        "view": asdict(PLAIN_VIEW), "code": decode_code(PLAIN_VIEW), "crop": crop_code(PLAIN_VIEW), "recipe": "",
        "encoded": [], "seen": "",
    }  # fmt: skip
    (answer,) = run_isolated(DECODE_FUNCTION, [item], workers=1)
    assert (answer.failure, answer.value) == (None, {})
    assert decode_clip(small, 6, 32).frames.tobytes() in target.read_bytes()
