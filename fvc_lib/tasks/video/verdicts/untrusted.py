"""Read one untrusted file that is to be judged, in a worker process.

``look`` measures its facts, such as size and codec, and makes its clip from a single decoding. Forensic features are
measured in the same process if ``families`` of them are named. ``provenance_of`` reads its signed C2PA manifest, which
states where the file comes from, with ``c2pa-python`` (extra ``app``). No list of trusted signers is used, so the
identity of the signer is not checked.

Every worker imports this module, so it imports neither polars nor torch.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from fvc_lib.corpus.probing import HASH_FRAMES, HASH_SIZE, probe_file, probed
from fvc_lib.services.errors import UsageError
from fvc_lib.services.isolated_workers import run_isolated
from fvc_lib.services.registry import FEATURES, View
from fvc_lib.video.clips.store import clip_header, crop_code, decode_code
from fvc_lib.video.clips.worker import make_original, make_windows
from fvc_lib.video.decode.clip import uniform_places
from fvc_lib.video.decode.probe import probe_and_decode
from fvc_lib.video.decode.source import VideoError
from fvc_lib.video.decode.views import CropError, at_rate_of, seen_of, wanted_of
from fvc_lib.video.features.family import Sample, SampleSink
from fvc_lib.video.features.worker import FamilyError, measure_video

_READ = "fvc_lib.tasks.video.verdicts.untrusted:read_claims"
_TIMEOUT_SECONDS = 60.0
_MAX_CHARACTERS = 300
_SOURCES = {  # IPTC's digital source types, https://cv.iptc.org/newscodes/digitalsourcetype/
    "trainedAlgorithmicMedia": "made by a generative model",
    "compositeWithTrainedAlgorithmicMedia": "partly made by a generative model",
    "digitalCapture": "captured by a camera",
    "screenCapture": "recorded from a screen",
    "humanEdits": "edited by a person",
}
NO_LIBRARY = (
    "Its signed manifest (C2PA) was not read: c2pa-python is not installed (make setup-app, or pip install "
    "'fvc_lib[app]')."
)
_NO_MANIFEST = "The file has no signed manifest (C2PA). Most files have none, fakes and reals alike."
_VALID = (
    "Its signature is valid: the file is as it was signed. No list of trusted signers is used here, so whether the "
    "signer is who it claims to be is unknown."
)
_INVALID = (
    "Its signature does not hold, so its claims count for nothing: they are false, or the file was changed later."
)


def look(item: dict[str, Any]) -> dict[str, Any]:
    """Measure the facts of the video ``item["source"]``, and decode its clip into the file ``item["target"]``.

    The facts are the properties and hashes that ``probe_file`` returns. The file is decoded only once for facts and
    clip. If that fails, both are made in the usual two steps, by ``probe_file`` and then ``make_original``, which give
    the usual error messages. Runs that re-encode every video first also need the two steps, because their clips are
    made from the re-encoded file.

    Args:
        item: the argument of ``make_original``; its ``content_sha256``, ``seen`` and ``recipe`` are ignored. It also
            has ``families``, the names of the families of forensic features to measure.

    Returns:
        The facts by name, and under ``forensic`` the forensic features by column. For a file that cannot be decoded,
        the reason instead. If ``make_original`` was called, its result is merged in.
    """
    view = View(**item["view"])
    path = Path(item["source"])
    num_frames, side = item["num_frames"], item["fixed_size"]
    of_hash = ((lambda count: uniform_places(count, HASH_FRAMES)), HASH_SIZE)
    samples = list[SampleSink]()

    def sample(*of_video: Any) -> SampleSink:
        samples.append(SampleSink(*of_video))
        return samples[-1]

    try:
        if not item["encoded"] and item["code"] == decode_code(view):
            here = at_rate_of(path, view)
            clips = [of_hash, wanted_of(path, num_frames, side, here)]
            probe, (small, wanted) = probe_and_decode(path, clips, sample if item["families"] else None)
            answer = probed(path, probe, small)
            frames = seen_of(wanted, num_frames, side, here)[0]
            if item["crop"] == crop_code(view):  # after the decoding: a user's file may be edited at any time
                # Not synchronised to the disk, because this clip is read at once and then deleted.
                with Path(item["target"]).open("wb") as stream:
                    stream.write(clip_header((len(frames), 3, *frames.shape[2:])))
                    stream.write(frames.data)
                return answer | _forensic(item, path, samples[-1].sample() if samples else None)
    except (VideoError, CropError, UsageError, MemoryError, OSError):
        pass
    answer = probe_file(item["source"])
    if "reason" in answer:
        return answer
    return answer | original(item | {"content_sha256": answer["content_sha256"], "seen": "", "recipe": ""})


def original(item: dict[str, Any]) -> dict[str, Any]:
    """Decode the video ``item["source"]`` into a clip file, and measure its forensic features.

    Args:
        item: paths and decode settings (the argument of ``make_original``), and under ``families`` the names of the
            families of forensic features to measure.

    Returns:
        A dict with ``forensic``, the finite features by column; or, if decoding failed, the error that
        ``make_original`` reports.
    """
    return make_original(item, partial(_forensic, item))


def windows(item: dict[str, Any]) -> dict[str, Any]:
    """Decode the video ``item["source"]`` into a file of windows (short runs of frames), and measure forensic features.

    Args:
        item: paths and decode settings (the argument of ``make_windows``), and under ``families`` the names of the
            families of forensic features to measure.

    Returns:
        A dict that describes the windows (the result of ``make_windows``), with ``forensic``, the finite features by
        column; or, if decoding failed, the error that ``make_windows`` reports.
    """
    return make_windows(item, partial(_forensic, item))


def _forensic(item: dict[str, Any], path: Path, sample: Sample | None = None) -> dict[str, Any]:
    families = [FEATURES.get(name) for name in item["families"]]
    try:
        columns = measure_video(path, families, sample).values() if families else ()
    except FamilyError as error:
        raise VideoError(path, str(error), "Mend the family, or leave the file out.") from error
    known = {name: value for values in columns for name, value in values.items() if math.isfinite(value)}
    return {"forensic": known}


# --- The signed manifest


def provenance_of(path: Path) -> tuple[str, ...]:
    """Return sentences on the signed manifest of ``path``, or on why there is none or it could not be read.

    A worker process reads the file.
    """
    with closing(run_isolated(_READ, [str(path)], workers=1, timeout_seconds=_TIMEOUT_SECONDS)) as answers:
        answer = next(answers)
    if answer.failure:
        return (f"Where it comes from could not be read: {answer.detail}.",)
    return tuple(answer.value)


def read_claims(path: str) -> list[str]:
    """Return sentences on the C2PA manifest (signed statement of origin) in the media file ``path``.

    They say who signed it, whether the signature is valid, and what it claims; or why no manifest could be read. Call
    it in a worker process: a C library reads the file.
    """
    try:
        manifest = _manifest(path)
        return list(manifest_sentences(manifest)) if manifest else [_NO_MANIFEST]
    except ImportError:
        return [NO_LIBRARY]
    except Exception as error:  # noqa: BLE001 - a foreign library reads an untrusted file
        return [f"Its signed manifest (C2PA) could not be read: {_short(error)}."]


def manifest_sentences(store: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on a signed C2PA manifest: who signed it, whether the signature is valid, and what it claims.

    The claimed actions, such as an edit, are given only if the signature is valid. ``store`` is the manifest store as a
    dict, as c2pa-python returns it. If ``store`` lacks a part, any error may be raised.
    """
    manifest = store["manifests"][store["active_manifest"]]
    signature = manifest.get("signature_info", {})
    names = [_short(signature[name]) for name in ("common_name", "issuer") if signature.get(name)]
    yield f"The file has a manifest (C2PA) signed by {', '.join(names) or 'somebody unnamed'}."
    results = store.get("validation_results", {}).get("activeManifest", {})
    codes = {str(failure["code"]) for failure in results.get("failure", [])} - {"signingCredential.untrusted"}
    if store.get("validation_state") not in ("Valid", "Trusted") or codes:
        yield f"{_INVALID} {_short(', '.join(sorted(codes)))}".rstrip()
        return
    yield _VALID
    for assertion in manifest.get("assertions", []):
        if assertion["label"].startswith("c2pa.actions"):
            for action in assertion["data"]["actions"]:
                source = action.get("digitalSourceType", "").rpartition("/")[2]
                name = action["action"].removeprefix("c2pa.").replace("_", " ")
                yield f"It claims: {_short(name)} ({_SOURCES.get(source, _short(source) or 'no source is named')})."


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 1]}…"


def _manifest(path: str) -> Any:
    """Return the manifest store of the file ``path`` as a dict; None if it has none.

    Nothing is fetched from the network.
    """
    import c2pa  # an extra

    # A manifest elsewhere would be fetched from an address that the file names.
    offline = {"verify": {"remote_manifest_fetch": False, "ocsp_fetch": False}}
    with c2pa.Context(c2pa.Settings.from_dict(offline)) as context:
        try:
            reader = c2pa.Reader.try_create(path, context=context)
        except c2pa.C2paError.NotSupported:  # such files never have a manifest
            return None
        return reader and json.loads(reader.json())
