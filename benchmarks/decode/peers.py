"""The ways to a clip that are compared: FVC's own, and the peers from PyPI, each as its users would call it.

Every peer decodes with one thread, takes the frames round(linspace(0, n - 1, T)) and fits them to the same square. A
decoder gets (path, T, side of the square in pixels) and gives uint8 (T, 3, h, w) RGB without the black borders. Nothing
is imported before it is used: a process that measures one peer holds no other.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Decoder = Callable[[Path, int, int], Pixels]

OURS = "decode_clip"
FLOOR = "floor"  # not a peer: see the module of that name
DEMUXING = "demuxing alone"  # nor is this: ffmpeg's own index, which grows with the length
TORCHCODEC = "torchcodec"
DECORD = "decord"


@dataclass(frozen=True)
class Peer:
    """One contestant.

    Attributes:
        name: in the tables.
        modules: what its users import first; what these take is not counted as its memory.
        distribution: the package on PyPI.
        decode: see the module.
        ffmpeg: tells which ffmpeg it uses.
    """

    name: str
    modules: tuple[str, ...]
    distribution: str
    decode: Decoder
    ffmpeg: Callable[[], str] | None = None

    def import_modules(self) -> None:
        """Load what it needs.

        Raises:
            ImportError: or OSError or RuntimeError, where the package or a library of it is missing.
        """
        for module in self.modules:
            importlib.import_module(module)

    def version(self) -> str:
        """Of the installed package, and of the ffmpeg it decodes with where it says so."""
        version = importlib.metadata.version(self.distribution)
        return f"{version} ({self.ffmpeg()})" if self.ffmpeg else version


def uniform_places(num_frames_there: int, num_frames: int) -> list[int]:
    """round(linspace(0, n - 1, T)); written out here because it also checks ours."""
    return [int(place) for place in np.round(np.linspace(0, num_frames_there - 1, num_frames))]


def fitted(width: int, height: int, size: int) -> tuple[int, int]:
    """Width and height of the picture inside a letterboxed square."""
    scale = size / max(width, height)
    return max(1, round(width * scale)), max(1, round(height * scale))


def channels_first(frames: Sequence[Pixels]) -> Pixels:
    """uint8 (T, 3, H, W) from T pictures (H, W, 3)."""
    return np.stack(frames).transpose(0, 3, 1, 2) if frames else np.empty((0, 3, 0, 0), np.uint8)


def decode_ours(path: Path, num_frames: int, size: int) -> Pixels:
    """What is measured."""
    from fvc_lib.video.decode.clip import decode_clip

    clip = decode_clip(path, num_frames, size)
    box = clip.content
    return clip.frames[:, :, box.top : box.top + box.height, box.left : box.left + box.width]


def decode_torchcodec(path: Path, num_frames: int, size: int) -> Pixels:
    """Exact mode, whole frames, then torch's antialiased resize: what most training code does."""
    import torch
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(path, seek_mode="exact", num_ffmpeg_threads=1)
    frames = decoder.get_frames_at(indices=uniform_places(len(decoder), num_frames)).data
    width, height = fitted(frames.shape[3], frames.shape[2], size)
    small = torch.nn.functional.interpolate(frames, (height, width), mode="bilinear", antialias=True)
    return np.asarray(small.numpy(), np.uint8)


def decode_torchcodec_resize(path: Path, num_frames: int, size: int) -> Pixels:
    """Exact mode with the decoder's own ``Resize``, so that no whole frame is kept."""
    from torchcodec.decoders import VideoDecoder
    from torchcodec.transforms import Resize

    header = VideoDecoder(path, seek_mode="approximate", num_ffmpeg_threads=1).metadata
    width, height = fitted(header.width or 0, header.height or 0, size)
    decoder = VideoDecoder(path, seek_mode="exact", num_ffmpeg_threads=1, transforms=[Resize((height, width))])
    return np.asarray(decoder.get_frames_at(indices=uniform_places(len(decoder), num_frames)).data.numpy(), np.uint8)


