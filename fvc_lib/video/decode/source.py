"""Opening a video safely: local files only, the best video stream, one decoder thread, one family of errors.

A plain file in a tar is a video, too (``tar_members``). So is a folder of pictures, also in a tar: each PNG or JPEG in
it is a frame, in the order of the numbers in their names. It is read as the pictures one behind the other, states no
rate, and its content is the pictures, whatever they are called.
"""

import errno
import hashlib
import io
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
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

from fvc_lib.services.atomic_files import AnyPath, sha256_of_file
from fvc_lib.services.errors import FvcError
from fvc_lib.video.decode.tar_members import Member, folder_at, member_at, opened

# What a file is that is named like a video and is none: told by its first bytes, with what to do about it.

_AGAIN = "Download the file again and look at what the server answers."
_MARKUP = rb"(\xef\xbb\xbf)?\s*<[!?a-z]|(\xff\xfe|\xfe\xff)\x00?<\x00?[!?a-z]"  # HTML, XML, as UTF-8 or UTF-16
_ARCHIVE = rb"PK\x03\x04|\x1f\x8b|7z\xbc\xaf\x27\x1c|Rar!|BZh\d|\xfd7zXZ|.{257}ustar"
_LFS, _JSON = rb"version https://git-lfs\.github\.com/spec/", rb"\s*[{\[]\s*[\"{\]}]"
_PLAYLIST, _SEGMENT = rb"\s*(#EXTM3U|<\?xml.{0,400}<MPD|ffconcat)", rb".{4}(styp|moof|sidx)"
_JOIN = "Join it behind its initialization segment: cat init.mp4 segment.m4s > video.mp4."
_UNFINISHED = "zeros at its beginning, as an unfinished download leaves them"
# (how the file begins, what it is, what to do); the first that fits.
_KINDS = tuple(
    (re.compile(pattern, re.DOTALL | re.IGNORECASE), what, remedy)
    for pattern, what, remedy in (
        (_LFS, "a Git LFS pointer, not the file it stands for", "Fetch the file itself: git lfs pull."),
        (_PLAYLIST, "a playlist, which only names other files", "Download the video that it names."),
        (_MARKUP, "a web page or a server's error message, saved under the file's name", _AGAIN),
        (_JSON, "a JSON text, such as a server's error message", _AGAIN),
        (_ARCHIVE, "an archive", "Unpack it and list the files inside."),
        (rb"%PDF-", "a PDF document", "Leave it out, or fetch the file that was meant."),
        (_SEGMENT, "a segment of an MP4 stream without the header it belongs to", _JOIN),
        (rb"\x00{64}", _UNFINISHED, "Fetch the file again."),
        (rb"\Z", "an empty file", "Fetch the file again."),
        (rb"[\t\n\r -~\x80-\xff]+\Z", "plain text, perhaps an error message of a server or a program", _AGAIN),
    )
)


def what_it_is(head: bytes) -> tuple[str, str] | None:
    """What a file is that begins with ``head``, and the remedy; none for what is not known here."""
    return next(((what, remedy) for pattern, what, remedy in _KINDS if pattern.match(head)), None)


# What can be wrong with a video file. Each error names the file, a short reason for counting, and the remedy.

# ruff: noqa: N818 - the class says what the video is; "UnreadableVideoError" would say no more


class VideoError(FvcError):
    """A video that cannot be used: ``path`` says which, ``reason`` (a small vocabulary) and ``detail`` why.

    ``remedy`` is what usually helps for the reason, or what helps with this very file where that is known.
    """

    reason: ClassVar[str] = "unreadable"
    remedy = "Fetch or export the file again."

    def __init__(self, path: Path, detail: str, remedy: str | None = None) -> None:
        self.path = path
        self.detail = detail
        if remedy is not None:
            self.remedy = remedy
        super().__init__(path, detail, remedy)  # what pickling hands to the copy

    def __str__(self) -> str:
        return f"{str(self.path)!r}: {self.reason}: {self.detail}. {self.remedy}"


class UnreadableVideo(VideoError):
    """No container that can be read: missing, empty, no permission, no media at all, or encrypted."""

    reason = "unreadable"
    remedy = "Fetch the file again and check that a player opens it."


class NoVideoStream(VideoError):
    """A media file without moving pictures: audio, subtitles, or only a cover picture."""

    reason = "no_video"
    remedy = "Leave the file out, or replace it by one with a video track."


class TruncatedVideo(VideoError):
    """Frames that the container promises are not there."""

    reason = "truncated"
    remedy = "Fetch the file again, or leave it out."


