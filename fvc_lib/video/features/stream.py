"""What a file tells of a video besides its pixels: its packets, and what the decoder says of the frames it puts out.

ffmpeg's decoders export less than the files hold. Measured with PyAV 18.1: quantisers come of H.264, MPEG-1, MPEG-2,
MPEG-4 and its relatives (of each macroblock) and of VP9 (one of each frame); motion vectors of all these but VP9; of
HEVC, AV1, VP8, ProRes and JPEG neither. The type of a frame is told of all. Decoding takes no longer for it.
"""

from dataclasses import replace

import numpy as np
from av.codec.context import Flags2
from av.sidedata.encparams import VideoEncParams
from av.sidedata.motionvectors import MotionVectors
from av.video.frame import PictureType, VideoFrame

from fvc_lib.video.decode.frame_table import FrameTable, seconds_of
from fvc_lib.video.decode.pixels import side_data_of
from fvc_lib.video.decode.source import VideoSource
from fvc_lib.video.features.family import Float32, Stream

_EXPORT = {"export_side_data": "venc_params"}
# Of H.264 with 10 bit the smallest is -12. Of MPEG ffmpeg tells twice the scale's code, which is at most 31; MPEG-2 has
# another scale, that goes on to 112.
_LARGEST_QP = {"VP9": 255.0, "H264": 51.0, "MPEG2": 62.0}
_MACROBLOCK = 16
_MOST_VECTORS = 4096  # of a frame; of more only every second is kept, or third ...


def export(source: VideoSource) -> None:
    """Have the decoder of ``source`` tell quantisers and motion vectors with each frame; before the first decode."""
    context = source.stream.codec_context
    context.options = {**context.options, **_EXPORT}
    context.flags2 = int(context.flags2) | int(Flags2.export_mvs)


def stream_of(source: VideoSource, table: FrameTable) -> Stream:
    """What the packets of ``table`` tell; times only where they are sure to be those of the frames."""
    seconds = np.full(table.num_packets, np.nan)
    if not table.doubt and source.stream.time_base:
        seconds[table.is_shown] = seconds_of(table.pts[table.is_shown], source.stream.time_base)
    return Stream(source.codec_name, table.num_bytes, table.is_key, seconds)


class FrameNotes:
    """Collects what the decoder says of chosen frames."""

    def __init__(self) -> None:
        self._types = ""
        self._qp: list[tuple[float, float]] = []
        self._intra: list[float] = []
        self._motion: list[Float32] = []

    def observe(self, frame: VideoFrame) -> None:
        """Take note of a frame whose source was told to ``export``."""
        told = side_data_of(frame)
        letter = PictureType(frame.pict_type).name
        letter = letter if letter in {"I", "P", "B"} else "?"
        parameters, vectors = told.get("VIDEO_ENC_PARAMS"), told.get("MOTION_VECTORS")
        self._types += letter
        self._qp.append(_quantisers(parameters) if isinstance(parameters, VideoEncParams) else (np.nan, np.nan))
        self._intra.append(np.nan)
        if isinstance(vectors, MotionVectors):
            listed = vectors.to_ndarray()
            self._motion.append(_motion(listed))
            if letter == "P":
                self._intra[-1] = _intra_share(listed, frame.width, frame.height)

    def added_to(self, stream: Stream) -> Stream:
        """``stream`` with what was observed."""
        return replace(
            stream,
            frame_types=self._types,
            qp=np.array(self._qp, np.float32).reshape(-1, 2),
            intra=np.array(self._intra, np.float32),
            motion=np.concatenate([np.empty((0, 2), np.float32), *self._motion]),
        )


def _quantisers(told: VideoEncParams) -> tuple[float, float]:
    """Mean and standard deviation over a frame's blocks, as shares of the codec's largest quantiser."""
    largest = _LARGEST_QP.get(told.codec_type.name, np.nan)
    if not told.nb_blocks:
        return told.qp / largest, np.nan
    # Of each block place, size and, last, what it adds to the frame's own (libavutil/video_enc_params.h).
    # The stub does not say that it is a buffer.
    numbers = np.frombuffer(told, np.int32, offset=told.blocks_offset)  # type: ignore[call-overload]
    added = numbers.reshape(told.nb_blocks, -1)[:, 4]
    return float(told.qp + added.mean()) / largest, float(added.std()) / largest


def _motion(vectors: np.ndarray) -> Float32:
    """(K, 2): how far, in pixels right and down, what a block shows has moved from the earlier frame to the later."""
    kept = vectors[:: -(-len(vectors) // _MOST_VECTORS) or 1]
    # A vector points from a block to where it is found, in a frame before (source below 0) or behind.
    towards = np.sign(kept["source"]) / np.maximum(kept["motion_scale"], 1)
    return np.stack([kept["motion_x"] * towards, kept["motion_y"] * towards], axis=1).astype(np.float32)


def _intra_share(vectors: np.ndarray, width: int, height: int) -> float:
    """Of a P frame, the share of its area that is predicted from no other frame."""
    area = -(-width // _MACROBLOCK) * -(-height // _MACROBLOCK) * _MACROBLOCK**2
    return float(max(0.0, 1 - (vectors["w"].astype(np.int64) * vectors["h"]).sum() / area))
