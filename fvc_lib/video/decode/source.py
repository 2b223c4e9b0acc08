"""Open a video safely: only local files, the best video stream, one decoder thread, and errors of type ``VideoError``.

A folder of PNG or JPEG pictures is opened as a video, too. Every picture is a frame; the frame rate is unknown.
"""

import errno
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import av
import av.error
from av.codec.context import ThreadType
from av.container import InputContainer
from av.packet import Packet
from av.stream import Discard, Disposition
from av.video.codeccontext import VideoCodecContext
from av.video.stream import VideoStream

from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.errors import FvcError
from fvc_lib.video.decode.file_parts import FilePart, parts_of, picture_names, sha256_of_video

# ruff: noqa: N818 - the names describe the video; a suffix "Error" would add nothing


class VideoError(FvcError):
    """The error for a video that cannot be used; subclasses name the kind of fault.

    Attributes:
        path: the file.
        reason: the kind of fault in one word, such as ``truncated``, by which tables count videos.
        detail: description of the fault.
        remedy: advice to the user.
    """

    reason: ClassVar[str] = "unreadable"
    remedy = "Fetch or export the file again."

    def __init__(self, path: Path, detail: str, remedy: str | None = None) -> None:
        self.path, self.detail = path, detail
        self.remedy = self.remedy if remedy is None else remedy
        super().__init__(path, detail, remedy)  # pickle calls the constructor with these

    def __str__(self) -> str:
        return f"{str(self.path)!r}: {self.reason}: {self.detail}. {self.remedy}"


class UnreadableVideo(VideoError):
    """The error for a file that is missing, empty, encrypted or no media file, or that the user may not read."""

    remedy = "Fetch the file again and check that a player opens it."


class NoVideoStream(VideoError):
    """The error for a media file without moving pictures: it holds only audio, subtitles or a cover picture."""

    reason = "no_video"
    remedy = "Leave the file out, or replace it by one with a video track."


class TruncatedVideo(VideoError):
    """The error for an incomplete file: frames that its container lists are missing."""

    reason = "truncated"
    remedy = "Fetch the file again, or leave it out."


class CorruptVideo(VideoError):
    """The error for a file whose container can be opened, but whose frames are damaged."""

    reason = "corrupt"
    remedy = "Fetch the file again, or re-encode it from its source."


class UnsupportedVideo(VideoError):
    """The error for a file that may be intact, but that this program cannot decode or process."""

    reason = "unsupported"
    remedy = "Convert it, to H.264 in MP4 for instance, or leave it out."


class RefusedVideo(VideoError):
    """The error for a file that is rejected, because decoding or re-encoding it would need too much memory or time."""

    reason = "refused"
    remedy = "Re-encode the file to a smaller frame, or leave it out."


