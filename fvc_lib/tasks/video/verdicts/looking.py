"""What is done with one untrusted file that is to be judged, in a worker process: all that it takes, from one decoding.

Imported by every worker, so it imports only what that needs: no polars, no torch.
"""

from pathlib import Path
from typing import Any

from fvc_lib.corpus.probing import HASH_FRAMES, HASH_SIZE, probe_file, probed
from fvc_lib.services.clip_settings import View
from fvc_lib.services.errors import UsageError
from fvc_lib.video.clips.clip_file import Pixels, clip_header
from fvc_lib.video.clips.store import crop_code, decode_code
from fvc_lib.video.clips.worker import make_original
from fvc_lib.video.decode.clip import uniform_places
from fvc_lib.video.decode.probe import probe_and_decode
from fvc_lib.video.decode.source import VideoError
from fvc_lib.video.decode.views import CropError, seen_of, wanted_of


def look(item: dict[str, Any]) -> dict[str, Any]:
    """Find out about the video at ``source`` what ``probe_file`` does, and decode its clip into ``target``.

    The frames of the hash and those of the clip come from one pass. What is wrong with a file is left to
    ``probe_file`` and ``make_original`` to find, one after the other, so that it is said as everywhere; so are runs
    that re-encode every video first, whose clips are of another file.

    Args:
        item: as ``make_original`` has it, without ``content_sha256``, ``seen`` and ``recipe``.

    Returns:
        What ``probe_file`` says; where that is no ``reason``, with what ``make_original`` says.
    """
    view = View(**item["view"])
    if item["code"] != decode_code(view):
        return {"code_changed": True}
    try:
        one_pass = None if item["encoded"] else _from_one_pass(item, view)
    except (CropError, UsageError) as error:
        return {"crop_error": f"{item['source']!r}: {error}"}
    except (VideoError, MemoryError, OSError):
        one_pass = None
    if one_pass is None:
        said = probe_file(item["source"])
        if "reason" in said:
            return said
        return said | make_original(item | {"content_sha256": said["content_sha256"], "seen": "", "recipe": ""})
    said, frames = one_pass
    if item["crop"] != crop_code(view):  # afterwards: a user's file may be edited at any time
        return {"code_changed": True}
    try:  # without waiting for the disk, as a clip that stays would: this one is read at once and goes
        with Path(item["target"]).open("wb") as stream:
            stream.write(clip_header((len(frames), 3, *frames.shape[2:])))
            stream.write(frames.data)
    except OSError as error:
        return {"write_error": [error.errno, error.strerror, error.filename or item["target"]]}
    return said


def _from_one_pass(item: dict[str, Any], view: View) -> tuple[dict[str, Any], Pixels]:
    path, num_frames, side = Path(item["source"]), item["num_frames"], item["fixed_size"]
    of_hash = (lambda count: uniform_places(count, HASH_FRAMES)), HASH_SIZE
    probe, (small, of_clip) = probe_and_decode(path, [of_hash, wanted_of(path, num_frames, side, view)])
    return probed(path, probe, small), seen_of(of_clip, num_frames, side, view)[0]
