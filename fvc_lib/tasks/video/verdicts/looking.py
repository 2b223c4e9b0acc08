"""Probe one untrusted file that is to be judged, and make its clip, from a single decoding in a worker process.

Every worker imports this module, so it imports neither polars nor torch.
"""

from pathlib import Path
from typing import Any

from fvc_lib.corpus.probing import HASH_FRAMES, HASH_SIZE, probe_file, probed
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import View
from fvc_lib.video.clips.clip_file import clip_header
from fvc_lib.video.clips.store import crop_code, decode_code
from fvc_lib.video.clips.worker import make_original
from fvc_lib.video.decode.clip import uniform_places
from fvc_lib.video.decode.probe import probe_and_decode
from fvc_lib.video.decode.source import VideoError
from fvc_lib.video.decode.views import CropError, seen_of, wanted_of


def look(item: dict[str, Any]) -> dict[str, Any]:
    """Probe the video at ``source`` as ``probe_file`` does, and decode its clip into ``target``.

    If that fails, ``probe_file`` and then ``make_original`` are called instead, so error messages are the usual ones.
    They are also called for runs that re-encode every video first, because the clips are then made from another file.

    Args:
        item: as for ``make_original``, without ``content_sha256``, ``seen`` and ``recipe``.

    Returns:
        The result of ``probe_file``. If ``make_original`` was called, its result is merged in.
    """
    view, path = View(**item["view"]), Path(item["source"])
    num_frames, side = item["num_frames"], item["fixed_size"]
    of_hash = (lambda count: uniform_places(count, HASH_FRAMES)), HASH_SIZE
    try:
        if not item["encoded"] and item["code"] == decode_code(view):
            probe, (small, wanted) = probe_and_decode(path, [of_hash, wanted_of(path, num_frames, side, view)])
            answer, frames = probed(path, probe, small), seen_of(wanted, num_frames, side, view)[0]
            if item["crop"] == crop_code(view):  # afterwards: a user's file may be edited at any time
                # Not synchronised to the disk, because this clip is read at once and then deleted.
                with Path(item["target"]).open("wb") as stream:
                    stream.write(clip_header((len(frames), 3, *frames.shape[2:])))
                    stream.write(frames.data)
                return answer
    except (VideoError, CropError, UsageError, MemoryError, OSError):
        pass
    answer = probe_file(item["source"])
    if "reason" in answer:
        return answer
    return answer | make_original(item | {"content_sha256": answer["content_sha256"], "seen": "", "recipe": ""})
