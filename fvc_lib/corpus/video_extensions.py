"""Which file names in a corpus folder are meant as videos."""

from __future__ import annotations

from pathlib import PurePath

VIDEO_EXTENSIONS = frozenset(
    {
        ".3g2",
        ".3gp", ".264", ".265", ".amv", ".asf", ".avi", ".divx", ".dv", ".f4v", ".flv", ".gif", ".h264", ".h265",
        ".hevc", ".ivf", ".m1v", ".m2ts",
        ".m4s", ".m2v", ".m4v", ".mjpeg", ".mjpg", ".mkv", ".mov", ".mp4", ".mpe", ".mpeg",
        ".mpg", ".mts", ".mxf", ".nut", ".obu", ".ogg", ".ogv", ".qt", ".rm", ".rmvb", ".ts", ".vob", ".webm", ".wmv",
        ".y4m",
    }
)  # fmt: skip


def is_video_name(name: str) -> bool:
    """Whether the extension, in any case, is one of a video container or elementary stream."""
    return PurePath(name).suffix.lower() in VIDEO_EXTENSIONS


def is_hidden(name: str) -> bool:
    """Whether a name is hidden (``.DS_Store``, ``._clip.mp4``): never meant as part of a corpus."""
    return name.startswith(".")
