from __future__ import annotations

import av
import pytest

from benchmarks.decode.bitstream import is_reference, nal_length_bytes
from benchmarks.decode.videos import Encoding, Video, make_video

X264 = Encoding("libx264", 96, 64, 40, 20, 200, (("preset", "veryfast"), ("bf", "3")))
X265 = Encoding("libx265", 96, 64, 40, 20, 200, (("preset", "superfast"), ("x265-params", "log-level=error")))
REMUXED = {".mp4": "mp4", ".mkv": "matroska", ".ts": "mpegts"}


def remuxed(path, suffix):
    target = path.with_suffix(f".again{suffix}")
    with av.open(str(path)) as source, av.open(str(target), "w", format=REMUXED[suffix]) as output:
        added = output.add_stream_from_template(source.streams.video[0], opaque=True)
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = added
                output.mux(packet)
    return target


def reference_times(path):
    """pts of the packets that the headers call references, and of all."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        codec = stream.codec_context.codec.canonical_name
        length_bytes = nal_length_bytes(codec, stream.codec_context.extradata or b"")
        packets = [(packet.pts, bytes(packet)) for packet in container.demux(stream) if packet.size]
    return {pts for pts, content in packets if is_reference(codec, content, length_bytes)}, {pts for pts, _ in packets}


def times_that_the_decoder_keeps(path):
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.skip_frame = "NONREF"
        return {frame.pts for frame in container.decode(stream)}


@pytest.mark.parametrize("suffix", REMUXED)
@pytest.mark.parametrize("encoding", [X264, X265], ids=["h264", "hevc"])
def test_references_are_what_ffmpegs_decoder_keeps_when_told_to_skip_the_others(tmp_path, encoding, suffix):
    path = remuxed(make_video(Video("small", encoding), tmp_path), suffix)
    references, everything = reference_times(path)
    assert references == times_that_the_decoder_keeps(path)
    assert len(everything) == 40
    assert 10 < len(references) < 35
