"""What the packets of a video tell without decoding one: how large they are, where keyframes lie, how the rate runs."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from fvc_lib.video.decode.frame_table import NO_PTS, FrameTable, Seconds, seconds_of

_MOST_SECONDS = 1_000_000  # eleven days: a file that claims more has damaged times


@dataclass(frozen=True, slots=True, kw_only=True)
class PacketFacts:
    """How a video was encoded, as its packets show; of each number none where the packets do not tell it.

    Attributes:
        packet_bytes_mean, packet_bytes_std: size of a packet in bytes and its standard deviation over the video.
        packet_bytes_p10, packet_bytes_median, packet_bytes_p90: the sizes that 10, 50 and 90 of 100 packets are up to.
        key_bytes_ratio: mean size of a keyframe over that of the other frames.
        key_distance_mean, key_distance_max: packets from one keyframe to the next; none with a single keyframe, whose
            group of pictures is as long as the video.
        reordered_share: of all packets, those shown before the one that is decoded before them (B-frames).
        bits_per_second_std, bits_per_second_max: over the whole seconds of the presentation; none below two of them.
    """

    packet_bytes_mean: float | None = None
    packet_bytes_std: float | None = None
    packet_bytes_p10: float | None = None
    packet_bytes_median: float | None = None
    packet_bytes_p90: float | None = None
    key_bytes_ratio: float | None = None
    key_distance_mean: float | None = None
    key_distance_max: float | None = None
    reordered_share: float | None = None
    bits_per_second_std: float | None = None
    bits_per_second_max: float | None = None


def packet_facts(table: FrameTable, time_base: Fraction | None) -> PacketFacts:
    """The facts of ``table``, which holds at least one packet; ``time_base`` is that of its times."""
    low, median, high = np.percentile(table.num_bytes, (10, 50, 90)).tolist()
    of_keys, of_others = table.num_bytes[table.is_key], table.num_bytes[~table.is_key]
    ratio = float(of_keys.mean() / of_others.mean()) if of_keys.size and of_others.size else None
    distances = np.diff(np.flatnonzero(table.is_key))
    has_times = table.stores_pts and not (table.pts == NO_PTS).any()
    rates = _bits_of_whole_seconds(table, time_base)
    return PacketFacts(
        packet_bytes_mean=float(table.num_bytes.mean()),
        packet_bytes_std=float(table.num_bytes.std()),
        packet_bytes_p10=low,
        packet_bytes_median=median,
        packet_bytes_p90=high,
        key_bytes_ratio=ratio,
        key_distance_mean=float(distances.mean()) if distances.size else None,
        key_distance_max=float(distances.max()) if distances.size else None,
        reordered_share=float((np.diff(table.pts) < 0).sum() / table.num_packets) if has_times else None,
        bits_per_second_std=float(rates.std()) if rates.size > 1 else None,
        bits_per_second_max=float(rates.max()) if rates.size > 1 else None,
    )


def _bits_of_whole_seconds(table: FrameTable, time_base: Fraction | None) -> Seconds:
    """Bits of the packets shown in each second but the last, which is seldom a whole one; empty without times."""
    if table.doubt or time_base is None:
        return np.empty(0)
    seconds = seconds_of(table.pts - table.pts.min(), time_base).astype(np.int64)
    if seconds.max() > _MOST_SECONDS:
        return np.empty(0)
    return 8.0 * np.bincount(seconds, weights=table.num_bytes)[:-1]
