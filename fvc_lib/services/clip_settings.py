"""How clips are taken of videos: how many frames, which of them, and which part of the picture is seen."""

import re
from dataclasses import dataclass

_SAMPLING, _FIT = re.compile(r"uniform|window:([1-9][0-9]{0,3})"), re.compile(r"letterbox|crop(?::(0?\.[1-9][0-9]*))?")


@dataclass(frozen=True)
class View:
    """Which frames of a video make a clip, and which part of them is seen.

    Attributes:
        sampling: ``uniform`` (spread over the video) or ``window:STRIDE`` (neighbours, every STRIDE-th frame).
        fit: ``letterbox`` (the whole picture, black bars), ``crop`` (the shorter side resized to the clip's, the middle
            cut out) or ``crop:SHARE`` (resized to the clip's side / SHARE, as most publishers do with 0.875).
        clips: of one video.
        crop: what finds the part of the picture that is seen, by its name in ``CROPS``; empty: ``fit`` says.
        margin: the found part's side grows by this share.

    Raises:
        ValueError: another sampling or fit.
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
        """Frames from one to the next within a window; 0: no window."""
        match = _SAMPLING.fullmatch(self.sampling)
        return int(match[1] or 0) if match else 0

    def resized(self, side: int) -> int:
        """The shorter side of the picture before ``side`` is cut out of its middle."""
        match = _FIT.fullmatch(self.fit)
        return int(side / float((match and match[1]) or 1))


def known_sampling(text: str) -> str:
    """``text``, where it says how frames are sampled; else ``ValueError``."""
    if not _SAMPLING.fullmatch(text):
        raise ValueError("wanted uniform, or window:STRIDE such as window:4")
    return text


def known_fit(text: str) -> str:
    """``text``, where it says how frames are fitted into a square; else ``ValueError``."""
    if not _FIT.fullmatch(text):
        raise ValueError("wanted letterbox, crop, or crop:SHARE such as crop:0.875")
    return text


PLAIN_VIEW = View()  # the whole picture, spread over the video: what clips showed before there was a choice


@dataclass(frozen=True)
class ClipSettings:
    """How clips are taken of a video: so many frames of ``side`` x ``side`` pixels, as ``view`` says."""

    num_frames: int
    side: int
    view: View = View()