class CorruptVideo(VideoError):
    """The container opens, but its frames cannot be decoded as they were encoded."""

    reason = "corrupt"
    remedy = "Fetch the file again, or re-encode it from its source."


class UnsupportedVideo(VideoError):
    """Nothing is wrong with the file, and there is no decoder for it here."""

    reason = "unsupported"
    remedy = "Convert it, to H.264 in MP4 for instance, or leave it out."


class RefusedVideo(VideoError):
    """A file that could be opened but is refused because decoding it would need an absurd amount of memory."""

    reason = "refused"
    remedy = "Re-encode the file to a smaller frame, or leave it out."


MAX_PIXELS = 100_000_000
# For what the decoder finds in the bitstream after the container said otherwise.
_LIMITS = {"max_pixels": str(MAX_PIXELS)}
# An error where the decoder would otherwise guess what damage has destroyed, and put out the guess as a frame.
_NO_GUESSING = {"err_detect": "crccheck+buffer+explode"}
# Decoders that may be told so from the start. Those of H.264 and HEVC also guess what lies before the first packet, in
# good files that begin (or are entered by a seek) at an open group of pictures; see ``refuse_damage``.
_GUESSING = frozenset(
    {
        "mpeg1video", "mpeg2video", "mpeg4", "h263", "flv1", "msmpeg4v1", "msmpeg4v2", "msmpeg4v3", "wmv1", "wmv2",
        "mjpeg",
    }
)  # fmt: skip
_MAX_LATE_STREAMS = 32
_START_CODE = re.compile(rb"\x00\x00\x01(?=.)", re.DOTALL)
_H264_IDR = 5  # nal_unit_type of a slice of an IDR picture (ITU-T H.264, table 7-1)

# ffmpeg would also open playlists, which fetch other files and addresses, and plain text drawn as a terminal. Sound is
# opened to say that it is sound.
_CONTAINERS = (
    "3gp,3g2,apng,asf,avi,av1,dv,flv,gif,h261,h263,h264,hevc,image2,ivf,jpeg_pipe,live_flv,m4a,m4v,matroska,mj2,"
    "mjpeg,mov,mp4,mpeg,mpegts,mpegvideo,mxf,nut,obu,ogg,png_pipe,rm,vc1,vvc,webm,webp_pipe,wtv,yuv4mpegpipe,"
    "aac,ac3,aiff,amr,ape,au,caf,dts,eac3,flac,mp3,truehd,tta,w64,wav,wv"
)
_NO_CONTAINER = "in no container that is read here, or its header makes no sense", "Convert it to MP4, or leave it out."
_HEAD_BYTES = 512
PICTURES = (".png", ".jpg", ".jpeg")
_PNG, _DIGITS = (b"\x89PNG\r\n\x1a\n", b"\0\0\0\0IEND\xaeB`\x82"), re.compile(r"\d+", re.ASCII)
_MAX_BYTES_OF_PICTURES = 1 << 30  # they are read into memory
_OPENING_REMEDIES: dict[type[Exception], str] = {
    FileNotFoundError: "Check the name, or restore the file.",
    PermissionError: "Grant the right to read it: chmod u+r, or ask its owner.",
}
# Containers that state everything the decoder has to know before the first packet.
_TELLING_HEADS = re.compile(rb"....ftyp|\x1a\x45\xdf\xa3", re.DOTALL)
# A protected sample entry of MP4: the box "sinf" begins with the box "frma" (ISO/IEC 14496-12, 8.12).
_PROTECTED = re.compile(rb"encv.{1,400}?sinf....frma", re.DOTALL)
_MAX_INDEX_BYTES = 1 << 28  # of some ten million frames


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

    def packets(self) -> "Iterator[Packet[VideoStream]]":
        """The packets of the stream from where the container stands; the last, empty one flushes the decoder.

        Other empty packets, QuickTime's way to say that a frame stays, are left out: the decoder would end at them.

        Raises:
            CorruptVideo: streams keep appearing.
        """
        # FLV, MPEG-PS and MPEG-TS may begin a stream in the middle. PyAV does not know its number and raises on its
        # first packet, which is none of ours; asked again, it passes such packets over.
        for _ in range(_MAX_LATE_STREAMS):
            try:
                for packet in self.container.demux(self.stream):
                    if packet.size or packet.dts is None:
                        yield packet
            except IndexError:
                continue
            return
        raise CorruptVideo(self.path, f"more than {_MAX_LATE_STREAMS} streams begin in the middle of the file")

    def begins_anew(self, keyframe: bytes | memoryview) -> bool:
        """Whether, decoding from this keyframe's packet on, a missing reference can only be damage.

        Of H.264 only IDR pictures are known to allow that; other codecs' decoders know what they may leave out.
        """
        if self.codec_name != "h264":
            return True
        extradata = self.stream.codec_context.extradata or b""
        # An avcC box (ISO/IEC 14496-15, 5.3.3.1) says how long the lengths before NAL units are; without it they follow
        # start codes.
        starts: Iterable[int] = (match.end() for match in _START_CODE.finditer(keyframe))
        if extradata[:1] == b"\x01" and len(extradata) >= 7:
            starts = _length_prefixed(keyframe, (extradata[4] & 3) + 1)
        return any(keyframe[start] & 0x1F == _H264_IDR for start in starts)

    def refuse_damage(self) -> None:
        """Have damaged frames raise instead of being guessed (concealed) by the decoder; before the first decode.

        Only for a video whose first packet is a keyframe and whose keyframes all ``begins_anew``: elsewhere good files
        are refused. What the format cannot tell from good data is decoded as it is, all of VP8 and VP9 for instance.
        """
        context = self.stream.codec_context
        context.options = {**context.options, **_NO_GUESSING}

    @property
    def sample_aspect_ratio(self) -> Fraction | None:
        """Width of a pixel over its height, by the container or, after the first frame, by the bitstream."""
        return self.stream.sample_aspect_ratio or self.stream.codec_context.sample_aspect_ratio


