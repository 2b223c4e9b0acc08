"""Read what a file claims about its origin: its signed C2PA manifest, and the metadata of its container.

``c2pa-python`` (extra ``verdicts``) reads the manifest and checks its signature. No list of trusted signers is used, so
the identity of the signer is not checked. Anybody can write container metadata, so nothing is concluded from it. A
worker process reads the files, and nothing is fetched from the network.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fvc_lib.services.isolated_workers import run_isolated

_FUNCTION = "fvc_lib.tasks.video.verdicts.provenance:read_file"
_TIMEOUT_SECONDS = 60.0
_MAX_METADATA, _MAX_CHARACTERS = 40, 300
_SOURCES = {  # IPTC's digital source types, https://cv.iptc.org/newscodes/digitalsourcetype/
    "trainedAlgorithmicMedia": "made by a generative model",
    "compositeWithTrainedAlgorithmicMedia": "partly made by a generative model",
    "algorithmicMedia": "made by an algorithm",
    "composite": "put together from several sources",
    "compositeSynthetic": "put together with synthetic parts",
    "digitalCapture": "captured by a camera",
    "computationalCapture": "captured by a camera that computes its pictures",
    "screenCapture": "recorded from a screen",
    "humanEdits": "edited by a person",
}
NO_LIBRARY = "Its signed manifest (C2PA) was not read: c2pa-python is not installed (make setup-verdicts)."
_NO_MANIFEST = "The file has no signed manifest (C2PA). Most files have none, fakes and reals alike."
_VALID = (
    "Its signature is valid: the file is as it was signed. No list of trusted signers is used here, so whether the "
    "signer is who it claims to be is unknown."
)
_INVALID = (
    "Its signature does not hold, so its claims count for nothing: they are false, or the file was changed later."
)


@dataclass(frozen=True)
class Provenance:
    """What a file claims about its origin.

    Attributes:
        sentences: on its signed manifest, or why there is none. Claims are listed only if the signature is valid.
        metadata: (name, value) pairs of container and streams.
    """

    sentences: tuple[str, ...]
    metadata: tuple[tuple[str, str], ...] = ()


def provenance_of(path: Path) -> Provenance:
    """Return the provenance of ``path``. If the file cannot be read, a sentence in the result says why."""
    with closing(run_isolated(_FUNCTION, [str(path)], workers=1, timeout_seconds=_TIMEOUT_SECONDS)) as answers:
        answer = next(answers)
    if answer.failure:
        return Provenance((f"Where it comes from could not be read: {answer.detail}.",))
    manifest, problem, metadata = answer.value
    sentences = (problem,) if problem else tuple(manifest_sentences(manifest))
    return Provenance(sentences, tuple((name, value) for name, value in metadata))


def manifest_sentences(store: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on the signer, the signature and, if it is valid, the claims.

    ``store`` is the manifest store, as c2pa-python returns it.
    """
    manifest = (store.get("manifests") or {}).get(store.get("active_manifest")) or {}
    signature = manifest.get("signature_info") or {}
    names = [_short(signature[each]) for each in ("common_name", "issuer") if signature.get(each)]
    signed_at = f" at {_short(signature['time'])}" if signature.get("time") else ""
    yield f"The file has a manifest (C2PA) signed by {', '.join(names) or 'somebody unnamed'}{signed_at}."
    results = (store.get("validation_results") or {}).get("activeManifest") or {}
    failures = [
        _short(each.get("explanation") or each.get("code"))
        for each in results.get("failure") or []
        if each.get("code") != "signingCredential.untrusted"
    ]
    if store.get("validation_state") not in ("Valid", "Trusted") or failures:
        yield f"{_INVALID} What fails: {'; '.join(failures[:3])}." if failures else _INVALID
        return
    yield _VALID
    for assertion in manifest.get("assertions") or []:
        if str(assertion.get("label", "")).startswith("c2pa.actions"):
            for action in (assertion.get("data") or {}).get("actions") or []:
                source = str(action.get("digitalSourceType", "")).rpartition("/")[2]
                name = str(action.get("action", "")).removeprefix("c2pa.").replace("_", " ")
                meaning = f" ({_SOURCES.get(source, _short(source))})" if source else ""
                yield f"It claims: {_short(name)}{meaning}."
    if ingredients := manifest.get("ingredients") or []:
        titles = [_short(each.get("title") or "unnamed") for each in ingredients[:5]]
        yield f"It names {len(ingredients)} source file{'s' * (len(ingredients) != 1)}: {', '.join(titles)}."


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 1]}…"


# --- In the worker process


def read_file(path: str) -> tuple[Any, str, list[tuple[str, str]]]:
    """Return the manifest store, the reason if there is none, and (name, value) metadata of the file ``path``.

    All three are JSON values. The manifest is as c2pa-python returns it, the reason is empty if there is one.
    """
    manifest, problem = None, ""
    try:
        manifest = _manifest(path)
        problem = "" if manifest else _NO_MANIFEST
    except ImportError:
        problem = NO_LIBRARY
    except Exception as error:  # noqa: BLE001 - a foreign library reads an untrusted file
        problem = f"Its signed manifest (C2PA) could not be read: {_short(error)}."
    return manifest, problem, [(_short(name), _short(value)) for name, value in _metadata(path)][:_MAX_METADATA]


def _manifest(path: str) -> Any:
    import c2pa  # an extra

    # A manifest elsewhere would be fetched from an address that the file names.
    offline = {"verify": {"remote_manifest_fetch": False, "ocsp_fetch": False}}
    with c2pa.Context(c2pa.Settings.from_dict(offline)) as context:
        try:
            reader = c2pa.Reader.try_create(path, context=context)
        except c2pa.C2paError.NotSupported:  # such files never have a manifest
            return None
        return reader and json.loads(reader.json())


def _metadata(path: str) -> Iterator[tuple[str, str]]:
    import av

    try:
        with av.open(path, metadata_errors="replace") as container:
            yield "container", container.format.long_name
            yield from sorted(container.metadata.items())
            for number, stream in enumerate(container.streams):
                codec = getattr(stream.codec_context, "name", None) or "unknown"
                yield f"stream {number}", f"{stream.type}, {codec}"
                yield from ((f"stream {number}, {name}", value) for name, value in sorted(stream.metadata.items()))
    except (av.FFmpegError, OSError, ValueError, MemoryError) as error:
        yield "not readable", str(error)
