"""The floor: what decoding costs when the packets that must be decoded lie ready and nothing else is done.

A wanted frame needs its keyframe, the reference pictures between, and itself. These packets are found and copied
beforehand; what is timed is a fresh decoder with one thread that gets them one after another, and our own scaler on the
wanted frames. No reader that returns these frames through the same decoder and scaler can cost less.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import av
import numpy as np
from av.codec.context import ThreadType
from av.video.codeccontext import VideoCodecContext

from benchmarks.decode.bitstream import is_reference, nal_length_bytes
from benchmarks.decode.peers import Pixels, fitted, uniform_places
from fvc_lib.video.decode.pixels import FrameConverter


@dataclass(frozen=True)
class PacketFacts:
    """One packet in decoding order."""

    pts: int
    is_key: bool
    is_reference: bool


def decoding_start(packets: list[PacketFacts], position: int) -> int:
    """Where decoding must start for the frame at ``position``.

    The keyframe before it, or one earlier for a leading picture of an open group: shown before its keyframe.
    """
    keys = [number for number in range(position + 1) if packets[number].is_key] or [0]
    leads = packets[position].pts < packets[keys[-1]].pts
    return keys[-2] if leads and len(keys) > 1 else keys[-1]


def necessary_runs(packets: list[PacketFacts], wanted: set[int]) -> list[list[int]]:
    """Positions of the packets that must be decoded for the frames at ``wanted``, as runs from a keyframe each."""
    runs: dict[int, set[int]] = {}
    for position in sorted(wanted):
        start = decoding_start(packets, position)
        start = next((key for key, run in runs.items() if key <= start <= max(run)), start)
        needed = {
            number
            for number in range(start, position)
            if packets[number].is_reference and packets[number].pts >= packets[start].pts
        }
        runs.setdefault(start, set()).update(needed | {position})
    return [sorted(run) for _, run in sorted(runs.items())]


class Floor:
    """The prepared packets of one clip, to be decoded as often as one likes."""

    def __init__(self, path: Path, num_frames: int, size: int) -> None:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            context = stream.codec_context
            self._decoder_name, self._extradata = context.codec.name, context.extradata
            self._shape = fitted(stream.width, stream.height, size)
            # Kept as they were read: a packet made from bytes lacks the zeros behind its end that decoders rely on.
            packets = [packet for packet in container.demux(stream) if packet.size]
            codec = str(context.codec.canonical_name)
        length_bytes = nal_length_bytes(codec, self._extradata or b"") if codec in ("h264", "hevc") else 0
        facts = [
            PacketFacts(cast(int, packet.pts), packet.is_keyframe, is_reference(codec, bytes(packet), length_bytes))
            for packet in packets
        ]
        order = sorted(range(len(facts)), key=lambda position: facts[position].pts)
        self._places = {facts[order[place]].pts: place for place in uniform_places(len(order), num_frames)}
        wanted = {order[place] for place in self._places.values()}
        self._runs = [[packets[position] for position in run] for run in necessary_runs(facts, wanted)]
        self._all_places = uniform_places(len(order), num_frames)
        self.num_packets = len(facts)

    @property
    def num_necessary(self) -> int:
        """Packets that must be decoded."""
        return sum(len(run) for run in self._runs)

    def decode(self) -> Pixels:
        """uint8 (T, 3, h, w), the same as ``decode_clip`` gives inside its borders."""
        context = cast(VideoCodecContext, av.CodecContext.create(self._decoder_name, "r"))
        context.extradata = self._extradata
        context.thread_count, context.thread_type = 1, ThreadType.NONE
        width, height = self._shape
        taken: dict[int, Pixels] = {}
        converter = FrameConverter(max(self._shape), None)
        square = np.empty((3, max(self._shape), max(self._shape)), np.uint8)
        for run in self._runs:
            for packet in [*run, None]:
                for frame in context.decode(packet):
                    place = self._places.get(cast(int, frame.pts))
                    if place is not None:
                        converter.convert(frame, square)
                        box = converter.content_box(frame)
                        taken[place] = square[:, box.top : box.top + height, box.left : box.left + width].copy()
            context.flush_buffers()
        return np.stack([taken[place] for place in self._all_places])