MAX_PIXELS = 100_000_000  # of a frame
# Formats that ffmpeg may open. Playlists are excluded, because they load other files and addresses, and so is plain
# text, which ffmpeg would draw. Sound formats are included so that the error for a sound file names the reason.
_CONTAINERS = (
    "3gp,3g2,apng,asf,avi,av1,dv,flv,gif,h261,h263,h264,hevc,image2,ivf,jpeg_pipe,live_flv,m4a,m4v,matroska,mj2,"
    "mjpeg,mov,mp4,mpeg,mpegts,mpegvideo,mxf,obu,ogg,png_pipe,rm,vc1,vvc,webm,webp_pipe,wtv,yuv4mpegpipe,"
    "aac,ac3,aiff,amr,ape,au,caf,dts,eac3,flac,mp3,truehd,tta,w64,wav,wv"
)
HEAD_BYTES = 4096  # first bytes of a file, by which its format is checked
# Containers whose header has all information that the decoder needs before the first packet.
_COMPLETE_HEADERS = re.compile(rb"....ftyp|\x1a\x45\xdf\xa3", re.DOTALL)
# With these options the decoder raises an error on damage. Otherwise it fills in lost pixels.
STRICT = {"err_detect": "crccheck+buffer+explode"}
# Codecs whose groups of pictures may be open: frames after a keyframe may refer to frames before it. A strict decoder
# that starts at such a keyframe would raise an error for intact files. See ``VideoSource.be_strict``.
_OPEN_GROUPS = frozenset({"h264", "hevc", "vvc"})
# A protected sample entry of MP4: the box "sinf" begins with the box "frma" (ISO/IEC 14496-12, 8.12). ffmpeg decodes
# its frames without an error, into noise.
_PROTECTED = re.compile(rb"encv.{1,400}?sinf....frma", re.DOTALL)
_MAX_INDEX_BYTES = 1 << 28
_PICTURE_ENDS = {b"\x89P": b"IEND\xaeB`\x82", b"\xff\xd8": b"\xff\xd9"}  # of PNG and JPEG, by their first bytes
_FETCH = "Fetch the file again."
# Files that are no videos: pattern of the first bytes, description, remedy.
_IMPOSTORS = tuple(
    (re.compile(pattern, re.DOTALL | re.IGNORECASE), what, remedy)
    for pattern, what, remedy in (
        (rb"\Z", "an empty file", _FETCH),
        (rb"version https://git-lfs", "a Git LFS pointer, not the file itself", "Fetch the file: git lfs pull."),
        (rb"(\xef\xbb\xbf)?\s*<[!?a-z]", "a web page or a server's error message", "Download the file again."),
        (rb"PK\x03\x04|\x1f\x8b|7z\xbc\xaf|Rar!|BZh\d|\xfd7zXZ|.{257}ustar", "an archive", "Unpack it."),
        (rb".{4}(styp|moof|sidx)", "a segment of an MP4 stream without its header", "Join it to its header."),
        (rb"\x00{64}", "zeros at its beginning, as an unfinished download leaves them", _FETCH),
        (rb"[\t\n\r -~\x80-\xff]+\Z", "plain text, perhaps a playlist or a server's error message", _FETCH),
    )
)


def impostor(head: bytes) -> tuple[str, str] | None:
    """Recognise a file that is certainly no video, such as a web page, by its first bytes ``head``.

    Returns:
        A tuple (description of the file, remedy); None if the file may be a video.
    """
    return next(((what, remedy) for pattern, what, remedy in _IMPOSTORS if pattern.match(head)), None)


@dataclass(frozen=True)
class VideoSource:
    """An open container and its video stream; only valid inside the ``with`` block of ``open_video``."""

    path: Path
    container: InputContainer
    stream: VideoStream
    head: bytes  # the first ``HEAD_BYTES`` bytes
    size_bytes: int

    @property
    def container_name(self) -> str:
        """Return ffmpeg's short name of the container, such as ``mov``, ``matroska`` or ``mpegts``."""
        return self.container.format.name.split(",")[0]

    @property
    def codec_name(self) -> str:
        """Return the name of the compression format (``av1``), not of the decoder (``libdav1d``)."""
        return str(self.stream.codec_context.codec.canonical_name)

    def packets(self) -> "Iterator[Packet[VideoStream]]":
        """Yield the packets of the stream, from the current position in the container on.

        The last packet is empty; it makes the decoder return the frames that it still holds. QuickTime repeats a frame
        by an empty packet. Such packets are left out, because the decoder would take them for the end.
        """
        # A stream of FLV, MPEG-PS or MPEG-TS may begin in mid-file. PyAV raises IndexError on its first packet only.
        while True:
            try:
                for packet in self.container.demux(self.stream):
                    if packet.size or packet.dts is None:
                        yield packet
                return
            except IndexError:
                continue

    def be_strict(self) -> None:
        """Make the decoder raise an error on damage, instead of filling in lost pixels.

        Call it before the first frame is decoded. The decoder must then get all reference frames (frames from which
        other frames are predicted), because it treats a missing one as damage. Damaged data that are still valid are
        not detected, as in VP8 and VP9, where all data are valid.
        """
        self.stream.codec_context.options = {**self.stream.codec_context.options, **STRICT}

    @property
    def sample_aspect_ratio(self) -> Fraction | None:
        """Return the width of a pixel divided by its height; None if unknown.

        The value comes from the container; if that states none, from the compressed stream. The latter is known only
        after the first frame was decoded.
        """
        return self.stream.sample_aspect_ratio or self.stream.codec_context.sample_aspect_ratio


