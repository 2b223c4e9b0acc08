import itertools
import os
import pickle
import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from fvc_lib.video.decode import source as source_module
from fvc_lib.video.decode.clip import decode_clip, probe_video
from fvc_lib.video.decode.source import (
    MAX_PIXELS,
    CorruptVideo,
    NoVideoStream,
    RefusedVideo,
    UnreadableVideo,
    UnsupportedVideo,
    open_video,
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
    "zeros": bytes(4096),
    "header_only": struct.pack(">I4s4sI4s", 20, b"ftyp", b"isom", 0, b"isom"),
}


@pytest.mark.parametrize("name", IMPOSTORS)
def test_what_is_no_video_is_unreadable(tmp_path, capfd, name):
    path = tmp_path / f"{name}.mp4"
    path.write_bytes(IMPOSTORS[name])
    for call in (probe_video, lambda p: decode_clip(p, 2)):
        with pytest.raises(UnreadableVideo) as caught:
            call(path)
        assert caught.value.reason == "unreadable"
        assert caught.value.path == path
        assert path.name in str(caught.value)
        assert caught.value.remedy in str(caught.value)
    assert capfd.readouterr().err == ""


def test_missing_folder_and_pipe_are_unreadable_and_do_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe.mp4")
    for name, said in (("missing.mp4", "no such file"), (".", "not a regular"), ("pipe.mp4", "not a regular")):
        with pytest.raises(UnreadableVideo, match=said):
            probe_video(tmp_path / name)
    with pytest.raises(UnreadableVideo):
        probe_video(tmp_path / "nul\0byte.mp4")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_read_permission_is_unreadable(make_video):
    path = make_video("a.mp4", 2)
    path.chmod(0)
    with pytest.raises(UnreadableVideo, match="permission denied"):
        probe_video(path)


def test_sound_alone_is_no_video(tmp_path):
    path = tmp_path / "sound.mp4"
    _write_sound(path)
    with pytest.raises(NoVideoStream, match="audio"):
        decode_clip(path, 2)


def test_a_cover_picture_is_no_video(tmp_path):
    path = tmp_path / "cover.mp3"
    _write_mp3_with_cover(path)
    with pytest.raises(NoVideoStream, match="its only picture is a cover"):
        decode_clip(path, 2)


def test_an_animated_webp_is_unsupported_and_a_still_one_decodes(tmp_path):
    pictures = [Image.new("RGB", (32, 24), colour) for colour in ("red", "green", "blue")]
    moving, still = tmp_path / "moving.webp", tmp_path / "still.webp"
    pictures[0].save(moving, save_all=True, append_images=pictures[1:], duration=40)
    pictures[0].save(still)
    with pytest.raises(UnsupportedVideo, match=r"animated WebP.*Convert it") as caught:
        decode_clip(moving, 2)
    assert caught.value.reason == "unsupported"
    assert decode_clip(still, 1).num_source_frames == 1


def test_a_format_that_is_not_read_is_called_so(tmp_path):
    path = tmp_path / "subtitles.mp4"
    path.write_text("1\n00:00:01,000 --> 00:00:02,000\nHello\n\n" * 10)
    with pytest.raises(UnreadableVideo, match="plain text"):
        decode_clip(path, 2)


def test_absurd_frame_sizes_are_refused_before_a_frame_is_made(make_video):
    path = make_video("huge.mov", 2, codec="mjpeg", pixel_format="yuvj420p")
    content = bytearray(path.read_bytes())
    entry = content.index(b"jpeg", content.index(b"stsd"))
    content[entry + 28 : entry + 32] = struct.pack(">HH", 15_000, 15_000)  # the sample description's width, height
    scan = -1
    while (scan := content.find(b"\xff\xc0", scan + 1)) >= 0:  # and each JPEG's own, in its start-of-frame marker
        content[scan + 5 : scan + 9] = struct.pack(">HH", 15_000, 15_000)
    path.write_bytes(content)
    for call in (probe_video, lambda p: decode_clip(p, 1, 32)):
        with pytest.raises(RefusedVideo, match=f"15000 x 15000 pixels, the limit is {MAX_PIXELS:,}"):
            call(path)


def test_protected_sample_entries_are_told_from_noise(make_video, tmp_path):
    """The boxes of ISO/IEC 14496-12, 8.12 in an otherwise playable file: the decoder itself would not complain."""
    content = make_video("a.mp4", 4, options={"bf": "0"}).read_bytes()
    path = tmp_path / "protected.mp4"
    path.write_bytes(_protect(content))
    with pytest.raises(UnreadableVideo, match="encrypted"):
        decode_clip(path, 2)


def test_the_container_is_closed_whatever_happens(make_video):
    path = make_video("a.mp4", 4)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="on purpose"), open_video(path):
            raise RuntimeError("on purpose")
        with open_video(path):
            pass
        with pytest.raises(ValueError, match="num_frames"):
            decode_clip(path, 0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def _write_sound(path):
    with av.open(str(path), "w") as output:
        stream = output.add_stream("aac", rate=16000, layout="mono")
        for number in range(8):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 16000, 1024 * number, Fraction(1, 16000)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))


def _write_mp3_with_cover(path):
    """ID3v2.3 (id3.org) with an APIC frame of a JPEG, then silent MPEG-1 layer III frames."""
    encoder = av.CodecContext.create("mjpeg", "w")
    encoder.width, encoder.height, encoder.pix_fmt, encoder.time_base = 16, 16, "yuvj420p", Fraction(1, 25)
    picture = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 99, np.uint8), format="rgb24").reformat(format="yuvj420p")
    picture.pts = 0
    jpeg = b"".join(bytes(packet) for packet in [*encoder.encode(picture), *encoder.encode(None)])
    body = b"\0image/jpeg\0\x03\0" + jpeg
    apic = b"APIC" + struct.pack(">IH", len(body), 0) + body
    size = len(apic)
    tag = b"ID3\x03\0\0" + bytes(size >> shift & 0x7F for shift in (21, 14, 7, 0)) + apic
    silent = b"\xff\xfb\x90\x64" + bytes(413)  # 128 kbit/s, 44.1 kHz
    path.write_bytes(tag + silent * 40)


