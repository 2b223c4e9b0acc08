"""Where a file says it comes from: a signed C2PA manifest, where it has one, and what its container and encoder left.

A manifest is read by ``c2pa-python`` (extra ``c2pa``). Its signature shows that the file is as it was signed; who
signed is vouched for by a list of trusted signers alone, and none is used here. Traces of containers and encoders are
facts that anybody can write, so nothing is concluded from them. Files are read in a process of their own; nothing is
fetched.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fvc_lib.services.isolated_workers import run_isolated
from fvc_lib.video.decode.source import VideoError, open_video

_FUNCTION = "fvc_lib.tasks.video.verdicts.provenance:read_file"
_TIMEOUT_SECONDS = 60.0
_MOST_TRACES = 40
_LONGEST = 300  # characters of one value
_SOURCES = {  # IPTC's digital source types, https://cv.iptc.org/newscodes/digitalsourcetype/
    "trainedAlgorithmicMedia": "made by a generative model",
    "compositeWithTrainedAlgorithmicMedia": "partly made by a generative model",
    "algorithmicMedia": "made by an algorithm",
    "algorithmicallyEnhanced": "enhanced by an algorithm",
    "composite": "put together from several sources",
    "compositeSynthetic": "put together with synthetic parts",
    "digitalCapture": "captured by a camera",
    "computationalCapture": "captured by a camera that computes its pictures",
    "screenCapture": "recorded from a screen",
    "humanEdits": "edited by a person",
}
NO_LIBRARY = "A signed manifest (C2PA) was not looked for: c2pa-python is not installed (make setup-verdicts)."
_NO_MANIFEST = "The file has no signed manifest (C2PA). Most have none, fakes and reals alike."
_STATES = {
    "Trusted": "Its signature is valid, and the signer is on a list of trusted ones.",
    "Valid": (
        "Its signature is valid: the file is as it was signed. No list of trusted signers is used here, so whether the "
        "signer is who it says is not known."
    ),
}
_BROKEN = (
    "Its signature does not hold, so its claims count for nothing: the file was changed afterwards, or they are false."
)


@dataclass(frozen=True)
class Provenance:
    """What a file says of itself.

    Attributes:
        sentences: on its signed manifest, or why there is nothing to say.
        claims: what the manifest claims, a sentence each; only where its signature holds.
        traces: of container, streams and encoder: name and value, as the file has them.
        state: ``Trusted``, ``Valid``, ``Invalid``; empty: no manifest was read.
        stated_frames, stated_seconds: of the video, as its container says; None: it does not.
    """

    sentences: tuple[str, ...]
    claims: tuple[str, ...] = ()
    traces: tuple[tuple[str, str], ...] = ()
    state: str = ""
    stated_frames: int | None = None
    stated_seconds: float | None = None


def provenance_of(path: Path) -> Provenance:
    """What ``path`` says of itself; a file that nothing can be read of says that."""
    with closing(run_isolated(_FUNCTION, [str(path)], workers=1, timeout_seconds=_TIMEOUT_SECONDS)) as answers:
        answer = next(iter(answers))
    if answer.failure:
        return Provenance((f"Where it comes from could not be read: {answer.detail}.",))
    return replace(_said_by(answer.value), **answer.value["stated"])


def _said_by(found: Mapping[str, Any]) -> Provenance:
    traces = tuple((name, value) for name, value in found["traces"])
    if found["manifest_error"]:
        return Provenance((f"Its signed manifest (C2PA) could not be read: {found['manifest_error']}.",), (), traces)
    if not found["has_library"]:
        return Provenance((NO_LIBRARY,), (), traces)
    if found["manifest"] is None:
        return Provenance((_NO_MANIFEST,), (), traces)
    return _said(found["manifest"], traces)


def _said(store: Mapping[str, Any], traces: tuple[tuple[str, str], ...]) -> Provenance:
    state = str(store.get("validation_state") or "Invalid")
    manifest = (store.get("manifests") or {}).get(store.get("active_manifest")) or {}
    signature = manifest.get("signature_info") or {}
    names = [_short(signature.get(each)) for each in ("common_name", "issuer") if signature.get(each)]
    signer = f"The file has a manifest (C2PA) signed by {', '.join(names) or 'somebody unnamed'}"
    signed_at = f" at {_short(signature['time'])}" if signature.get("time") else ""
    failures = [
        _short(each.get("explanation") or each.get("code"))
        for each in ((store.get("validation_results") or {}).get("activeManifest") or {}).get("failure") or []
        if each.get("code") != "signingCredential.untrusted"
    ]
    if state not in _STATES or failures:
        why = f" What fails: {'; '.join(failures[:3])}." if failures else ""
        return Provenance((f"{signer}{signed_at}.", f"{_BROKEN}{why}"), (), traces, "Invalid")
    return Provenance((f"{signer}{signed_at}.", _STATES[state]), tuple(_claims(manifest)), traces, state)


def _claims(manifest: Mapping[str, Any]) -> Iterator[str]:
    makers = [
        " ".join(_short(each.get(key)) for key in ("name", "version") if each.get(key))
        for each in manifest.get("claim_generator_info") or []
    ]
    if any(makers):
        yield f"It was written by {', '.join(filter(None, makers))}."
    for assertion in manifest.get("assertions") or []:
        if not str(assertion.get("label", "")).startswith("c2pa.actions"):
            continue
        for action in (assertion.get("data") or {}).get("actions") or []:
            source = str(action.get("digitalSourceType", "")).rpartition("/")[2]
            what = str(action.get("action", "")).removeprefix("c2pa.").replace("_", " ")
            said = f" ({_SOURCES.get(source, _short(source))})" if source else ""
            yield f"It claims: {_short(what)}{said}."
    if ingredients := manifest.get("ingredients") or []:
        titles = [_short(each.get("title") or "unnamed") for each in ingredients[:5]]
        yield f"It names {len(ingredients)} source file{'s' * (len(ingredients) != 1)}: {', '.join(titles)}."


def _short(value: object) -> str:
    text = " ".join(str(value if value is not None else "").split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


# --- In the process of its own


def read_file(path: str) -> dict[str, Any]:
    """What a file has: ``manifest`` as c2pa-python gives it, ``traces``, and what is ``stated``; JSON."""
    found: dict[str, Any] = {"manifest": None, "manifest_error": "", "has_library": True, "traces": [], "stated": {}}
    try:
        found["manifest"] = _manifest(path)
    except ImportError:
        found["has_library"] = False
    except Exception as error:  # noqa: BLE001 - a library of its own on a file that nobody vouches for
        found["manifest_error"] = _short(error)
    found["traces"] = [[_short(name), _short(value)] for name, value in _traces(path, found["stated"])][:_MOST_TRACES]
    return found


def _manifest(path: str) -> Any:
    import c2pa  # an extra

    # A manifest elsewhere would have to be fetched from an address that stands in the file.
    offline = {"verify": {"remote_manifest_fetch": False, "ocsp_fetch": False}}
    with c2pa.Context(c2pa.Settings.from_dict(offline)) as context:
        try:
            reader = c2pa.Reader.try_create(path, context=context)
        except c2pa.C2paError.NotSupported:  # no manifest can be in such a file
            return None
        if reader is None:
            return None
        with reader:
            return json.loads(reader.json())


def _traces(path: str, stated: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values; frames and seconds that the container states go into ``stated``, too."""
    import av

    try:
        with av.open(path) as container:
            yield "container", container.format.long_name
            yield from sorted(container.metadata.items())
            for number, stream in enumerate(container.streams):
                codec = getattr(stream.codec_context, "name", None) or "unknown"
                yield f"stream {number}", f"{stream.type}, {codec}"
                for name, value in sorted(stream.metadata.items()):
                    yield f"stream {number}, {name}", value
            if container.streams.video:
                with open_video(path) as film:  # of several tracks, the one that is judged
                    stream = container.streams[film.stream.index]
                if stream.frames:
                    stated["stated_frames"] = stream.frames
                    yield "frames, as stated", f"{stream.frames:,}"
                if stream.duration and stream.time_base:
                    stated["stated_seconds"] = float(stream.duration * stream.time_base)
                    yield "seconds, as stated", f"{stated['stated_seconds']:.3f}"
                packet = next(iter(container.demux(stream)), None)
                # x264 and x265 write their version and settings into the first frame.
                said = (
                    re.search(rb"x26[45][ -~]{10,2000}", bytes(packet)) if packet is not None and packet.size else None
                )
                if said:
                    yield "encoder's own words", said.group().decode("ascii")
    except (av.FFmpegError, VideoError, OSError, ValueError, MemoryError) as error:
        yield "not readable", str(error)