@contextmanager
def open_video(path: AnyPath, *, thorough: bool = False) -> Iterator[VideoSource]:
    """Open ``path`` and yield its best video stream; the container is closed at the end of the ``with`` block.

    Args:
        path: a local file, a member of a tar, or a folder of pictures.
        thorough: whether ffmpeg decodes the first frames, to find the frame rate and the reordering of frames. If
            False, MP4 and Matroska open 5 to 50 times as fast, but facts that only the bitstream states, such as
            the aspect ratio of pixels, are known only after the first frame.

    Raises:
        VideoError: the file cannot be read as a video, or ffmpeg fails inside the ``with`` block.
    """
    path = Path(path)
    content, part, size_bytes = _content(path)
    head = content[:HEAD_BYTES]
    container = _container(path, content, part, thorough)
    with container, ffmpeg_errors(path, CorruptVideo):
        stream = _best_track(container)
        if not isinstance(stream, VideoStream):
            raise NoVideoStream(path, "it has no video stream")
        if stream.disposition & Disposition.attached_pic:
            raise NoVideoStream(path, "its only picture is a cover")
        context: VideoCodecContext | None = stream.codec_context
        if context is None:
            raise UnsupportedVideo(path, "its compression format has no decoder here")
        check_size(path, context.width, context.height)
        is_mp4 = container.format.name.startswith("mov")
        if "enc_key_id" in stream.metadata or (is_mp4 and part and _PROTECTED.search(_index_of_mp4(part))):
            raise UnreadableVideo(path, "its frames are encrypted", "Get an unprotected copy, or leave the file out.")
        promised = len(stream.index_entries)
        if promised > size_bytes:  # with forged numbers reading would take hours
            raise CorruptVideo(path, f"its index promises {promised:,} frames in {size_bytes:,} bytes")
        for other in container.streams:
            if other.index != stream.index:
                other.discard = Discard.all
        source = VideoSource(path, container, stream, head, size_bytes)
        context.options = {"max_pixels": str(MAX_PIXELS)}  # the bitstream may state another size than the container
        if source.codec_name not in _OPEN_GROUPS:
            source.be_strict()
        context.thread_count, context.thread_type = 1, ThreadType.NONE  # the callers are parallel over videos
        yield source


def check_size(path: Path, width: int, height: int) -> None:
    """Raise an error for frames of ``width`` x ``height`` pixels that would need gigabytes of memory.

    Raises:
        RefusedVideo: the frames have more than ``MAX_PIXELS`` pixels.
    """
    if width * height > MAX_PIXELS:
        raise RefusedVideo(path, f"frames of {width} x {height} pixels, the limit is {MAX_PIXELS:,} pixels")


@contextmanager
def ffmpeg_errors(path: Path, kind: type[VideoError]) -> Iterator[None]:
    """Turn errors of ffmpeg in the ``with`` block into ``kind``, and ``MemoryError`` into ``RefusedVideo``.

    ``path`` is the video, for the message. Other errors are not changed.
    """
    try:
        yield
    except MemoryError as error:  # raised by ffmpeg, or by numpy for a frame that ffmpeg has decoded
        raise RefusedVideo(path, "its frames need more memory than can be had") from error
    except av.error.FFmpegError as error:
        raise kind(path, system_reason(error).rstrip(".")) from error


