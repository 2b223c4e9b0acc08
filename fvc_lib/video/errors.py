"""What can be wrong with a video file. Each error names the file, a short reason for counting, and the remedy."""

# ruff: noqa: N818 - the class says what the video is; "UnreadableVideoError" would say no more

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from fvc_lib.services.errors import FvcError


class VideoError(FvcError):
    """A video that cannot be used: ``path`` says which, ``reason`` (a small vocabulary) and ``detail`` why.

    ``remedy`` is what usually helps for the reason, or what helps with this very file where that is known.
    """

    reason: ClassVar[str] = "unreadable"
    remedy = "Fetch or export the file again."

    def __init__(self, path: Path, detail: str, remedy: str | None = None) -> None:
        self.path = path
        self.detail = detail
        if remedy is not None:
            self.remedy = remedy
        super().__init__(path, detail, remedy)  # what pickling hands to the copy

    def __str__(self) -> str:
        return f"{str(self.path)!r}: {self.reason}: {self.detail}. {self.remedy}"


class UnreadableVideo(VideoError):
    """No container that can be read: missing, empty, no permission, no media at all, or encrypted."""

    reason = "unreadable"
    remedy = "Fetch the file again and check that a player opens it."


class NoVideoStream(VideoError):
    """A media file without moving pictures: audio, subtitles, or only a cover picture."""

    reason = "no_video"
    remedy = "Leave the file out, or replace it by one with a video track."


class TruncatedVideo(VideoError):
    """Frames that the container promises are not there."""

    reason = "truncated"
    remedy = "Fetch the file again, or decode with on_truncated='resample' to use the frames that exist."


class CorruptVideo(VideoError):
    """The container opens, but its frames cannot be decoded as they were encoded."""

    reason = "corrupt"
    remedy = "Fetch the file again, or re-encode it from its source."


class RefusedVideo(VideoError):
    """A file that could be opened but is refused because decoding it would need an absurd amount of memory."""

    reason = "refused"
    remedy = "Re-encode the file to a smaller frame, or leave it out."
