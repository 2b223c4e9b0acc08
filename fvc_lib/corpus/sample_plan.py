"""What the sample corpus consists of: events, their clips, and which of them are manipulated.

Whatever a file's metadata shows (size, rate, length, codec, container, bits per pixel) is drawn without regard to the
label. Drawn, not dealt in equal shares: a cross-validated classifier of perfectly balanced metadata scores far *below*
chance (AUC 0.2 to 0.3 measured), because what one fold has too much of, its training part has too little of. Over seeds
the control of an independent draw scatters about 0.5; ``DESIGN_SEED`` was picked out of 40 for lying close to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from fvc_lib.corpus.sample_encoding import Encoding
from fvc_lib.corpus.sample_fakes import MANIPULATIONS
from fvc_lib.corpus.sample_scenes import generator_for

# Any change that alters a byte of the corpus needs another version: finished corpora are recognised by it.
CORPUS_VERSION = "2"
DESIGN_SEED = 15

EVENTS_PER_LABEL = 20
_SIZES = ((240, 180), (176, 240), (256, 144), (208, 208), (288, 216))
_RATES = (12, 15, 20, 24, 30)
_CONTAINERS = (("libx264", "mp4"), ("libx264", "mkv"), ("mpeg4", "avi"), ("mpeg4", "mp4"), ("libvpx-vp9", "webm"))
_SECONDS = (1.6, 2.6)
_BITS_PER_PIXEL = (0.22, 0.28, 0.35, 0.42)
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
    order = generator_for("order", DESIGN_SEED).permutation(len(drafts))
    events, first_clip = [], 0
    for number, index in enumerate(order):
        events.append(_named(drafts[index], number, first_clip))
        first_clip += len(drafts[index].clips)
    return tuple(events)


def _drafts(label: str) -> list[EventPlan]:
    manipulations = _deal(tuple(MANIPULATIONS), label, "manipulation")
    copies = _deal(_COPIES, label, "copies")
    return [_draft(label, manipulations[i], copies[i], i) for i in range(EVENTS_PER_LABEL)]


def _draft(label: str, manipulation: str, num_copies: int, number: int) -> EventPlan:
    rng = generator_for("draft", DESIGN_SEED, label, number)
    width, height = _SIZES[rng.integers(len(_SIZES))]
    frames_per_second = _RATES[rng.integers(len(_RATES))]
    variants = ["original", *(_COPY_KINDS[k] for k in rng.permutation(len(_COPY_KINDS))[:num_copies])]
    return EventPlan(
        name="",
        label=label,
        manipulation=manipulation if label == "fake" else None,
        width=width,
        height=height,
        num_frames=round(frames_per_second * rng.uniform(*_SECONDS)),
        clips=tuple(ClipPlan("", variant, _encoding(rng, frames_per_second)) for variant in variants),
    )


def _encoding(rng: np.random.Generator, frames_per_second: int) -> Encoding:
    codec, suffix = _CONTAINERS[rng.integers(len(_CONTAINERS))]
    return Encoding(codec, suffix, frames_per_second, _BITS_PER_PIXEL[rng.integers(len(_BITS_PER_PIXEL))])


def _named(draft: EventPlan, number: int, first_clip: int) -> EventPlan:
    clips = tuple(
        ClipPlan(f"videos/clip_{first_clip + i:03d}.{clip.encoding.suffix}", clip.variant, clip.encoding)
        for i, clip in enumerate(draft.clips)
    )
    return EventPlan(
        f"event_{number:02d}", draft.label, draft.manipulation, draft.width, draft.height, draft.num_frames, clips
    )


def _deal(cards: Sequence[T], *seed: str) -> list[T]:
    """One card per event of a label, each equally often as far as that goes, in an order of its own for each seed."""
    dealt = [cards[i % len(cards)] for i in range(EVENTS_PER_LABEL)]
    return [dealt[i] for i in generator_for("deal", DESIGN_SEED, *seed).permutation(EVENTS_PER_LABEL)]
