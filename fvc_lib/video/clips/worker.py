"""What is done with one untrusted video, in a worker process: decode its clip, or every window of it, into a file.

Imported by every worker, so it imports only what that needs: no polars, no torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fvc_lib.services.clip_settings import PLAIN_VIEW, View
from fvc_lib.services.errors import UsageError
from fvc_lib.services.records.digests import write_document
from fvc_lib.video.clips.clip_file import Pixels, write_clip_file
from fvc_lib.video.clips.store import crop_code, decode_code
from fvc_lib.video.decode.clip import decode_clip
from fvc_lib.video.decode.file_parts import sha256_of_video
from fvc_lib.video.decode.source import UnreadableVideo, VideoError
from fvc_lib.video.decode.views import CropError, SeenClip, decode_view
from fvc_lib.video.decode.windows import decode_windows
from fvc_lib.video.reencode import is_reencoded, recipe_named, reencode, reencoded


def make_original(item: dict[str, Any]) -> dict[str, Any]:
    """Decode the video at ``source`` into the clip file ``target``.

    Args:
        item: ``source`` and ``target`` (paths), ``content_sha256`` (of the video as it was indexed), ``num_frames``
            and ``fixed_size``; ``view`` (of a ``View``); ``code`` (the hash under which ``target`` is stored, of the
            code that makes clips); ``crop`` (likewise, as ``crop_code`` has it); ``seen`` (where to
            put what the clips show; empty: nowhere). An empty ``content_sha256`` is not compared; with ``recipe`` the
            video is written anew by that one first, beside ``target``, and goes again; ``encoded`` (the recipe by which
            the run re-encodes every video, the cache that keeps those, and whether this one shall be kept there too).

    Returns:
        ``code_changed`` when this process has loaded other code than the one ``target`` is named after; else
        ``video_error``: what is wrong with the video, in words; ``crop_error``: what is wrong with the function that
        crops; or ``write_error``: errno, text and file of the operating system when the clip cannot be written, which
        is no fault of the video. Nothing when all is well.
    """
    view = View(**item["view"])
    if item["code"] != decode_code(view):
        return {"code_changed": True}
    try:
        frames, seen = _decode(item, view)
        if item["crop"] != crop_code(view):  # afterwards: a user's file may be edited at any time
            return {"code_changed": True}
    except VideoError as error:
        return {"video_error": str(error)}
    except (CropError, UsageError) as error:
        return {"crop_error": f"{item['source']!r}: {error}"}
    try:
        if item["seen"]:  # before the clip: one that is there has it
            write_document(Path(item["seen"]), {"clips": [asdict(each) for each in seen]})
        write_clip_file(Path(item["target"]), frames)
    except OSError as error:
        return {"write_error": [error.errno, error.strerror, error.filename or item["target"]]}
    return {}


def make_windows(item: dict[str, Any]) -> dict[str, Any]:
    """Decode the whole video at ``source``; every window's frames go into the file ``target``, one behind the other.

    Args:
        item: as for ``make_original``; ``target`` is raw uint8 (F, 3, S, S).

    Returns:
        The fields of ``Windows``, arrays as lists, and ``num_stored``, F; or what is wrong,
        as ``make_original``.
    """
    view, side, num_stored = View(**item["view"]), item["fixed_size"], 0
    if item["code"] != decode_code(view):
        return {"code_changed": True}
    try:
        with _written_anew(item) as path, Path(item["target"]).open("wb") as stream:

            def store(number: int, frame: Pixels) -> None:
                nonlocal num_stored
                stream.seek(number * frame.nbytes)
                stream.write(frame.data)
                num_stored = max(num_stored, number + 1)

            found = decode_windows(path, item["num_frames"], side, view, store)
    except VideoError as error:
        return {"video_error": str(error)}
    except (CropError, UsageError) as error:
        return {"crop_error": f"{item['source']!r}: {error}"}
    except OSError as error:
        return {"write_error": [error.errno, error.strerror, error.filename or item["target"]]}
    lists = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(found).items()}
    return {**lists, "num_stored": num_stored}


def as_indexed(item: dict[str, Any]) -> Path:
    """The path ``source``; ``UnreadableVideo`` where its content is not ``content_sha256``, which may be empty."""
    path = Path(item["source"])
    try:
        content = sha256_of_video(path) if item["content_sha256"] else ""
    except OSError as error:
        raise UnreadableVideo(path, (error.strerror or type(error).__name__).lower()) from error
    if content != item["content_sha256"]:
        # Stored under the id of what was indexed, it would be taken for that by every later run.
        raise UnreadableVideo(path, "its content has changed since it was indexed; build the index again")
    return path


@contextmanager
def _written_anew(item: dict[str, Any]) -> Iterator[Path]:
    """The video as its recipes make it: from the cache, or beside the target for as long as it is looked at."""
    path = as_indexed(item)
    recipe, (encoded, *cache) = item.get("recipe"), item.get("encoded") or ("",)
    if encoded and not recipe and (cache[1] or is_reencoded(path, encoded, cache[0])):
        yield reencoded(path, encoded, cache[0])
        return
    made: list[Path] = []
    try:
        for name in filter(None, (recipe, encoded)):
            made.append(Path(item["target"]).with_suffix(f".{len(made)}.mp4"))
            reencode(path, made[-1], recipe_named(name))
            path = made[-1]
        yield path
    finally:
        for each in made:
            each.unlink(missing_ok=True)


def _decode(item: dict[str, Any], view: View) -> tuple[Pixels, list[SeenClip]]:
    with _written_anew(item) as path:
        if view == PLAIN_VIEW:
            return decode_clip(path, item["num_frames"], item["fixed_size"]).frames, []
        return decode_view(path, item["num_frames"], item["fixed_size"], view)
