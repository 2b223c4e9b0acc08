"""Tar files of whole videos, as WebDataset lays them out, as label source; videos are read where they lie."""

from dataclasses import replace
from pathlib import Path

from fvc_lib.corpus import listing
from fvc_lib.corpus.corpus_files import Entry, Refusal, Rejections, counts_text
from fvc_lib.corpus.label_table import (
    GROUP_COLUMNS,
    PREFERRED_NAMES,
    SPLIT_COLUMNS,
    cell_text,
    join_frames,
    stated_part,
)
from fvc_lib.corpus.listing import CorpusLoader, Listing
from fvc_lib.corpus.sources.general.manifest import read_manifest
from fvc_lib.corpus.tar_samples import TarSample, tar_files, tar_samples, tars_in
from fvc_lib.services.errors import DataError
from fvc_lib.services.registry import CORPORA
from fvc_lib.services.tables import LABELS

_WORDS, _FLAGS = ("label", "cls"), ("fake", "is_fake")
_FLAG_MEANS = {"true": "fake", "1": "fake", "false": "real", "0": "real"}


def read_tar_shards(corpus: Path) -> Listing:
    """The listing of every video in a tar, in the tars of a folder, or in those that a pattern names.

    The label is the content of ``KEY.cls``, or ``label``, ``cls``, ``fake`` or ``is_fake`` in ``KEY.json``; where there
    are several, they have to agree. The pictures of a folder, ``KEY/000.png``, are one video, labelled beside the
    folder or beside each of them. Group, generator, manipulation, real source, platform and split are read there by
    the names that they have in a manifest. A folder with a manifest in it is read by that.

    Raises:
        UsageError: as ``tar_patterns.tars_of``, or as ``read_manifest``.
        DataError: no video has a usable label.
    """
    manifests = [corpus / name for name in PREFERRED_NAMES if corpus.is_dir() and (corpus / name).is_file()]
    if manifests:
        return read_manifest(manifests[0])
    files, rejections = tar_files(corpus), Rejections()
    samples, notes = tar_samples(corpus, files, rejections, pictures=True)
    rows, places = [], []
    listing.refuse_unused_labels("the tars", [word for sample in samples for word in _words(sample).values()])
    for number, sample in enumerate(samples, start=1):
        label, unclear = _label(sample)
        part, no_part = stated_part({"split": _first(sample, SPLIT_COLUMNS) or ""}, "split")
        refusal = sample.refusal or unclear or no_part
        if refusal is not None and label not in LABELS:
            rejections.add_file(sample.path, refusal, row=number)
        else:
            rows.append(_row(sample, number, label, part))
            places.append(refusal or sample.path)
    if not any(row.label in LABELS for row in rows):
        got = counts_text(row.label or "no label" for row in rows) or "no video with a label"
        first = f" For example: {rejections.rows[0][5]}" if rejections.rows and not rows else ""
        raise DataError(
            f"corpus {str(corpus)!r}: no video in its tars is labelled real or fake; got {got}.{first} Put 'real' or "
            "'fake' beside each KEY.mp4, into KEY.cls or as 'label' into KEY.json (or 'is_fake', true or false); or a "
            "manifest.csv beside the tars, with paths like 000.tar/KEY.mp4. "
            f"{listing.label_map_hint(row.label or '' for row in rows)}"
        )
    others = [row.label or "" for row in rows if row.label not in LABELS]
    if others:
        said = f"labelled neither real nor fake ({counts_text(others)}) and not used"
        notes += (f"{len(others):,} videos are {said}. {listing.label_map_hint(others)}",)
    rows, places, joined = join_frames(
        files, rows, places, (word for sample in samples for word in _words(sample).values()), rejections
    )
    return replace(listing.listing_of_rows(files, "tar_shards", rows, places, rejections), notes=(*notes, *joined))


def _words(sample: TarSample) -> dict[str, str]:
    """What says the label in words or numbers that have to be mapped, by where it stands."""
    cells = {f"{name!r} in KEY.json": cell_text(sample.cells, name) for name in _WORDS}
    return {where: word for where, word in {"KEY.cls": sample.label, **cells}.items() if word}


def _label(sample: TarSample) -> tuple[str | None, Refusal | None]:
    """``real``, ``fake`` or another word, or none and why."""
    said = {where: listing.stated_label(word) for where, word in _words(sample).items()}
    for name in _FLAGS:
        if (flag := cell_text(sample.cells, name)) is not None:
            said[f"{name!r} in KEY.json"] = _FLAG_MEANS.get(flag.lower(), f"{flag}, not true or false")
    if len(set(said.values())) == 1:
        return next(iter(said.values())), None
    if said:
        both = " and ".join(f"{where} says {word!r}" for where, word in said.items())
        return None, Refusal(
            "conflicting_labels", f"{sample.path}: {both}. Keep one of them, or say what it means: label_map."
        )
    fields = ", ".join(map(repr, (*_WORDS, *_FLAGS)))
    return None, Refusal("label_not_used", f"{sample.path}: no label: neither KEY.cls nor one of {fields} in KEY.json.")


def _first(sample: TarSample, names: tuple[str, ...]) -> str | None:
    return next((text for name in names if (text := cell_text(sample.cells, name)) is not None), None)


def _row(sample: TarSample, number: int, label: str | None, part: str | None) -> Entry:
    manipulation, generator, platform = (
        cell_text(sample.cells, each) for each in ("manipulation", "generator", "platform")
    )
    return Entry(
        path=sample.path,
        label=label,
        source_id=sample.path,
        stated_group=_first(sample, GROUP_COLUMNS),
        manipulation=manipulation or generator,
        platform=platform,
        row=number,
        origin="the tars",
        generator=generator,
        real_source=_first(sample, ("real_source", "source")),
        official_split=part,
        links=sample.links,
    )


CORPORA.register(
    CorpusLoader(
        name="tar_shards",
        accepted="a tar, a folder of tars or a pattern like 'shards/{000..099}.tar', with KEY.mp4 and KEY.cls or "
        "KEY.json (WebDataset)",
        recognises=lambda path: bool(tars_in(path)),
        read=read_tar_shards,
        rank=3,
    )
)
