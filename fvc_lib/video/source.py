"""Opening a video safely: local files only, the best video stream, one decoder thread, one family of errors."""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import av
import av.error
from av.codec.context import ThreadType
from av.container import InputContainer
from av.stream import Discard, Disposition
from av.video.codeccontext import VideoCodecContext
from av.video.stream import VideoStream

from fvc_lib.video.errors import CorruptVideo, NoVideoStream, RefusedVideo, UnreadableVideo, VideoError

MAX_PIXELS = 100_000_000
# For what the decoder finds in the bitstream after the container said otherwise.
_LIMITS = {"max_pixels": str(MAX_PIXELS)}

# ffmpeg would also open playlists, which fetch other files and addresses, and plain text drawn as a terminal.
_CONTAINERS = (
    "3gp,3g2,apng,asf,avi,av1,dv,flv,gif,h261,h263,h264,hevc,image2,ivf,jpeg_pipe,live_flv,m4a,m4v,matroska,mj2,"
    "mjpeg,mov,mp4,mpeg,mpegts,mpegvideo,mxf,nut,obu,ogg,png_pipe,rm,vc1,vvc,webm,webp_pipe,wtv,yuv4mpegpipe"
)
# A protected sample entry of MP4: the box "sinf" begins with the box "frma" (ISO/IEC 14496-12, 8.12).
_PROTECTED = re.compile(rb"encv.{1,400}?sinf....frma", re.DOTALL)


@dataclass(frozen=True)
class VideoSource:
    """An open container and the stream to decode. Only valid inside ``open_video``."""

    path: Path
    container: InputContainer
    stream: VideoStream

    @property
    def container_name(self) -> str:
        """Short name of the container as ffmpeg gives it, e.g. ``mov``, ``matroska``, ``mpegts``."""
        return self.container.format.name.split(",")[0]

    @property
    def codec_name(self) -> str:
        """Name of the compression format (``av1``), not of the decoder that happens to read it (``libdav1d``)."""
        return str(self.stream.codec_context.codec.canonical_name)


@contextmanager
def open_video(path: Path) -> Iterator[VideoSource]:
    """Open ``path`` and choose its best video stream; the container is closed in any case.

    Raises:
        VideoError: the file cannot be read as a video, or ffmpeg fails inside the ``with`` block.
    """
    _check_file(path)
    with ffmpeg_errors(path, UnreadableVideo):
        container = av.open(
            # An absolute name behind "file:" keeps a colon or a dash in a name from being read as a protocol or option.
            "file:" + os.path.abspath(path),  # noqa: PTH100  Path.absolute() keeps "..", abspath does not
            metadata_errors="ignore",
            options={"protocol_whitelist": "file", "format_whitelist": _CONTAINERS},
        )
    with container, ffmpeg_errors(path, CorruptVideo):
        stream = _best_stream(path, container)
        context: VideoCodecContext | None = stream.codec_context
        if context is None:
            raise UnreadableVideo(path, "its compression format is unknown")
        check_size(path, context.width, context.height)
        if _is_encrypted(path, container, stream):
            raise UnreadableVideo(path, "its frames are encrypted")
        for other in container.streams:
            if other.index != stream.index:
                other.discard = Discard.all
        context.options = _LIMITS
        context.thread_count = 1  # the callers are parallel over videos
        context.thread_type = ThreadType.NONE
        yield VideoSource(path, container, stream)


def check_size(path: Path, width: int, height: int) -> None:
    """Refuse frames of more than ``MAX_PIXELS`` pixels: one of them would need gigabytes.

    Raises:
        RefusedVideo: naming the size and the limit.
    """
    if width * height > MAX_PIXELS:
        raise RefusedVideo(path, f"frames of {width} x {height} pixels, the limit is {MAX_PIXELS:,} pixels")


@contextmanager
def ffmpeg_errors(path: Path, kind: type[VideoError]) -> Iterator[None]:
    """Turn ffmpeg's errors into ``kind``. Only ffmpeg's: a mistake in our own code must not pass for a bad video."""
    try:
        yield
    except av.error.MemoryError as error:
        raise RefusedVideo(path, "a frame needs more memory than can be had") from error
    except av.error.FFmpegError as error:
        raise kind(path, (error.strerror or type(error).__name__).strip().rstrip(".").lower()) from error


def _check_file(path: Path) -> None:
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            path.open("rb").close()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UnreadableVideo(path, (reason or type(error).__name__).lower()) from error
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableVideo(path, "not a regular file")
    if status.st_size == 0:
        raise UnreadableVideo(path, "an empty file")


def _best_stream(path: Path, container: InputContainer) -> VideoStream:
    stream = container.streams.best("video")
    if not isinstance(stream, VideoStream):
        kinds = ", ".join(sorted({s.type for s in container.streams})) or "nothing"
        raise NoVideoStream(path, f"it holds {kinds} and no video stream")
    if stream.disposition & Disposition.attached_pic:
        raise NoVideoStream(path, "its only picture is a cover")
    return stream


def _is_encrypted(path: Path, container: InputContainer, stream: VideoStream) -> bool:
    """Whether the frames need a key. The decoder does not say: it may return noise without an error."""
    if "enc_key_id" in stream.metadata:  # Matroska's ContentEncKeyID
        return True
    if not container.format.name.startswith("mov"):
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return any(_PROTECTED.search(content, *span) is not None for span in _boxes(content, b"moov"))


def _boxes(content: mmap.mmap, kind: bytes) -> Iterator[tuple[int, int]]:
    """Half-open spans of the top-level boxes called ``kind`` of an MP4 file; stops where the sizes make no sense."""
    start = 0
    while start + 8 <= len(content):
        size = int.from_bytes(content[start : start + 4], "big")
        if size == 1:
            size = int.from_bytes(content[start + 8 : start + 16], "big")
        elif size == 0:
            size = len(content) - start
        if size < 8:
            return
        if content[start + 4 : start + 8] == kind:
            yield start, min(start + size, len(content))
        start += size
