"""Files with several tracks, of which the film is read, and frames that carry data that nobody asked for."""

from fractions import Fraction

import av
import numpy as np
import pytest
from av.stream import Disposition
from PIL import Image

from fvc_lib.video.decode.clip import decode_clip
from fvc_lib.video.decode.probe import probe_video
from fvc_lib.video.decode.source import NoVideoStream
from fvc_lib.video.features.family import sample_video
from tests.video.conftest import numbered_frame, read_number

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
        ("nut", (FILM, STILL, STILL), "ffv1"),
    ],
)
def test_the_film_is_read_wherever_it_stands(tmp_path, suffix, kinds, still):
    path = _write_tracks(tmp_path / f"tracks.{suffix}", kinds, still)
    first = 40 * kinds.index(FILM)
    assert probe_video(path).num_frames == 24
    for pictures in (decode_clip(path, 24).frames, decode_clip(path, 24, 96).frames[:, :, 16:80]):
        assert [read_number(frame) for frame in pictures] == list(range(first, first + 24))


def test_of_stills_alone_one_is_read_and_a_cover_alone_is_no_video(tmp_path):
    assert probe_video(_write_tracks(tmp_path / "stills.mkv", (STILL, STILL))).num_frames == 1
    for suffix, kinds in (("mp4", (SOUND, COVER)), ("mp4", (COVER, SOUND, COVER))):
        path = _write_tracks(tmp_path / f"{len(kinds)}.{suffix}", kinds)
        with pytest.raises(NoVideoStream, match="cover"):
            probe_video(path)


@pytest.mark.parametrize(("orientation", "turned"), [(1, lambda frame: frame), (3, lambda frame: frame[:, ::-1, ::-1])])
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_pictures_with_exif_are_frames_and_turned_as_it_says(tmp_path, suffix, orientation, turned):
    exif = Image.Exif()
    exif[0x010F], exif[0x0112] = "Camera", orientation
    for number in range(5):
        picture = Image.fromarray(numbered_frame(number, 64, 48)).convert("RGB")
        picture.save(tmp_path / f"{number}.{suffix}", exif=exif)
    clip = decode_clip(tmp_path, 5)
    assert [read_number(turned(frame)) for frame in clip.frames] == list(range(5))
    assert set(sample_video(tmp_path).stream.frame_types) == {"I"}
