"""What is measured: the videos, the sizes of the clips, and the corpora."""

from __future__ import annotations

from benchmarks.decode.videos import Encoding, Video

_X264 = (("preset", "veryfast"), ("sc_threshold", "0"))
_B_FRAMES = (*_X264, ("bf", "3"))
_X265 = (("preset", "superfast"), ("x265-params", "log-level=error:scenecut=0"))
_VP9 = (("deadline", "realtime"), ("cpu-used", "8"), ("row-mt", "1"))
# By quality: at a bit rate the first frames are too coarse to read their numbers.
_AV1 = (("preset", "11"), ("crf", "38"), ("svtav1-params", "keyint=250"))

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
