"""Decode one untrusted video in a worker process, and write its clips, or windows (overlapping clips along the video).

Every worker process imports this module, so it imports neither polars nor torch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fvc_lib.services.errors import UsageError
from fvc_lib.services.records.digests import write_document
from fvc_lib.services.registry import PLAIN_VIEW, View
from fvc_lib.video.clips.store import Pixels, crop_code, decode_code, write_clip_file
from fvc_lib.video.decode.clip import decode_clip
from fvc_lib.video.decode.source import UnreadableVideo, VideoError, digest_of_video
from fvc_lib.video.decode.views import CropError, SeenClip, decode_view, decode_windows
from fvc_lib.video.reencode import recipe_named, reencode, reencoded

Item = dict[str, Any]


def make_original(item: Item, more: Callable[[Path], dict[str, Any]] | None = None) -> dict[str, Any]:
    """Decode one video, the path ``source`` in ``item``, into the clip file ``target``.

    Args:
        item: a mapping with ``source`` and ``target`` (paths), ``num_frames``, ``fixed_size``, and

            * ``content_sha256``: hash of the video when it was indexed; empty: the video is not compared with it.
            * ``view``: the fields of a ``View``.
            * ``code``, ``crop``: results of ``decode_code`` and ``crop_code`` in the process that sent the item.
            * ``seen``: path of the JSON file that records which part of the video the clips show; empty: none.
            * ``recipe``: name of a recipe (way to re-encode) that is applied only in this call, into a temporary file;
              empty: none.
            * ``encoded``: a list (name of the recipe of the run, cache folder for re-encoded videos). This recipe is
              applied after ``recipe``. With an empty folder the result is a temporary file. Empty list: none.
        more: function of the path of the decoded file, re-encoded if a recipe is named; None: no function.

    Returns:
        On success the result of ``more``, or an empty mapping without it. Otherwise one key:

            * ``code_changed``: the code in this process differs from ``code`` or ``crop``.
            * ``video_error``: why the video cannot be decoded.
            * ``crop_error``: why the function that crops failed.
            * ``write_error``: errno, message and file of the failed write.
    """
    view = View(**item["view"])

    def make() -> dict[str, Any]:
        with _prepared(item) as path:
            if view == PLAIN_VIEW:
                frames = decode_clip(path, item["num_frames"], item["fixed_size"]).frames
                seen = list[SeenClip]()
            else:
                frames, seen = decode_view(path, item["num_frames"], item["fixed_size"], view)
            found = more(path) if more else {}
        if item["crop"] != crop_code(view):  # after decoding: a user may edit its file at any time
            return {"code_changed": True}
        if item["seen"]:  # written before the clip, so that every clip has its record
            write_document(Path(item["seen"]), {"clips": [asdict(clip) for clip in seen]})
        write_clip_file(Path(item["target"]), frames)
        return found

    return _reported(item, make)


def make_windows(item: Item, more: Callable[[Path], dict[str, Any]] | None = None) -> dict[str, Any]:
    """Decode a whole video, and write the frames of its clips and windows to one file of raw pixels.

    Windows are overlapping clips along the whole video.

    Args:
        item: a mapping with the keys that ``make_original`` describes. ``source`` is the path of the video. ``target``
            is the file to write: raw pixels, uint8 (F, 3, S, S), without a header.
        more: function of the path of the decoded file, which returns further results; None: no function.

    Returns:
        On success, a mapping with the fields of ``Windows`` (arrays as lists), ``num_stored`` (the number F of frames
        in ``target``), and the entries of the result of ``more``. On failure, a mapping with one key that names the
        error; ``make_original`` lists these keys.
    """

    def make() -> dict[str, Any]:
        with _prepared(item) as path, Path(item["target"]).open("wb") as stream:

            def store(number: int, frame: Pixels) -> None:
                stream.seek(number * frame.nbytes)
                stream.write(np.ascontiguousarray(frame).data)  # a crop is a view

            windows = decode_windows(path, item["num_frames"], item["fixed_size"], View(**item["view"]), store)
            found = more(path) if more else {}
        values = vars(windows).items()
        lists = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values}
        return {**lists, **found, "num_stored": int(windows.stored.max()) + 1}

    return _reported(item, make)


def _reported(item: Item, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call ``make`` and return its result; turn an expected error into a mapping from its kind to its details.

    The kinds are ``video_error``, ``crop_error`` and ``write_error``. If the code in this process differs from ``code``
    in ``item``, ``make`` is not called, and the result is ``{"code_changed": True}``.
    """
    if item["code"] != decode_code(View(**item["view"])):
        return {"code_changed": True}
    try:
        return make()
    except VideoError as error:
        return {"video_error": str(error)}
    except (CropError, UsageError) as error:
        return {"crop_error": f"{item['source']!r}: {error}"}
    except OSError as error:
        return {"write_error": [error.errno, error.strerror, error.filename or item["target"]]}


def as_indexed(item: Item) -> Path:
    """Return the path of the video that ``item`` names, after checking that its content has not changed.

    ``item`` has ``source``, the path, and ``content_sha256``, the SHA-256 when the video was indexed. If the latter is
    empty, nothing is checked.

    Raises:
        UnreadableVideo: the video cannot be read, or its content has changed since it was indexed.
    """
    path = Path(item["source"])
    if item["content_sha256"] and digest_of_video(path) != item["content_sha256"]:
        # Otherwise later runs would use this clip as that of the indexed video.
        raise UnreadableVideo(path, "its content has changed since it was indexed; build the index again")
    return path


@contextmanager
def _prepared(item: Item) -> Iterator[Path]:
    """Yield the path of the file to decode: the video of ``item``, or a re-encoded copy of it.

    If ``item`` names recipes (ways to re-encode), the video is re-encoded by them first. The copy is a file in the
    cache, or a temporary file next to the target, which is deleted afterwards.
    """
    path, recipe, (encoded, cache) = as_indexed(item), item["recipe"], item["encoded"] or ("", "")
    if cache:
        yield reencoded(path, encoded, cache)
        return
    made: list[Path] = []
    try:
        for name in filter(None, (recipe, encoded)):
            made.append(Path(item["target"]).with_suffix(f".{len(made)}.mp4"))
            reencode(path, made[-1], recipe_named(name))
            path = made[-1]
        yield path
    finally:
        for temporary in made:
            temporary.unlink(missing_ok=True)