def _protect(content):
    """Rename the sample entry ``avc1`` to ``encv`` and append a ``sinf`` box to it, growing every box around it."""
    entry = content.index(b"avc1", content.index(b"stsd")) - 4
    size = int.from_bytes(content[entry : entry + 4], "big")
    frma = struct.pack(">I4s4s", 12, b"frma", b"avc1")
    sinf = struct.pack(">I4s", 8 + len(frma), b"sinf") + frma
    grown = bytearray(
        content[: entry + 4] + b"encv" + content[entry + 8 : entry + size] + sinf + content[entry + size :]
    )
    for kind in (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd"):
        start = content.index(kind) - 4
        grown[start : start + 4] = struct.pack(">I", int.from_bytes(content[start : start + 4], "big") + len(sinf))
    grown[entry : entry + 4] = struct.pack(">I", size + len(sinf))
    return bytes(grown)


def _damage_frames(path):
    """Change eight bytes within two frames: decoders that guess put out all frames and no error."""
    with av.open(str(path)) as container:
        spans = [(packet.pos, packet.size) for packet in container.demux(container.streams.video[0]) if packet.size]
    content = bytearray(path.read_bytes())
    for start, size in (spans[3], spans[5]):
        place = start + size * 4 // 5
        content[place : place + 8] = bytes(byte ^ 0x55 for byte in content[place : place + 8])
    path.write_bytes(content)


def _count_decoded(path, *, refuse_damage):
    with open_video(path) as source:
        if refuse_damage:
            source.refuse_damage()
        return sum(len(packet.decode()) for packet in source.packets())


@pytest.mark.parametrize(
    ("name", "codec"), [("a.avi", "mpeg4"), ("a.mpg", "mpeg2video"), ("a.flv", "flv"), ("a.3gp", "h263")]
)
def test_damage_is_an_error_and_not_a_guess(make_video, monkeypatch, name, codec):
    path = make_video(name, 16, codec=codec, width=176, height=144, frames=textured_frames(16, 176, 144))
    assert _count_decoded(path, refuse_damage=False) == 16
    _damage_frames(path)
    with pytest.raises(CorruptVideo):
        decode_clip(path, 16)
    monkeypatch.setattr(source_module, "_GUESSING", frozenset())
    assert _count_decoded(path, refuse_damage=False) == 16  # so much for the decoder's own judgement


def test_damage_of_h264_is_refused_on_demand(make_video):
    path = make_video("a.mp4", 16, width=176, height=144, frames=textured_frames(16, 176, 144), options={"bf": "0"})
    assert _count_decoded(path, refuse_damage=True) == 16
    _damage_frames(path)
    assert _count_decoded(path, refuse_damage=False) == 16
    with pytest.raises(CorruptVideo):
        _count_decoded(path, refuse_damage=True)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts"])
def test_keyframes_that_begin_anew(make_video, name):
    """With closed groups of pictures all do; with open ones only the first, which is an IDR picture."""
    for options, expected in ({"bf": "2"}, {True}), ({"bf": "2", "x264-params": "open-gop=1"}, {True, False}):
        path = make_video(name, 33, frames=textured_frames(33, 64, 48), options=options | {"sc_threshold": "0"})
        with open_video(path) as source:
            keys = [source.begins_anew(bytes(packet)) for packet in source.packets() if packet.is_keyframe]
        assert len(keys) > 3
        assert keys[0]
        assert set(keys) == expected


def test_begins_anew_takes_any_bytes(make_video):
    for name in ("a.mp4", "a.ts"):
        with open_video(make_video(name, 4)) as source:
            for junk in (b"", b"\0", b"\0\0\1", b"\0\0\0\0", b"\xff" * 9, b"\0\0\0\2\x65"):
                assert source.begins_anew(junk) in (True, False)


def test_a_stream_that_begins_in_the_middle_is_passed_over(shared_media, tmp_path):
    """Found by ``make fuzz``: elements of a real FLV file swapped so that its demuxer meets a tag of another stream."""
    original = shared_media / "decode" / "ExoPlayer__8e5a05_sample-with-metadata.flv"
    content = original.read_bytes()
    step = len(content) // 16
    pieces = [content[start : start + step] for start in range(0, len(content), step)]
    for first, second in itertools.combinations(range(1, len(pieces)), 2):
        swapped = list(pieces)
        swapped[first], swapped[second] = swapped[second], swapped[first]
        path = tmp_path / "a.flv"
        path.write_bytes(b"".join(swapped))
        with open_video(path) as source:
            if _raises_index_error(source):
                break
    else:
        pytest.fail("no file in which a stream begins in the middle")
    with open_video(path) as source:
        assert sum(1 for packet in source.packets() if packet.size) > 300


def _raises_index_error(source):
    """What PyAV makes of a packet whose stream it does not know."""
    try:
        for _ in source.container.demux(source.stream):
            pass
    except IndexError:
        return True
    except av.error.FFmpegError:
        return False
    return False


def test_errors_survive_pickling():
    error = UnreadableVideo(Path("a.mp4"), "an empty file", "Fetch it.")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.remedy, copy.reason) == (str(error), "Fetch it.", "unreadable")
    assert "Re-encode" in RefusedVideo(Path("a.mp4"), "too large").remedy