@contextmanager
def open_video(path: AnyPath, *, thorough: bool = False) -> Iterator[VideoSource]:
    """Open ``path`` and choose its best video stream; the container is closed in any case.

    Args:
        path: a local file, one in a tar, or a folder of pictures.
        thorough: let ffmpeg decode the first frames to learn the rate and how far frames are reordered. Without, MP4
            and Matroska open 5 to 50 times as fast; what only the bitstream tells is then known after the first frame.

    Raises:
        VideoError: the file cannot be read as a video, or ffmpeg fails inside the ``with`` block.
    """
    path = Path(path)
    container, track = _container(path, thorough), None
    if len(container.streams.video) > 1:
        container.close()
        with _container(path, thorough=True) as seen, ffmpeg_errors(path, CorruptVideo):
            track = _film(seen)  # which of several is the best shows in their first frames
        container = _container(path, thorough)  # from its beginning again
    with container, ffmpeg_errors(path, CorruptVideo):
        stream = _best_stream(path, container, track)
        context: VideoCodecContext | None = stream.codec_context
        if context is None:
            raise UnsupportedVideo(path, "its compression format has no decoder here")
        check_size(path, context.width, context.height)
        if _is_encrypted(path, container, stream):
            raise UnreadableVideo(path, "its frames are encrypted", "Get an unprotected copy, or leave the file out.")
        _check_index(path, stream)
        for other in container.streams:
            if other.index != stream.index:
                other.discard = Discard.all
        source = VideoSource(path, container, stream)
        context.options = _LIMITS | (_NO_GUESSING if source.codec_name in _GUESSING else {})
        context.thread_count = 1  # the callers are parallel over videos
        context.thread_type = ThreadType.NONE
        yield source


def _container(path: Path, thorough: bool) -> InputContainer:
    """Open the container alone; arguments and errors as for ``open_video``."""
    pictures = b"" if pictures_in(path) is None else b"".join(_pictures(path))
    head = pictures[:_HEAD_BYTES] or _check_file(path)
    if head[:4] == b"RIFF" and head[8:16] == b"WEBPVP8X" and head[20:21] and head[20] & 2:  # RFC 9649, 2.7
        raise UnsupportedVideo(path, "an animated WebP: only still ones are decoded here")
    member = None if pictures else member_at(path)
    options = {"protocol_whitelist": "file,subfile" if member else "file", "format_whitelist": _CONTAINERS}
    if not thorough and _TELLING_HEADS.match(head):
        options["codec_whitelist"] = "none"  # the one way to keep ffmpeg from decoding frames while it opens a file
    # An absolute name behind "file:" keeps a colon or a dash in a name from being read as a protocol or option.
    name = member.url if member else "file:" + os.path.abspath(path)  # noqa: PTH100  Path.absolute() keeps ".."
    with _opening_errors(path, head):
        return av.open(
            io.BytesIO(pictures) if pictures else name,
            mode="r",
            metadata_errors="ignore",
            options=options,
        )


