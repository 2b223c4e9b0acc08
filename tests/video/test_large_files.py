"""Files larger than the memory of a worker: their holes take no room on the disk and are not read into memory."""

import tarfile
from dataclasses import asdict

import pytest

from fvc_lib.services.isolated_workers import DEFAULT_MEMORY_BYTES, run_isolated
from fvc_lib.services.registry import PLAIN_VIEW
from fvc_lib.video.clips.making import DECODE_FUNCTION
from fvc_lib.video.clips.store import crop_code, decode_code
from fvc_lib.video.decode.clip import decode_clip

HOLE = DEFAULT_MEMORY_BYTES + (1 << 20)


def _large_frames(video, tmp_path):
    """The hole is in the box ``mdat`` itself, whose header grows into the empty box that ffmpeg writes before it."""
    content, large = video.read_bytes(), tmp_path / "large.mov"
    frames, index = content.index(b"mdat") - 4, content.index(b"moov") - 4
    assert content[frames - 4 : frames] in (b"free", b"wide")
    header = (1).to_bytes(4, "big") + b"mdat" + (index - frames + 8 + HOLE).to_bytes(8, "big")
    with large.open("wb") as file:
        file.write(content[: frames - 8] + header + content[frames + 8 : index])
        file.seek(HOLE, 1)
        file.write(content[index:])
    return large


def _in_a_tar(video, tmp_path):
    tar, padding, member = tmp_path / "large.tar", tarfile.TarInfo("a.bin"), tarfile.TarInfo("real/b.mov")
    padding.size, member.size = HOLE, video.stat().st_size
    with tar.open("wb") as file:
        file.write(padding.tobuf(tarfile.GNU_FORMAT))
        file.seek(HOLE, 1)
        file.write(member.tobuf(tarfile.GNU_FORMAT) + video.read_bytes() + bytes(-member.size % 512 + 1024))
    return tar / "real/b.mov"


@pytest.mark.parametrize("make_large", [_large_frames, _in_a_tar])
def test_a_file_larger_than_the_memory_gives_the_frames_of_the_small_one(make_video, tmp_path, make_large):
    small = make_video("small.mov", 9)
    large = make_large(small, tmp_path)
    target = tmp_path / "clip"
    item = {
        "source": str(large), "target": str(target), "content_sha256": "", "num_frames": 6, "fixed_size": 32,
        "view": asdict(PLAIN_VIEW), "code": decode_code(PLAIN_VIEW), "crop": crop_code(PLAIN_VIEW), "recipe": "",
        "encoded": [], "seen": "",
    }  # fmt: skip
    (answer,) = run_isolated(DECODE_FUNCTION, [item], workers=1)
    assert (answer.failure, answer.value) == (None, {})
    assert decode_clip(small, 6, 32).frames.tobytes() in target.read_bytes()
