"""Settings that choose the frames of a clip, and the part of the picture that they show."""

import re
from dataclasses import dataclass

_SAMPLING, _FIT = re.compile(r"uniform|window:([1-9][0-9]{0,3})"), re.compile(r"letterbox|crop(?::(0?\.[1-9][0-9]*))?")


@dataclass(frozen=True)
class View:
    """The rule by which clips are cut from a video: frames, picture and number.

    Attributes:
        sampling: ``uniform`` (spread over the video) or ``window:STRIDE`` (every STRIDE-th frame of a stretch).
        fit: ``letterbox`` (the whole picture, black bars), ``crop`` (the shorter side resized to the clip's, the middle
            cut out) or ``crop:SHARE`` (the shorter side resized to the clip's side / SHARE; 0.875 is usual).
        clips: number of clips per video.
        crop: name in ``CROPS`` of the function that finds the part to show; empty: ``fit``
            is used.
        margin: share of its side by which that part is enlarged.

    Raises:
        ValueError: the sampling or fit is unknown.
    """

    sampling: str = "uniform"
    fit: str = "letterbox"
    clips: int = 1
    crop: str = ""
    margin: float = 0.0

    def __post_init__(self) -> None:
        known_sampling(self.sampling), known_fit(self.fit)

    @property
    def stride(self) -> int:
        """The distance between the frames of a clip, in frames of the video, for ``window:STRIDE``; else 0."""
        match = _SAMPLING.fullmatch(self.sampling)
        return int(match[1] or 0) if match else 0

    def resized(self, side: int) -> int:
        """Return the shorter side of the picture before ``side`` is cut out of its middle."""
        match = _FIT.fullmatch(self.fit)
        return int(side / float((match and match[1]) or 1))


def known_sampling(text: str) -> str:
    """Return ``text``; raise ``ValueError`` unless it is a sampling."""
    if not _SAMPLING.fullmatch(text):
        raise ValueError("wanted uniform, or window:STRIDE such as window:4")
    return text


def known_fit(text: str) -> str:
    """Return ``text``; raise ``ValueError`` unless it is a fit."""
    if not _FIT.fullmatch(text):
        raise ValueError("wanted letterbox, crop, or crop:SHARE such as crop:0.875")
    return text


PLAIN_VIEW = View()  # the whole picture, spread over the video


@dataclass(frozen=True)
class ClipSettings:
    """Number of frames of a clip, their side in pixels, and the view."""

    num_frames: int
    side: int
    view: View = View()