def picture_names(folder: AnyPath) -> list[str]:
    """The names of the pictures in ``folder``, in the order of ``pictures_in``."""
    return list(pictures_in(folder) or ())


def pictures_in(path: AnyPath) -> dict[str, Path | Member] | None:
    """The PNG and JPEG files that are not hidden in a folder, or in one of a tar, by name; None for a file.

    They are in the order of the numbers in their names: 9 before 10, whatever stands around it.
    """
    files: Mapping[str, Path | Member] = folder_at(Path(path))
    if os.path.isdir(path):  # noqa: PTH112 - raises nothing
        files = {name: Path(path, name) for name in os.listdir(path)}  # noqa: PTH208 - names, not paths
    elif not files:
        return None
    shown = [name for name in files if not name.startswith(".") and name.lower().endswith(PICTURES)]
    shown.sort(key=lambda name: ([int(digits) for digits in _DIGITS.findall(name)], name))
    return {name: files[name] for name in shown}


def sha256_of_video(path: AnyPath) -> str:
    """Hex SHA-256 of a file; of a folder of pictures that of their contents one behind the other.

    Raises:
        OSError: it cannot be read.
        VideoError: a picture is damaged.
    """
    path, digest = Path(path), hashlib.sha256()
    member = None if (is_folder := pictures_in(path) is not None) else member_at(path)
    if member is None and not is_folder:
        return sha256_of_file(path)
    for chunk in member.chunks() if member else _pictures(path):
        digest.update(chunk)
    return digest.hexdigest()


def size_of_video(path: Path) -> int:
    """Bytes of a file, or of all pictures in a folder."""
    if (pictures := pictures_in(path)) is None:
        pictures = {"": member_at(path) or path}
    return sum(each.stat().st_size if isinstance(each, Path) else each.size_bytes for each in pictures.values())


def _pictures(folder: Path) -> Iterator[bytes]:
    """The contents of the pictures in ``folder`` in their order, each whole.

    Raises:
        VideoError: there is none, one is damaged, they are of two kinds, or they are too large together.
    """
    kinds, num_bytes = set(), 0
    pictures = pictures_in(folder)
    if not pictures:
        raise UnreadableVideo(folder, "not a regular file, nor a folder of PNG or JPEG pictures", "Name videos only.")
    for name, file in pictures.items():
        try:
            content = file.read_bytes() if isinstance(file, Path) else file.read()
        except OSError as error:
            raise UnreadableVideo(folder, f"{name}: {(error.strerror or type(error).__name__).lower()}") from error
        if (problem := _problem_of_picture(content)) is not None:
            raise CorruptVideo(folder, f"{name}: {problem}", "Unpack its archive again, or leave the folder out.")
        kinds.add(content[:2])
        num_bytes += len(content)
        if len(kinds) > 1:
            raise UnsupportedVideo(folder, "it holds both PNG and JPEG pictures", "Keep those of one kind.")
        if num_bytes > _MAX_BYTES_OF_PICTURES:
            raise RefusedVideo(folder, f"pictures of more than {_MAX_BYTES_OF_PICTURES:,} bytes together")
        yield content


def _problem_of_picture(content: bytes) -> str | None:
    """What is wrong with a PNG or JPEG as far as its parts tell: behind a cut one the next picture would be lost."""
    from PIL import Image  # which takes a while to load

    from fvc_lib.video.decode.still_image import damage_in_scan, reaches_its_end

    damaged = "its data are damaged or cut off"
    if content.startswith(b"\xff\xd8"):
        return None if reaches_its_end(content) and not damage_in_scan(content) else damaged
    if not content.startswith(_PNG[0]):
        return "no PNG or JPEG picture"
    try:
        Image.open(io.BytesIO(content), formats=["PNG"]).verify()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return damaged
    return None if content.endswith(_PNG[1]) else "its end is missing, or something stands behind it"


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
    except MemoryError as error:  # ffmpeg's, or numpy's for a frame that ffmpeg could make
        raise RefusedVideo(path, "its frames need more memory than can be had") from error
    except av.error.FFmpegError as error:
        raise kind(path, (error.strerror or type(error).__name__).strip().rstrip(".").lower()) from error


