"""What the sample corpus consists of: events, their clips, and which of them are manipulated.

Whatever a file's metadata shows (size, rate, length, codec, container, bits per pixel, number of copies) is dealt to
both labels from equal decks, so that no classifier of metadata has anything to learn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from fvc_lib.corpus.sample_encoding import Encoding
from fvc_lib.corpus.sample_fakes import MANIPULATIONS
from fvc_lib.corpus.sample_scenes import generator_for

# Any change that alters a byte of the corpus needs another version: finished corpora are recognised by it.
CORPUS_VERSION = "1"

EVENTS_PER_LABEL = 20
_SIZES = ((240, 180), (176, 240), (256, 144), (208, 208), (288, 216))
_RATES = (12, 15, 20, 24, 30)
_CONTAINERS = (("libx264", "mp4"), ("libx264", "mkv"), ("mpeg4", "avi"), ("mpeg4", "mp4"), ("libvpx-vp9", "webm"))
_BITS_PER_PIXEL = (0.24, 0.3, 0.38, 0.48)
_COPIES = (0, 1, 1, 1, 2)
_COPY_KINDS = ("reencode", "rescale", "crop")

T = TypeVar("T")


@dataclass(frozen=True)
class ClipPlan:
    """One file of the corpus."""

    path: str  # relative to the corpus folder, with '/'
    variant: str  # original, reencode, rescale or crop
    encoding: Encoding


@dataclass(frozen=True)
class EventPlan:
    """One scene, filmed once; its clips are the footage (or its forgery) and near-duplicates of it."""

    name: str  # the group
    label: str
    manipulation: str | None
    width: int
    height: int
    num_frames: int
    clips: tuple[ClipPlan, ...]  # the original first


def plan_events() -> tuple[EventPlan, ...]:
    """All events of the corpus in the order of their names; the same on every call."""
    drafts = [draft for label in ("real", "fake") for draft in _drafts(label)]
    order = generator_for("order", CORPUS_VERSION).permutation(len(drafts))
    events, first_clip = [], 0
    for number, index in enumerate(order):
        events.append(_named(drafts[index], number, first_clip))
        first_clip += len(drafts[index].clips)
    return tuple(events)


def _drafts(label: str) -> list[EventPlan]:
    count = EVENTS_PER_LABEL
    sizes, rates = _deal(_SIZES, count, label, "size"), _deal(_RATES, count, label, "rate")
    seconds = _deal([1.6 + i / count for i in range(count)], count, label, "seconds")
    copies = _deal(_COPIES, count, label, "copies")
    manipulations = _deal(tuple(MANIPULATIONS), count, label, "manipulation")
    num_clips = count + sum(copies)
    containers, bits = _deal(_CONTAINERS, num_clips, label, "codec"), _deal(_BITS_PER_PIXEL, num_clips, label, "bits")
    kinds = iter(_deal(_COPY_KINDS, sum(copies), label, "kind"))
    encodings = zip(containers, bits, strict=True)
    drafts = []
    for i in range(count):
        variants = ["original", *(next(kinds) for _ in range(copies[i]))]
        clips = [ClipPlan("", v, _encoding(next(encodings), rates[i])) for v in variants]
        drafts.append(
            EventPlan(
                name="",
                label=label,
                manipulation=manipulations[i] if label == "fake" else None,
                width=sizes[i][0],
                height=sizes[i][1],
                num_frames=round(rates[i] * seconds[i]),
                clips=tuple(clips),
            )
        )
    return drafts


def _encoding(choice: tuple[tuple[str, str], float], frames_per_second: int) -> Encoding:
    (codec, suffix), bits_per_pixel = choice
    return Encoding(codec, suffix, frames_per_second, bits_per_pixel)


def _named(draft: EventPlan, number: int, first_clip: int) -> EventPlan:
    clips = tuple(
        ClipPlan(f"videos/clip_{first_clip + i:03d}.{clip.encoding.suffix}", clip.variant, clip.encoding)
        for i, clip in enumerate(draft.clips)
    )
    return EventPlan(
        f"event_{number:02d}", draft.label, draft.manipulation, draft.width, draft.height, draft.num_frames, clips
    )


def _deal(cards: Iterable[T], count: int, *seed: str) -> list[T]:
    """``count`` cards, each equally often as far as that goes, in an order of its own for each seed."""
    deck = list(cards)
    dealt = [deck[i % len(deck)] for i in range(count)]
    return [dealt[i] for i in generator_for("deal", CORPUS_VERSION, *seed).permutation(count)]