def digest_of_video(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a video's content (``sha256_of_video``).

    Raises:
        UnreadableVideo: the file cannot be read.
    """
    try:
        return sha256_of_video(path)
    except OSError as error:
        raise UnreadableVideo(path, system_reason(error)) from error


def system_reason(error: Exception) -> str:
    """Return the message of an error of the operating system or ffmpeg, in lower case."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip().lower()


def _content(path: Path) -> tuple[bytes, FilePart | None, int]:
    """Return a tuple (content, part, size in bytes) of a video.

    For a file, the content is its first ``HEAD_BYTES`` bytes, and the part is the range of bytes to open. For a folder
    of pictures, the content is that of all pictures, joined, and the part is None.

    Raises:
        VideoError: the path cannot be read, a picture is damaged, or the folder has both PNG and JPEG pictures.
    """
    try:
        names, parts = picture_names(path), parts_of(path)
        if not names:
            return parts[0].read(HEAD_BYTES), parts[0], parts[0].size_bytes
        contents = [part.read() for part in parts]
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        remedy = "Name a file, or a folder of pictures, that you have the right to read (chmod u+r)."
        raise UnreadableVideo(path, system_reason(error), remedy) from error
    for name, content in zip(names, contents, strict=True):
        if not content.rstrip(b"\0").endswith(_PICTURE_ENDS.get(content[:2], ())):  # else ffmpeg loses the next picture
            detail = f"{name}: no PNG or JPEG picture, or not all of it"
            raise CorruptVideo(path, detail, "Unpack the folder again, or leave it out.")
    if len({content[:2] for content in contents}) > 1:
        raise UnsupportedVideo(path, "it holds both PNG and JPEG pictures", "Keep those of one kind.")
    return b"".join(contents), None, sum(part.size_bytes for part in parts)


def _container(path: Path, content: bytes, part: FilePart | None, thorough: bool) -> InputContainer:
    """Open a container of ffmpeg and return it.

    Args:
        path: the video, for error messages.
        content: its first bytes, or the joined contents of its pictures (``_content``).
        part: the range of bytes to open; None: ``content`` is opened.
        thorough: as for ``open_video``.

    Raises:
        UnreadableVideo: ffmpeg cannot open it.
    """
    options = {"protocol_whitelist": "file,subfile", "format_whitelist": _CONTAINERS}
    if not thorough and _COMPLETE_HEADERS.match(content):
        options["codec_whitelist"] = "none"  # otherwise ffmpeg decodes frames while it opens a file
    try:
        with ffmpeg_errors(path, UnreadableVideo):
            file = part.url if part else io.BytesIO(content)
            return av.open(file, mode="r", metadata_errors="ignore", options=options)
    except UnreadableVideo as error:
        known = impostor(content[:HEAD_BYTES])
        if known is None and getattr(error.__cause__, "errno", None) == errno.EINVAL:  # not in the list
            known = "in no container that is read here, or its header makes no sense", UnsupportedVideo.remedy
        if known is None:
            raise
        raise UnreadableVideo(path, *known) from error


def _best_track(container: InputContainer) -> VideoStream | None:
    """Return the video track of a container to decode; None if there is no video track.

    Usually this is the track that ffmpeg chooses. Another track is preferred if that track is a cover picture, or if it
    has a single frame by the container's index (Matroska's index is not used). Of several other tracks, the one with
    the widest frames is returned.
    """
    best = container.streams.best("video")
    lists_all = container.format.name != "matroska,webm"  # whose index lists keyframes alone
    return max(
        container.streams.video,
        key=lambda track: (
            bool(track.codec_context and not track.disposition & Disposition.attached_pic),
            not lists_all or len(track.index_entries) != 1,
            track is best,
            getattr(track.codec_context, "width", 0),
        ),
        default=None,
    )


def _index_of_mp4(part: FilePart) -> bytes:
    """Return the content of the top-level box ``moov`` of an MP4; empty if it is missing or a size is invalid.

    Other boxes are skipped, so the file may be larger than the memory.
    """
    place, end = part.start, part.start + part.size_bytes
    with part.path.open("rb") as file:
        while place + 8 <= end:
            file.seek(place)
            head = file.read(16)
            size = int.from_bytes(head[:4], "big") or end - place
            if size == 1:
                size = int.from_bytes(head[8:], "big")
            if head[4:8] == b"moov":
                file.seek(place)
                return file.read(min(size, end - place, _MAX_INDEX_BYTES))
            if size < 8:
                break
            place += size
    return b""
