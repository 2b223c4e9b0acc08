"""Decoded frames, of ordinary, odd, damaged and real files: each is the one its index says, or there is an error."""

import csv
import itertools
import math
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from av.stream import Disposition
from hypothesis import given, strategies as st

from fvc_lib.video.decode.clip import decode_clip, uniform_places
from fvc_lib.video.decode.pixels import FrameSink
from fvc_lib.video.decode.probe import probe_video
from fvc_lib.video.decode.source import CorruptVideo, NoVideoStream, TruncatedVideo
from fvc_lib.video.features.family import sample_video
from tests.video.conftest import full_decode, numbered_frame, read_number

# name, encoder options: what makes finding a frame hard
CASES = {
    "b_frames.mp4": {"options": {"bf": "3", "b_strategy": "0"}},
    "open_gop.mp4": {"options": {"bf": "3", "x264-params": "open-gop=1:b-adapt=0"}},
    "one_gop.mp4": {"gop": 100},
    "fragmented.mp4": {"container_options": {"movflags": "frag_keyframe+empty_moov"}, "options": {"bf": "2"}},
    "b_frames.mkv": {"options": {"bf": "2"}},
    "b_frames.ts": {"options": {"bf": "2"}},
    "open_gop.ts": {"options": {"bf": "3", "x264-params": "open-gop=1:b-adapt=0"}},
    "flash.flv": {"options": {"bf": "2"}},
    "odd.mp4": {"width": 63, "height": 47, "pixel_format": "yuv444p", "codec": "libx264"},
    "ten_bit.mp4": {"pixel_format": "yuv420p10le"},
    "old.avi": {"codec": "mpeg4"},
    "b_frames.avi": {"options": {"bf": "2", "b_strategy": "0"}},
    "mpeg4_b.avi": {"codec": "mpeg4", "options": {"bf": "2"}},
    "mpeg4_b.mp4": {"codec": "mpeg4", "options": {"bf": "2"}},
    "mpeg2.mpg": {"codec": "mpeg2video", "options": {"bf": "2"}},
    "mpeg2.ts": {"codec": "mpeg2video", "options": {"bf": "2"}},
    "stills.mov": {"codec": "mjpeg", "pixel_format": "yuvj420p"},
    "vp8.webm": {"codec": "libvpx", "options": {"auto-alt-ref": "1", "lag-in-frames": "16"}},
    "vp9.webm": {"codec": "libvpx-vp9", "options": {"auto-alt-ref": "1", "lag-in-frames": "16", "cpu-used": "8"}},
    "raw.h264": {"container": "h264", "options": {"bf": "2"}},
    "animation.gif": {"codec": "gif", "pixel_format": "gray"},
    "variable.mp4": {"times_ms": [number * number * 7 for number in range(20)], "options": {"bf": "2"}},
    "variable.mkv": {"times_ms": [number * number * 7 for number in range(20)]},
    "hevc.mp4": {"codec": "libx265", "options": {"x265-params": "log-level=none:bframes=3:open-gop=0"}},
    "hevc_open_gop.mkv": {"codec": "libx265", "options": {"x265-params": "log-level=none:bframes=3:open-gop=1"}},
    "hevc_ten_bit.ts": {
        "codec": "libx265",
        "pixel_format": "yuv420p10le",
        "options": {"x265-params": "log-level=none:bframes=3"},
    },
    "av1.mp4": {"codec": "libsvtav1", "options": {"preset": "12", "svtav1-params": "hierarchical-levels=3"}},
    "av1.mkv": {"codec": "libsvtav1", "options": {"preset": "12", "svtav1-params": "hierarchical-levels=3"}},
    "interlaced.mp4": {"options": {"bf": "2", "x264-params": "tff=1"}},
    "interlaced.ts": {"codec": "mpeg2video", "options": {"bf": "2", "flags": "+ildct+ilme"}},
    "alpha.webm": {"codec": "libvpx-vp9", "pixel_format": "yuva420p", "options": {"cpu-used": "8"}},
    "alpha.mov": {"codec": "prores_ks", "pixel_format": "yuva444p10le"},
    "full_range.mp4": {"pixel_format": "yuvj420p"},
    "rgb.mkv": {"codec": "ffv1", "pixel_format": "bgr0"},
    "live.mkv": {"container_options": {"live": "1"}, "options": {"bf": "2"}},  # neither duration nor index
    "pictures.apng": {"codec": "apng", "pixel_format": "rgb24", "container": "apng"},
    "media.wmv": {"codec": "wmv2", "container": "asf"},
    "late.mp4": {"times_ms": [5000 + 40 * number for number in range(20)], "options": {"bf": "2"}},
}


