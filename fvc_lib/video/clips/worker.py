"""What is done with one untrusted video, in a worker process: decode its clip and put it into the store.

Imported by every worker, so it imports only what that needs: no polars, no torch.
"""

from pathlib import Path
from typing import Any

from fvc_lib.services.atomic_files import sha256_of_file
from fvc_lib.services.code_version import code_hash
from fvc_lib.video.clips.store import Pixels, write_clip_file
from fvc_lib.video.decode.clip import decode_clip
from fvc_lib.video.decode.source import UnreadableVideo, VideoError


def make_original(item: dict[str, Any]) -> dict[str, Any]:
    """Decode the video at ``source`` into the clip file ``target``.

    Args:
        item: ``source`` and ``target`` (paths), ``content_sha256`` (of the video as it was indexed), ``num_frames``
            and ``fixed_size``; ``code`` (the hash under which ``target`` is stored, of the code that makes clips).

    Returns:
        ``code_changed`` when this process has loaded other code than the one ``target`` is named after; else
        ``video_error``: what is wrong with the video, in words; or ``write_error``: errno, text and file of the
        operating system when the clip cannot be written, which is no fault of the video. Nothing when all is well.
    """
    if item["code"] != code_hash("fvc_lib.video.decode.clip", "fvc_lib.video"):
        return {"code_changed": True}
    try:
        frames = _decode(Path(item["source"]), item["content_sha256"], item["num_frames"], item["fixed_size"])
    except VideoError as error:
        return {"video_error": str(error)}
    try:
        write_clip_file(Path(item["target"]), frames)
    except OSError as error:
        return {"write_error": [error.errno, error.strerror, error.filename or item["target"]]}
    return {}


def _decode(path: Path, content_sha256: str, num_frames: int, fixed_size: int) -> Pixels:
    try:
        content = sha256_of_file(path)
    except OSError as error:
        raise UnreadableVideo(path, (error.strerror or type(error).__name__).lower()) from error
    if content != content_sha256:
        # Stored under the id of what was indexed, it would be taken for that by every later run.
        raise UnreadableVideo(path, "its content has changed since it was indexed; build the index again")
    return decode_clip(path, num_frames, fixed_size).frames