@contextmanager
def _opening_errors(path: Path, head: bytes) -> Iterator[None]:
    """``UnreadableVideo`` for what cannot be opened, by what its first bytes show it to be where that is known."""
    try:
        with ffmpeg_errors(path, UnreadableVideo):
            yield
    except UnreadableVideo as error:
        known = what_it_is(head)
        if known is None and head[4:8] == b"ftyp" and not any(_indexes(path)):
            known = "its index (the box moov) is missing: the file was cut or never finished", "Fetch the file again."
        if known is None and getattr(error.__cause__, "errno", None) == errno.EINVAL:  # ffmpeg's word for not listed
            known = _NO_CONTAINER
        if known is None:
            raise
        raise UnreadableVideo(path, *known) from error


def _check_file(path: Path) -> bytes:
    """The first bytes of a regular file that is not empty."""
    head = b""
    try:
        if (member := member_at(path)) is not None:
            is_file, num_bytes, head = True, member.size_bytes, member.read(_HEAD_BYTES)
        else:
            status = path.stat()
            is_file, num_bytes = stat.S_ISREG(status.st_mode), status.st_size
            if is_file:  # opening a pipe would wait for ever
                with path.open("rb") as file:
                    head = file.read(_HEAD_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        remedy = _OPENING_REMEDIES.get(type(error), "Check the name and the disk.")
        raise UnreadableVideo(path, (reason or type(error).__name__).lower(), remedy) from error
    if not is_file:
        raise UnreadableVideo(path, "not a regular file", "Name video files only.")
    if num_bytes == 0:
        raise UnreadableVideo(path, "an empty file", "Fetch the file again.")
    return head


def _film(container: InputContainer) -> int:
    """The index of the video track to decode: ffmpeg's choice, unless that is a cover or a still and another is not.

    In place of those, of the other tracks that are films, the one with the widest frames is taken.
    """
    best, num_packets = container.streams.best("video"), Counter[int]()
    with suppress(av.error.FFmpegError, IndexError):  # what is damaged is found when the track is read
        for packet in container.demux(*container.streams.video):
            num_packets[packet.stream.index] += packet.size > 0
            if packet.stream is best and num_packets[best.index] > 1:
                break
    return max(
        container.streams.video,
        key=lambda track: (
            bool(track.codec_context and not track.disposition & Disposition.attached_pic),
            min(2, num_packets[track.index]),
            track is best,
            getattr(track.codec_context, "width", 0),
        ),
    ).index


def _best_stream(path: Path, container: InputContainer, track: int | None) -> VideoStream:
    stream = container.streams.best("video") if track is None else container.streams[track]
    if not isinstance(stream, VideoStream):
        kinds = ", ".join(sorted({s.type.replace("subtitle", "subtitles") for s in container.streams})) or "nothing"
        raise NoVideoStream(path, f"it holds {kinds} and no video stream")
    if stream.disposition & Disposition.attached_pic:
        raise NoVideoStream(path, "its only picture is a cover")
    return stream


def _check_index(path: Path, stream: VideoStream) -> None:
    """Refuse an index of more frames than the file has bytes: two forged numbers would keep a reader busy for hours."""
    promised, num_bytes = len(stream.index_entries), size_of_video(path)
    if promised > num_bytes:
        raise CorruptVideo(path, f"its index promises {promised:,} frames in {num_bytes:,} bytes")


def _length_prefixed(packet: bytes | memoryview, length_bytes: int) -> Iterator[int]:
    """Where the NAL units of a packet begin; stops where the lengths make no sense."""
    start = 0
    while start + length_bytes < len(packet):
        yield start + length_bytes
        start += length_bytes + int.from_bytes(packet[start : start + length_bytes], "big")


def _is_encrypted(path: Path, container: InputContainer, stream: VideoStream) -> bool:
    """Whether the frames need a key. The decoder does not say: it may return noise without an error."""
    if "enc_key_id" in stream.metadata:  # Matroska's ContentEncKeyID
        return True
    if not container.format.name.startswith("mov"):
        return False
    return any(_PROTECTED.search(index) for index in _indexes(path))


def _indexes(path: Path) -> Iterator[bytes]:
    """The top-level boxes ``moov`` of an MP4 file; stops where the sizes of boxes make no sense.

    Other boxes are passed over unread, so that a file may be larger than the memory.
    """
    with opened(path) as (file, start, end):
        while start + 8 <= end:
            file.seek(start)
            head = file.read(16)
            size = int.from_bytes(head[:4], "big")
            if size == 1:
                size = int.from_bytes(head[8:], "big")
            elif size == 0:
                size = end - start
            if size < 8:
                return
            if head[4:8] == b"moov":
                file.seek(start)
                yield file.read(min(size, end - start, _MAX_INDEX_BYTES))
            start += size
