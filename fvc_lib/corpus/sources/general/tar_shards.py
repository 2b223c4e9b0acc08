"""Tar files of whole videos, as WebDataset lays them out, as label source; videos are read where they lie."""

from pathlib import Path

from fvc_lib.corpus import listing
from fvc_lib.corpus.label_table import GROUP_COLUMNS, SPLIT_COLUMNS, cell_text, stated_part
from fvc_lib.corpus.listing import CorpusLoader, Entry, Listing, Refusal, Rejections
from fvc_lib.corpus.tar_samples import TarSample, tar_files, tar_samples, tars_in
from fvc_lib.services.errors import DataError
from fvc_lib.services.registry import CORPORA
from fvc_lib.services.tables import LABELS


def read_tar_shards(corpus: Path) -> Listing:
    """The listing of every video in a tar, or in the tars of a folder.

    The label is the content of ``KEY.cls``, or ``label`` (or ``cls``) in ``KEY.json``; group, generator, manipulation,
    real source, platform and split are read there by the names that they have in a manifest.

    Raises:
        UsageError: a tar is cut, damaged or compressed.
        DataError: no video has a usable label.
    """
    files, rejections = tar_files(corpus), Rejections()
    samples = tar_samples(corpus, files, rejections)
    rows, places = [], []
    listing.refuse_unused_labels("the tars", [_label(sample) for sample in samples])
    for number, sample in enumerate(samples, start=1):
        rows.append(_row(sample, number))
        split = _first(sample, SPLIT_COLUMNS)
        no_part = stated_part({"split": split or ""}, "split")[1]
        places.append(sample.refusal or no_part or _unlabelled(sample) or sample.path)
    if not any(row.label in LABELS for row in rows):
        got = listing.counts_text(row.label or "no label" for row in rows) or "no video"
        raise DataError(
            f"corpus {str(corpus)!r}: no video in its tars is labelled real or fake; got {got}. Put 'real' or 'fake' "
            "beside each KEY.mp4, into KEY.cls or as 'label' into KEY.json, or say what its values mean, if it is "
            "this: -p label_map 1=fake,0=real."
        )
    return listing.listing_of_rows(files, "tar_shards", rows, places, rejections)


def _label(sample: TarSample) -> str:
    return sample.label or _first(sample, ("label", "cls")) or ""


def _first(sample: TarSample, names: tuple[str, ...]) -> str | None:
    return next((text for name in names if (text := cell_text(sample.cells, name)) is not None), None)


def _row(sample: TarSample, number: int) -> Entry:
    split = _first(sample, SPLIT_COLUMNS)
    manipulation, generator, platform = (
        cell_text(sample.cells, each) for each in ("manipulation", "generator", "platform")
    )
    return Entry(
        path=sample.path,
        label=listing.stated_label(_label(sample)),
        source_id=sample.path,
        stated_group=_first(sample, GROUP_COLUMNS),
        manipulation=manipulation or generator,
        platform=platform,
        row=number,
        origin="the tars",
        generator=generator,
        real_source=_first(sample, ("real_source", "source")),
        official_split=stated_part({"split": split or ""}, "split")[0],
    )


def _unlabelled(sample: TarSample) -> Refusal | None:
    if _label(sample):
        return None
    return Refusal(
        "label_not_used", f"{sample.path}: no label: neither KEY.cls nor 'label' in KEY.json stands beside it."
    )


CORPORA.register(
    CorpusLoader(
        name="tar_shards",
        accepted="a tar file, or a folder of them, with KEY.mp4 and KEY.cls or KEY.json (WebDataset)",
        recognises=lambda path: bool(tars_in(path)),
        read=read_tar_shards,
        rank=2,
    )
)
