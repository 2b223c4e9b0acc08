"""What is measured: the videos, the sizes of the clips, and the corpora."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.decode.videos import Encoding, Video

_X264 = (("preset", "veryfast"), ("sc_threshold", "0"))
_B_FRAMES = (*_X264, ("bf", "3"))
_X265 = (("preset", "superfast"), ("x265-params", "log-level=error:scenecut=0"))
_VP9 = (("deadline", "realtime"), ("cpu-used", "8"), ("row-mt", "1"))
# By quality: at a bit rate the first frames are too coarse to read their numbers.
_AV1 = (("preset", "11"), ("crf", "26"), ("svtav1-params", "keyint=250"))

LENGTH_REPEATS = {"10 s": 1, "10 min": 60, "1 h": 360}
# The clip that is decoded where only the corpus varies.
CORPUS_NUM_FRAMES, CORPUS_SIZE = 8, 112
NUM_FRAMES = (6, 8, 16)
SIZES = (112, 224)


def _full_hd(codec: str, num_frames: int, gop: int, options: tuple[tuple[str, str], ...]) -> Encoding:
    return Encoding(codec, 1920, 1080, num_frames, gop, 4000, options)


GOP_250 = Video("1080p h264 GOP 250", _full_hd("libx264", 250, 250, _B_FRAMES))
GOP_30 = Video("1080p h264 GOP 30", _full_hd("libx264", 250, 30, _B_FRAMES))
CASES = (
    GOP_250,
    GOP_30,
    Video("1080p h264 no B-frames", _full_hd("libx264", 250, 250, (*_X264, ("bf", "0")))),
    Video("1080p hevc", _full_hd("libx265", 250, 250, _X265)),
    Video("1080p vp9", _full_hd("libvpx-vp9", 250, 128, _VP9), ".webm"),
    Video("1080p av1", Encoding("libsvtav1", 1920, 1080, 250, 250, 0, _AV1)),
    Video("720p h264 1 min", Encoding("libx264", 1280, 720, 250, 250, 2000, _B_FRAMES), repeats=6),
    Video("360p h264 3 min", Encoding("libx264", 640, 360, 250, 250, 600, _B_FRAMES), repeats=18),
)

# The same picture at 10 s, 10 minutes and 1 hour: memory must not follow the length.
_LONG = Encoding("libx264", 640, 360, 250, 250, 150, _B_FRAMES)
LENGTHS = tuple(Video(f"360p h264 {length}", _LONG, repeats=repeats) for length, repeats in LENGTH_REPEATS.items())

_KINDS = (
    Video("mixed h264 1080p", GOP_30.encoding),
    Video("mixed h264 720p", Encoding("libx264", 1280, 720, 250, 250, 2000, _B_FRAMES)),
    Video("mixed h264 360p", Encoding("libx264", 640, 360, 250, 250, 600, _B_FRAMES)),
    Video("mixed h264 portrait", Encoding("libx264", 360, 640, 150, 60, 600, _B_FRAMES), ".mkv"),
    Video("mixed h264 480p GOP 12", Encoding("libx264", 854, 480, 120, 12, 1200, _B_FRAMES)),
    Video("mixed h264 VGA no B-frames", Encoding("libx264", 640, 480, 125, 250, 900, (*_X264, ("bf", "0")))),
    Video("mixed hevc 720p", Encoding("libx265", 1280, 720, 125, 250, 1500, _X265)),
    Video("mixed hevc 360p", Encoding("libx265", 640, 360, 125, 60, 500, _X265), ".mkv"),
    Video("mixed vp9 720p", Encoding("libvpx-vp9", 1280, 720, 125, 128, 1500, _VP9), ".webm"),
    Video("mixed vp9 480p", Encoding("libvpx-vp9", 854, 480, 125, 128, 900, _VP9), ".webm"),
    Video("mixed av1 480p", Encoding("libsvtav1", 854, 480, 125, 125, 0, _AV1)),
    Video("mixed mpeg4 VGA", Encoding("mpeg4", 640, 480, 120, 12, 1500)),
)
# 60 files: a dozen kinds, each in five lengths.
CORPUS = tuple(replace(kind, repeats=repeats) for kind in _KINDS for repeats in (1, 2, 3, 4, 6))