@pytest.mark.parametrize("name", CASES)
def test_every_frame_is_the_one_its_index_says(make_video, name):
    path = make_video(name, **CASES[name])
    for num_frames in (1, 2, 5, 20):
        clip = decode_clip(path, num_frames)
        expected = np.round(np.linspace(0, 19, num_frames)).astype(int).tolist()
        assert clip.num_source_frames == 20
        assert clip.frame_indices.tolist() == expected
        assert [read_number(frame) for frame in clip.frames] == expected


def test_a_clip_is_described_with_its_types_and_times(make_video):
    path = make_video("variable.mkv", times_ms=[0, 10, 500, 510, 3000], num_frames=5)
    clip = decode_clip(path, 5, 32)
    assert (clip.frames.dtype, clip.frames.shape) == (np.uint8, (5, 3, 32, 32))
    assert clip.frame_indices.dtype == np.int64
    assert clip.pts_seconds.tolist() == pytest.approx([0, 0.01, 0.5, 0.51, 3])
    assert (clip.content.top, clip.content.height, clip.content.width) == (4, 24, 32)
    assert not clip.frames[:, :, :4].any()
    assert clip.frames[:, :, 4:28].min() > 0


def test_fewer_frames_than_asked_are_repeated(make_video):
    clip = decode_clip(make_video("short.mp4", 3), 7)
    assert clip.frame_indices.tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert [read_number(frame) for frame in clip.frames] == [0, 0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
@pytest.mark.parametrize("mirrored", [False, True])
def test_frames_stand_upright(make_video, degrees, mirrored):
    picture = np.full((48, 64, 3), 40, np.uint8)
    picture[:24, :32] = 220  # bright upper left quarter
    path = make_video("turned.mp4", 2, frames=[picture, picture], display=(-degrees, mirrored))
    # The container turns first and mirrors after.
    upright = np.rot90(picture, -degrees // 90)[:, :: -1 if mirrored else 1]
    for size in (None, 32):
        clip = decode_clip(path, 1, size)
        shown = clip.content.cut(clip.frames[0])
        assert shown.shape[1] / shown.shape[2] == pytest.approx(upright.shape[0] / upright.shape[1], rel=0.05)
        for y, x in itertools.product((0.25, 0.75), (0.25, 0.75)):
            wanted = upright[int(y * upright.shape[0]), int(x * upright.shape[1]), 0]
            assert abs(int(shown[0, int(y * shown.shape[1]), int(x * shown.shape[2])]) - wanted) < 15


def test_pixels_that_are_not_square_are_letterboxed_as_displayed(make_video):
    path = make_video("wide.mp4", 2, sample_aspect_ratio=Fraction(3, 2))
    clip = decode_clip(path, 1, 96)  # 64 x 48 pixels shown as 96 x 48
    assert (clip.content.width, clip.content.height, clip.content.top) == (96, 48, 24)
    assert decode_clip(path, 1).frames.shape == (1, 3, 48, 64)


@pytest.mark.parametrize("arguments", [{"num_frames": 0}, {"num_frames": 1, "size": 0}])
def test_senseless_arguments_are_named(tmp_path, arguments):
    with pytest.raises(ValueError, match=r"got"):
        decode_clip(tmp_path / "never_opened.mp4", **arguments)


@given(st.integers(1, 500), st.integers(1, 40))
def test_places_are_spread_from_the_first_to_the_last(num_source_frames, num_frames):
    places = uniform_places(num_source_frames, num_frames)
    assert len(places) == num_frames
    assert places[0] == 0
    assert (np.diff(places) >= 0).all()
    if num_frames > 1:
        assert places[-1] == num_source_frames - 1
        ideal = [Fraction(k * (num_source_frames - 1), num_frames - 1) for k in range(num_frames)]
        half = Fraction(1, 2) + Fraction(1, 10**9)
        assert all(abs(int(place) - exact) <= half for place, exact in zip(places, ideal, strict=True))


@pytest.mark.parametrize("codec", ["libx264", "libx265", "mpeg4"])
def test_frames_that_nothing_refers_to_are_not_decoded(make_video, monkeypatch, codec):
    options = {"bf": "3", "b_strategy": "0", "x264-params": "b-pyramid=none"}
    if codec == "libx265":
        options = {"x265-params": "log-level=none:bframes=3:b-adapt=0:b-pyramid=0"}
    path = make_video("b.mp4", 60, codec=codec, gop=60, options=options)
    decoded, offer = [], FrameSink.offer
    monkeypatch.setattr(FrameSink, "offer", lambda *arguments: decoded.append(arguments) or offer(*arguments))
    decode_clip(path, 2)
    assert 2 <= len(decoded) <= 60 // 3 + 4


def still_scene():
    """Return 30 pictures of one scene, so that an encoder predicts each from the one before it."""
    scene = np.random.default_rng(0).integers(60, 200, (48, 64, 3), np.uint8)
    return [np.concatenate([scene[:40], np.full((8, 64, 3), 5 * number, np.uint8)]) for number in range(30)]


def write_without_first_packets(whole, late):
    """Write the video ``whole`` without its first four packets to ``late``, as a recording that began later."""
    with av.open(str(whole)) as given, av.open(str(late), "w") as output:
        stream = output.add_stream_from_template(given.streams.video[0])
        for packet in [packet for packet in given.demux(video=0) if packet.size][4:]:
            packet.stream = stream
            output.mux(packet)


@pytest.mark.parametrize(
    ("codec", "suffix"),
    [("mpeg4", "mkv"), ("flv", "flv"), ("msmpeg4", "mkv"), ("wmv2", "asf"), ("mpeg2video", "mkv"), ("libx264", "mkv")],
)
def test_a_recording_that_begins_between_keyframes_gives_no_frame_made_from_nothing(
    make_video, tmp_path, codec, suffix
):
    options = {"bf": "0", "sc_threshold": "0"} if codec == "libx264" else {}
    container = "asf" if suffix == "asf" else None
    whole = make_video(
        f"whole.{suffix}", 30, codec=codec, gop=10, frames=still_scene(), options=options, container=container
    )
    late = tmp_path / f"late.{suffix}"
    write_without_first_packets(whole, late)
    clip = decode_clip(late, 20)
    assert clip.num_source_frames == 20
    np.testing.assert_array_equal(clip.frames, decode_clip(whole, 30).frames[10:])


@pytest.mark.parametrize("codec", ["msmpeg4", "flv", "mpeg4", "libx264"])
def test_a_recording_without_a_keyframe_is_refused(make_video, tmp_path, codec):
    """In an AVI file ffmpeg calls the first packet of some codecs a keyframe, whatever it is."""
    options = {"bf": "0", "sc_threshold": "0"} if codec == "libx264" else {}
    whole = make_video("whole.avi", 30, codec=codec, gop=100, frames=still_scene(), options=options)
    late = tmp_path / "late.avi"
    write_without_first_packets(whole, late)
    with pytest.raises(CorruptVideo, match="0 decode"):
        decode_clip(late, 20)


@pytest.mark.parametrize("codec", ["msmpeg4", "wmv2", "flv", "mpeg4", "libx264"])
def test_packets_wrongly_called_keyframes_are_found_out(make_video, codec):
    """An AVI file without its index, which is optional: ffmpeg then calls every packet of some codecs a keyframe."""
    options = {"bf": "0"} if codec == "libx264" else {}
    path = make_video("whole.avi", 30, codec=codec, gop=10, options=options)
    whole = decode_clip(path, 30).frames
    content = path.read_bytes()
    content = content[: content.rindex(b"idx1")]
    path.write_bytes(content[:4] + (len(content) - 8).to_bytes(4, "little") + content[8:])
    clip = decode_clip(path, 7)
    assert clip.num_source_frames == 30
    np.testing.assert_array_equal(clip.frames, whole[clip.frame_indices])


def test_transport_streams_that_were_joined_are_one_whole_video(make_video, tmp_path):
    joined = tmp_path / "joined.ts"
    with joined.open("wb") as stream:
        for first in (0, 25, 50):
            times = [40 * number for number in range(first, first + 25)]
            frames = [numbered_frame(number, 64, 48) for number in range(first, first + 25)]
            part = make_video("part.ts", 25, times_ms=times, frames=frames, options={"bf": "2"})
            stream.write(part.read_bytes())
    with av.open(str(joined)) as container:
        assert any(packet.is_corrupt for packet in container.demux(video=0))  # what the counters make of a join
    assert [read_number(frame) for frame in decode_clip(joined, 75).frames] == list(range(75))


def test_frames_with_one_time_keep_the_clock_of_the_others(make_video):
    times = [40 * number for number in range(10)] + [1000 * number for number in range(1, 11)]
    times[5] = times[4]
    path = make_video("tie.mkv", 20, codec="ffv1", times_ms=times)
    clip = decode_clip(path, 20)
    assert [read_number(frame) for frame in clip.frames] == list(range(20))
    assert clip.pts_seconds.tolist() == [time / 1000 for time in times]


@pytest.mark.parametrize(
    ("name", "codec", "num_bytes"),
    [("a.flv", "flv", 2000), ("a.ts", "libx264", 100), ("a.ts", "libx264", 10 * 188), ("a.ts", "mpeg2video", 188)],
)
def test_a_file_cut_within_its_last_packet_is_an_error(make_video, name, codec, num_bytes):
    noise = np.random.default_rng(0).integers(0, 255, (20, 48, 64, 3), np.uint8)
    path = make_video(name, frames=list(noise), codec=codec)
    path.write_bytes(path.read_bytes()[:-num_bytes])
    with pytest.raises((TruncatedVideo, CorruptVideo)):
        decode_clip(path, 4)


FILM, SMALL_FILM, STILL, COVER, SOUND = "film", "small film", "still", "cover", "sound"
SIDES = {FILM: (96, 64), SMALL_FILM: (64, 48), STILL: (128, 96), COVER: (128, 96)}
NUM_FRAMES = {FILM: 24, SMALL_FILM: 30, STILL: 1, COVER: 1}


@pytest.mark.parametrize(
    ("name", "num_frames"),
    [
        ("spatial_video.mp4", 10),
        ("mjpeg_with_exif.avi", 12),
        ("exif_frame.png", 1),
        ("still_track_before_film.mp4", 24),
    ],
)
def test_files_that_once_failed_give_their_frames(shared_media, name, num_frames):
    path = shared_media / "odd" / name
    if not path.is_file():
        pytest.skip("needs the odd files beside the repository")
    assert probe_video(path).num_frames == num_frames
    assert decode_clip(path, num_frames).frame_indices.tolist() == list(range(num_frames))
    assert sample_video(path).stream.frame_types


def _write_tracks(path, kinds, still="mjpeg"):
    """A file of these tracks, in this order; the frames of each begin at another number."""
    with av.open(str(path), "w") as output:
        streams = []
        for kind in kinds:
            if kind == SOUND:
                streams.append(output.add_stream("aac", rate=16000, layout="mono"))
                continue
            stream = output.add_stream("libx264" if "film" in kind else still, rate=25)
            stream.width, stream.height = SIDES[kind]
            stream.pix_fmt = {"png": "rgb24", "mjpeg": "yuvj420p"}.get(stream.codec_context.name, "yuv420p")
            if kind == COVER:
                stream.disposition = Disposition.attached_pic
            streams.append(stream)
        for number in range(max(NUM_FRAMES.values())):
            for place, (kind, stream) in enumerate(zip(kinds, streams, strict=True)):
                if kind == SOUND:
                    frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
                    frame.sample_rate, frame.pts, frame.time_base = 16000, 1024 * number, Fraction(1, 16000)
                    output.mux(stream.encode(frame))
                elif number < NUM_FRAMES[kind]:
                    pixels = numbered_frame(40 * place + number, *SIDES[kind])
                    frame = av.VideoFrame.from_ndarray(pixels, format="gray").reformat(format=stream.pix_fmt)
                    output.mux(stream.encode(frame))
        for stream in streams:
            output.mux(stream.encode(None))
    return path


@pytest.mark.parametrize(
    ("suffix", "kinds", "still"),
    [
        ("mkv", (STILL, FILM), "mjpeg"),
        ("mov", (STILL, FILM), "png"),
        ("mp4", (STILL, STILL, FILM), "mjpeg"),
        ("mp4", (SOUND, STILL, FILM), "mjpeg"),
        ("mp4", (FILM, STILL), "mjpeg"),
        ("mp4", (COVER, FILM), "mjpeg"),
        ("mp4", (COVER, STILL, FILM, COVER), "mjpeg"),
        ("mp4", (STILL, SMALL_FILM, FILM), "mjpeg"),
        ("avi", (STILL, FILM), "mpeg4"),
        ("ts", (STILL, FILM), "libx264"),
        ("mkv", (FILM, STILL, STILL), "ffv1"),
        ("avi", (STILL, FILM, STILL), "mjpeg"),
        ("mkv", (STILL, FILM), "libx264"),
    ],
)
def test_the_film_is_read_wherever_it_stands(tmp_path, suffix, kinds, still):
    path = _write_tracks(tmp_path / f"tracks.{suffix}", kinds, still)
    first = 40 * kinds.index(FILM)
    assert probe_video(path).num_frames == 24
    for pictures in (decode_clip(path, 24).frames, decode_clip(path, 24, 96).frames[:, :, 16:80]):
        assert [read_number(frame) for frame in pictures] == list(range(first, first + 24))


def test_an_index_of_keyframes_alone_makes_no_film_a_still(tmp_path):
    path, noise = tmp_path / "two.mkv", np.random.default_rng(0)
    with av.open(str(path), "w") as output:
        streams = [output.add_stream("libx264", rate=25) for _ in range(2)]
        for stream, side, distance in zip(streams, (96, 64), (250, 3), strict=True):
            stream.width = stream.height = side
            stream.codec_context.gop_size = distance
        for _ in range(60):
            for stream in streams:
                pixels = noise.integers(0, 255, (stream.height, stream.width, 3), np.uint8)
                output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
        for stream in streams:
            output.mux(stream.encode(None))
    assert probe_video(path).width == 96


def test_of_stills_alone_one_is_read_and_a_cover_alone_is_no_video(tmp_path):
    assert probe_video(_write_tracks(tmp_path / "stills.mkv", (STILL, STILL))).num_frames == 1
    for suffix, kinds in (("mp4", (SOUND, COVER)), ("mp4", (COVER, SOUND, COVER))):
        path = _write_tracks(tmp_path / f"{len(kinds)}.{suffix}", kinds)
        with pytest.raises(NoVideoStream, match="cover"):
            probe_video(path)


QUICK_PIXELS = 10_000_000  # all frames together
SLOW, LONG = pytest.mark.slow, pytest.mark.long
HUGE_PIXELS = 140_000_000  # what is rare in such a file is its size


def _real_files(folder: str, pixels: range = range(1 << 40)) -> list[str]:
    """Files of the manifest that have that many pixels in all their frames together."""
    manifest = Path(__file__).resolve().parents[3] / "shared" / "media" / "manifest.csv"
    if not manifest.is_file():
        return ["absent"]
    with manifest.open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["path"].startswith(folder)]
    counts = {row["path"]: [row["width"], row["height"], row["n_frames"]] for row in rows}
    total = {path: math.prod(int(text) for text in texts if text.isdigit()) for path, texts in counts.items()}
    return [path for path, number in total.items() if number in pixels]


@pytest.mark.parametrize(
    "name",
    [
        *_real_files("decode/", range(QUICK_PIXELS)),
        *(pytest.param(name, marks=SLOW) for name in _real_files("decode/", range(QUICK_PIXELS, HUGE_PIXELS))),
        *(pytest.param(name, marks=LONG) for name in _real_files("decode/", range(HUGE_PIXELS, 1 << 40))),
    ],
)
def test_real_files_give_the_frames_of_a_full_decode(shared_media, name):
    frames = full_decode(shared_media / name, 24)
    clip = decode_clip(shared_media / name, 7, 24)
    assert clip.num_source_frames == len(frames)
    for place, pixels in zip(clip.frame_indices, clip.frames, strict=True):
        np.testing.assert_array_equal(pixels, frames[place])
