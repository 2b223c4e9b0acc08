"""Read a video's packets, and the quantisers, motion vectors and frame types that the decoder exports with frames.

ffmpeg's decoders export less than files hold. With PyAV 18.1, quantisers come from H.264, MPEG-1, MPEG-2, MPEG-4 and
its relatives (per macroblock) and from VP9 (one per frame). Motion vectors come from all of these except VP9. HEVC,
AV1, VP8, ProRes and JPEG export neither. All export frame types. Decoding takes no longer with the export.
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
# H.264 with 10 bit goes down to -12. For MPEG, ffmpeg exports twice the scale code, which is at most 31; MPEG-2 has
# another scale, up to 112.
_LARGEST_QP = {"VP9": 255.0, "H264": 51.0, "MPEG2": 62.0}
_MACROBLOCK = 16
_MOST_VECTORS = 4096  # per frame; if there are more, every second one is kept, or every third ...


def export(source: VideoSource) -> None:
    """Make the decoder of ``source`` export quantisers and motion vectors; call it before the first decode."""
    context = source.stream.codec_context
    context.options = {**context.options, **_EXPORT}
    context.flags2 = int(context.flags2) | int(Flags2.export_mvs)


def stream_of(source: VideoSource, table: FrameTable) -> Stream:
    """Return the packets of ``table`` as a ``Stream``. Times are NaN where they may not be those of the frames."""
    seconds = np.full(table.num_packets, np.nan)
    if not table.doubt and source.stream.time_base:
        seconds[table.is_shown] = seconds_of(table.pts[table.is_shown], source.stream.time_base)
    return Stream(source.codec_name, table.num_bytes, table.is_key, seconds)


class FrameNotes:
    """Collects the quantisers, motion vectors and types of chosen frames, as the decoder exports them."""

    def __init__(self) -> None:
        self._types = ""
        self._qp: list[tuple[float, float]] = []
        self._intra: list[float] = []
        self._motion: list[Float32] = []

    def observe(self, frame: VideoFrame) -> None:
        """Add the exported data of a frame. Its source must have been passed to ``export`` before."""
        side_data = side_data_of(frame)
        letter = PictureType(frame.pict_type).name
        letter = letter if letter in {"I", "P", "B"} else "?"
        parameters, vectors = side_data.get("VIDEO_ENC_PARAMS"), side_data.get("MOTION_VECTORS")
        self._types += letter
        self._qp.append(_quantisers(parameters) if isinstance(parameters, VideoEncParams) else (np.nan, np.nan))
        self._intra.append(np.nan)
        if isinstance(vectors, MotionVectors):
            listed = vectors.to_ndarray()
            self._motion.append(_motion(listed))
            if letter == "P":
                self._intra[-1] = _intra_share(listed, frame.width, frame.height)

    def added_to(self, stream: Stream) -> Stream:
        """Return a copy of ``stream`` with the collected data."""
        return replace(
            stream,
            frame_types=self._types,
            qp=np.array(self._qp, np.float32).reshape(-1, 2),
            intra=np.array(self._intra, np.float32),
            motion=np.concatenate([np.empty((0, 2), np.float32), *self._motion]),
        )


def _quantisers(parameters: VideoEncParams) -> tuple[float, float]:
    """Return mean and standard deviation of the quantiser over a frame's blocks.

    Both are shares of the codec's largest quantiser. The deviation is NaN if only the frame's quantiser is exported.
    """
    largest = _LARGEST_QP.get(parameters.codec_type.name, np.nan)
    if not parameters.nb_blocks:
        return parameters.qp / largest, np.nan
    # Each block has its place, its size and, last, its offset from the frame's quantiser
    # (libavutil/video_enc_params.h). The stub does not declare the buffer.
    numbers = np.frombuffer(parameters, np.int32, offset=parameters.blocks_offset)  # type: ignore[call-overload]
    offsets = numbers.reshape(parameters.nb_blocks, -1)[:, 4]
    return float(parameters.qp + offsets.mean()) / largest, float(offsets.std()) / largest


def _motion(vectors: np.ndarray) -> Float32:
    """Return float32 (K, 2), the motion of K blocks, in pixels right and down, from the earlier frame to the later."""
    kept = vectors[:: -(-len(vectors) // _MOST_VECTORS) or 1]
    # A vector points from a block to its match, in an earlier frame (source below 0) or a later one.
    towards = np.sign(kept["source"]) / np.maximum(kept["motion_scale"], 1)
    return np.stack([kept["motion_x"] * towards, kept["motion_y"] * towards], axis=1).astype(np.float32)


def _intra_share(vectors: np.ndarray, width: int, height: int) -> float:
    """Return the share of a P frame's area that is not predicted from another frame."""
    area = -(-width // _MACROBLOCK) * -(-height // _MACROBLOCK) * _MACROBLOCK**2
    return float(max(0.0, 1 - (vectors["w"].astype(np.int64) * vectors["h"]).sum() / area))
