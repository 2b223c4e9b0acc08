"""Opening files that are videos, that are not, or that are damaged: facts about them, or an error of one family."""

import csv
import os
import pickle
import re
import struct

import av
import pytest
from PIL import Image

from fvc_lib.video.decode.clip import decode_clip
from fvc_lib.video.decode.probe import probe_video
from fvc_lib.video.decode.source import (
    CorruptVideo,
    RefusedVideo,
    UnreadableVideo,
    UnsupportedVideo,
    VideoError,
)
from tests.video.mutations import textured_frames

IMPOSTORS = {
    "empty": b"",
    "two_bytes": b"\n\n",
    "html": b"<!DOCTYPE html><html><body>Not found</body></html>" * 40,
    "lfs_pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12345\n",
    "text": b"I renamed my notes to .mp4\n" * 200,
    "playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nhttp://127.0.0.1:1/a.ts\n#EXT-X-ENDLIST\n",
    "concat": b"ffconcat version 1.0\nfile /etc/hostname\n",
    "subtitles": b"1\n00:00:01,000 --> 00:00:02,000\nHello\n\n" * 10,
    "zeros": bytes(4096),
    "header_only": struct.pack(">I4s4sI4s", 20, b"ftyp", b"isom", 0, b"isom"),
    **{  # boxes whose sizes make no sense
        f"box_of_{size}": struct.pack(">I8sI", 16, b"ftypisom", 0)
        + (struct.pack(">I4sQ", 1, b"free", size) if size > 7 else struct.pack(">I4s", size, b"free")) + bytes(99)
        for size in (0, 1, 7, 1 << 62)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSTORS)
def test_files_that_are_no_videos_are_unreadable(tmp_path, capfd, name):
    path = tmp_path / f"{name}.mp4"
    path.write_bytes(IMPOSTORS[name])
    for call in (probe_video, lambda p: decode_clip(p, 2)):
        with pytest.raises(UnreadableVideo) as caught:
            call(path)
        assert (caught.value.reason, caught.value.path) == ("unreadable", path)
        assert path.name in str(caught.value)
        assert caught.value.remedy in str(caught.value)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert capfd.readouterr().err == ""


def test_missing_folder_and_pipe_are_unreadable_and_do_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe.mp4")
    for name in ("missing.mp4", ".", "pipe.mp4", "nul\0byte.mp4"):
        with pytest.raises(UnreadableVideo):
            probe_video(tmp_path / name)


def test_absurd_frame_sizes_are_refused_before_a_frame_is_made(make_video):
    path = make_video("huge.mov", 2, codec="mjpeg", pixel_format="yuvj420p")
    content, absurd = path.read_bytes(), struct.pack(">HH", 15_000, 15_000)
    entry = content.index(b"jpeg", content.index(b"stsd")) + 28  # the sample description's width, height
    content = content[:entry] + absurd + content[entry + 4 :]
    # And each JPEG's, behind five bytes of its start-of-frame marker.
    path.write_bytes(re.sub(rb"(\xff\xc0...)....", rb"\1" + absurd, content, flags=re.DOTALL))
    for call in (probe_video, lambda p: decode_clip(p, 1, 32)):
        with pytest.raises(RefusedVideo, match="15000 x 15000"):
            call(path)


def test_an_animated_webp_is_never_taken_for_a_still(tmp_path):
    pictures = [Image.new("RGB", (32, 24), colour) for colour in ("red", "green", "blue")]
    moving, still = tmp_path / "moving.webp", tmp_path / "still.webp"
    pictures[0].save(moving, save_all=True, append_images=pictures[1:], duration=40)
    pictures[0].save(still)
    with pytest.raises((UnsupportedVideo, CorruptVideo)):
        decode_clip(moving, 2)
    assert decode_clip(still, 1).num_source_frames == 1


@pytest.mark.parametrize(
    ("name", "codec"),
    [("a.avi", "mpeg4"), ("a.mpg", "mpeg2video"), ("a.flv", "flv"), ("a.3gp", "h263"), ("a.mp4", "libx264")],
)
def test_damage_is_an_error_where_decoders_would_guess(make_video, name, codec):
    frames = textured_frames(16, 176, 144)
    path = make_video(name, 16, codec=codec, width=176, height=144, frames=frames, options={"bf": "0"})
    # Change eight bytes within two frames: decoders that guess put out all frames and no error.
    with av.open(str(path)) as container:
        spans = [(packet.pos, packet.size) for packet in container.demux(container.streams.video[0]) if packet.size]
    content = bytearray(path.read_bytes())
    for start, size in (spans[3], spans[5]):
        place = start + size * 4 // 5
        content[place : place + 8] = bytes(byte ^ 0x55 for byte in content[place : place + 8])
    path.write_bytes(content)
    with av.open(str(path)) as container:
        assert sum(1 for _ in container.decode(video=0)) == 16
    with pytest.raises(CorruptVideo):
        decode_clip(path, 16)


# Facts about videos


def test_a_plain_video_is_described_whether_its_path_is_text_or_not(make_video):
    path = make_video("a.mp4", 20, options={"bf": "2"})
    probe = probe_video(path)
    assert probe == probe_video(str(path))
    assert (probe.codec, probe.container, probe.pixel_format) == ("h264", "mov", "yuv420p")
    assert (probe.width, probe.height, probe.num_frames, probe.has_audio) == (64, 48, 20, False)
    assert (probe.size_bytes, probe.frames_per_second) == (path.stat().st_size, pytest.approx(25))
    assert (probe.duration_seconds, probe.bits_per_second) == pytest.approx((0.8, 8 * probe.size_bytes / 0.8))


def test_real_files_are_described_as_a_full_decode_describes_them(shared_media):
    with (shared_media / "manifest.csv").open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["path"].startswith("decode/")]
    rotations = {"-90": 90, "90": 270, "-180": 180, "0": 0}
    for row in rows:
        probe = probe_video(shared_media / row["path"])
        facts = {"n_frames": probe.num_frames, "codec": probe.codec, "width": probe.width, "height": probe.height}
        wanted = {name: row[name] for name in facts if row[name] and (name != "n_frames" or row[name].isdigit())}
        assert {name: str(facts[name]) for name in wanted} == wanted, row["path"]
        assert rotations.get(row["rotation"], probe.rotation_degrees) == probe.rotation_degrees, row["path"]


def test_broken_files_give_a_documented_error_or_frames(shared_media, capfd):
    reasons = set()
    for path in sorted((shared_media / "broken").iterdir()):
        try:
            assert probe_video(path).num_frames > 0
            assert decode_clip(path, 4, 32).frames.any()
        except VideoError as error:
            reasons.add(error.reason if error.path == path else "another file")
    assert reasons == {"unreadable", "no_video", "truncated", "corrupt"}
    assert capfd.readouterr().err == ""