def decode_decord(path: Path, num_frames: int, size: int) -> Pixels:
    """The batch reader, which scales while it decodes."""
    import av
    from decord import VideoReader

    with av.open(str(path)) as container:
        width, height = fitted(container.streams.video[0].width, container.streams.video[0].height, size)
    reader = VideoReader(str(path), width=width, height=height, num_threads=1)
    return channels_first(list(reader.get_batch(uniform_places(len(reader), num_frames)).asnumpy()))


def decode_opencv(path: Path, num_frames: int, size: int) -> Pixels:
    """``VideoCapture`` set to each frame number, as most data loaders use it."""
    import cv2

    cv2.setNumThreads(1)
    capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
    taken = []
    for place in uniform_places(int(capture.get(cv2.CAP_PROP_FRAME_COUNT)), num_frames):
        capture.set(cv2.CAP_PROP_POS_FRAMES, place)
        there, frame = capture.read()
        if not there:
            break
        inner = fitted(frame.shape[1], frame.shape[0], size)
        small = cv2.resize(frame, inner, interpolation=cv2.INTER_AREA)
        taken.append(np.asarray(cv2.cvtColor(small, cv2.COLOR_BGR2RGB), np.uint8))
    capture.release()
    return channels_first(taken)


def decode_pyav(path: Path, num_frames: int, size: int) -> Pixels:
    """Count the packets, then decode everything from the first frame on and convert the wanted frames."""
    import av

    with av.open(str(path)) as container:
        count = sum(packet.size > 0 for packet in container.demux(video=0))
    wanted = set(uniform_places(count, num_frames))
    taken = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        width, height = fitted(stream.width, stream.height, size)
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                small = frame.reformat(width, height, "rgb24", interpolation="BILINEAR")
                taken.append(np.asarray(small.to_ndarray(), np.uint8))
    return channels_first(taken)


def decode_imageio(path: Path, num_frames: int, size: int) -> Pixels:
    """The ffmpeg program in a pipe: it counts, then selects and scales."""
    import av
    from imageio_ffmpeg import count_frames_and_secs, read_frames

    chosen = "+".join(f"eq(n\\,{place})" for place in uniform_places(count_frames_and_secs(str(path))[0], num_frames))
    with av.open(str(path)) as container:
        width, height = fitted(container.streams.video[0].width, container.streams.video[0].height, size)
    filters = ["-vf", f"select={chosen},scale={width}:{height}:flags=bilinear", "-fps_mode", "passthrough"]
    pipe = read_frames(str(path), input_params=["-threads", "1"], output_params=[*filters, "-threads", "1"])
    next(pipe)  # what it knows about the file
    return channels_first([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in pipe])


def pyav_ffmpeg() -> str:
    """The ffmpeg inside PyAV, which is also ours."""
    import av

    return f"ffmpeg {av.ffmpeg_version_info}"


def torchcodec_ffmpeg() -> str:
    """The ffmpeg that torchcodec found on this system."""
    import torchcodec

    return f"ffmpeg {torchcodec.ffmpeg_major_version}"


# In the order of the tables.
PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, ("fvc_lib.video.decode.clip",), "fvc_lib", decode_ours, pyav_ffmpeg),
        Peer(TORCHCODEC, ("torch", "torchcodec.decoders"), "torchcodec", decode_torchcodec, torchcodec_ffmpeg),
        Peer("torchcodec Resize", ("torch", "torchcodec.transforms"), "torchcodec", decode_torchcodec_resize),
        Peer(DECORD, ("av", "decord"), "decord", decode_decord),
        Peer("OpenCV", ("cv2",), "opencv-python-headless", decode_opencv),
        Peer("imageio-ffmpeg", ("av", "imageio_ffmpeg"), "imageio-ffmpeg", decode_imageio),
        Peer("PyAV sequential", ("av",), "av", decode_pyav),
    )
}
