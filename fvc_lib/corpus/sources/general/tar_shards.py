"""Read corpora of tar files of videos in WebDataset's layout, without unpacking them."""

from dataclasses import replace
from pathlib import Path

from fvc_lib.corpus import listing
from fvc_lib.corpus.corpus_files import Entry, Refusal, Rejections, counts_text
from fvc_lib.corpus.label_table import PREFERRED_NAMES, cell_text, entry_of, join_frames
from fvc_lib.corpus.listing import CorpusLoader, Listing
from fvc_lib.corpus.sources.general.manifest import read_manifest
from fvc_lib.corpus.tar_samples import TarSample, tar_files, tar_samples, tars_in
from fvc_lib.services.errors import DataError
from fvc_lib.services.registry import CORPORA
from fvc_lib.services.tables import LABELS

_WORDS, _FLAGS = ("label", "cls"), ("fake", "is_fake")
_FLAG_MEANS = {"true": "fake", "1": "fake", "false": "real", "0": "real"}


def read_tar_shards(corpus: Path) -> Listing:
    """List every video in a tar, in the tars of a folder, or in the tars of a pattern.

    The label of ``KEY.mp4`` is the content of ``KEY.cls``, or the field ``label``, ``cls``, ``fake`` or ``is_fake`` of
    ``KEY.json``. If several are given, they must agree. Other fields of ``KEY.json`` are read like the columns of a
    manifest. Pictures ``KEY/000.png``, ``KEY/001.png``, ... are one video; their label is that of ``KEY``, or is given
    for every picture. If the folder has a manifest, that is read instead.

    Raises:
        UsageError: a pattern of tars or a manifest is unusable (``tar_patterns.tars_of``, ``read_manifest``).
        DataError: no video has a usable label.
    """
    manifests = [corpus / name for name in PREFERRED_NAMES if corpus.is_dir() and (corpus / name).is_file()]
    if manifests:
        return read_manifest(manifests[0])
    files, rejections = tar_files(corpus), Rejections()
    samples, notes = tar_samples(corpus, files, rejections, pictures=True)
    words = [word for sample in samples for word in _words(sample).values()]
    listing.refuse_unused_labels("the tars", words)
    rows, places = list[Entry](), list[str | Refusal]()
    for number, sample in enumerate(samples, start=1):
        label, unclear = _label(sample)
        row, no_part = entry_of(sample.cells, sample.path, label, number, "the tars")
        refusal = sample.refusal or unclear or no_part
        if refusal is not None and label not in LABELS:
            rejections.add_file(sample.path, refusal, row=number)
        else:
            rows.append(replace(row, links=sample.links))
            places.append(refusal or sample.path)
    others = [row.label or "" for row in rows if row.label not in LABELS]
    if len(others) == len(rows):
        first = f" For example: {rejections.rows[0][5]}" if rejections.rows and not rows else ""
        raise DataError(
            f"corpus {str(corpus)!r}: no video in its tars is labelled real or fake; got "
            f"{counts_text(others) or 'no video with a label'}.{first} Put 'real' or 'fake' next to each KEY.mp4, into "
            "KEY.cls or as 'label' into KEY.json (or 'is_fake', true or false); or put a manifest.csv next to the "
            f"tars, with paths like 000.tar/KEY.mp4. {listing.label_map_hint(others)}"
        )
    rows, places, joined = join_frames(files, rows, places, words, rejections)
    return listing.listing_of_rows(files, "tar_shards", rows, places, rejections, (*notes, *joined))


def _words(sample: TarSample) -> dict[str, str]:
    """Return the labels of a sample that are words, by where they are stated; ``label_map`` applies to these."""
    cells = {f"{name!r} in KEY.json": cell_text(sample.cells, name) for name in _WORDS}
    return {where: word for where, word in {"KEY.cls": sample.label, **cells}.items() if word}


def _label(sample: TarSample) -> tuple[str | None, Refusal | None]:
    """Return (label, refusal): ``real``, ``fake`` or another word and None, or None and why there is no clear label."""
    stated = {where: listing.stated_label(word) for where, word in _words(sample).items()}
    for name in _FLAGS:
        if (flag := cell_text(sample.cells, name)) is not None:
            stated[f"{name!r} in KEY.json"] = _FLAG_MEANS.get(flag.lower(), f"{flag}, not true or false")
    labels = list(set(stated.values()))
    if len(labels) == 1:
        return labels[0], None
    if not labels:
        fields = ", ".join(map(repr, (*_WORDS, *_FLAGS)))
        detail = f"{sample.path}: no label: neither KEY.cls nor one of {fields} in KEY.json."
        return None, Refusal("label_not_used", detail)
    both = " and ".join(f"{where} is {word!r}" for where, word in stated.items())
    return None, Refusal("conflicting_labels", f"{sample.path}: {both}. Keep one of them, or use label_map.")


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
