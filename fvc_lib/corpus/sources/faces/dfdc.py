"""DFDC, the DeepFake Detection Challenge, and its preview.

Full: ``dfdc_train_part_N/metadata.json`` has, by file name, label REAL or FAKE, split and, of a fake, its
original. Actors recur within a part, so a part is one group; a folder with a ``metadata.json`` but no number groups by
the original. The test part is ``test/labels.csv`` (filename, label 0 or 1), or ``test/metadata.json`` with ``is_fake``
(0 or 1) by file name; neither names originals or actors. Source: Dolhansky et al., "The DeepFake Detection Challenge
(DFDC) dataset", arXiv:2006.07397.

Preview: ``dataset.json`` has, by path, label, set (train or test), target and swapped id; two methods, method_A and
method_B. Source: Dolhansky et al., arXiv:1910.08854.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fvc_lib.corpus.corpus_files import Refusal, Rejections, joined
from fvc_lib.corpus.label_table import read_label_table
from fvc_lib.corpus.listing import CorpusLoader, Listing
from fvc_lib.corpus.sources.published import (
    PARTS,
    Described,
    first_of,
    folders_in,
    listed_but_absent,
    read_json,
    read_published,
    require,
    unknown_name,
)
from fvc_lib.services.atomic_files import AnyPath, path_to_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.registry import CORPORA

_TABLES = ("metadata.json", "labels.csv")
_LABELS = {"0": "real", "1": "fake", "real": "real", "fake": "fake"}
_PART = re.compile(r"(?:dfdc_train_part_|part_)?(\d+)")


def read_dfdc(folder: AnyPath) -> Listing:
    """List the parts that are there; the folder may also be one part with its table.

    Raises:
        DataError: a table of labels is missing or has an unknown label.
    """
    folder = Path(folder)
    parts = _parts(folder)
    rows = {name: row for part in parts for name, row in _rows(folder, part).items()}
    notes = listed_but_absent(folder, "metadata.json or labels.csv", rows)
    if any(row.split == "test" for row in rows.values()):
        notes.append("The originals and actors of test videos are not published: folds may part those of one.")
    known = {path_to_text(path): found for path, found in rows.items()}
    return read_published(
        folder, "dfdc", [part or "." for part in parts],
        lambda path: known.get(path) or Refusal("not_listed", f"{path!r}: no metadata.json or labels.csv names it."),
        notes,
    )  # fmt: skip


def _parts(folder: Path) -> list[str]:
    """Return the folders that have a table: the corpus itself, or those in it, or those in a folder of their own name.

    Raises:
        DataError: a part has videos and no table.
    """
    if first_of(folder, *_TABLES):
        return [""]
    found = []
    for name in folders_in(folder):
        below = [name, *(f"{name}/{inner}" for inner in folders_in(folder / name))]
        here = [part for part in below if first_of(folder / part, *_TABLES)]
        if not here and (name == "test" or _PART.fullmatch(name)) and any((folder / name).iterdir()):
            require(folder, "DFDC", f"{name}/metadata.json")
        found += here[:1] if name in here else here
    return found


def _rows(folder: Path, part: str) -> dict[str, Described]:
    """Return the rows of a table by path. A table with ``is_fake``, or in ``test``, is of the test part."""
    path = first_of(folder / part, *_TABLES) or folder
    table: Mapping[str, Any]
    if path.suffix == ".csv":
        labels = read_label_table(path)
        columns = [labels.require((name,)) for name in ("filename", "label")]
        records = labels.records(columns, Rejections())
        table = {cells["filename"].strip(): {"is_fake": cells["label"].strip()} for _, cells in records}
    else:
        table = read_json(path)
    number = _PART.fullmatch(part.rsplit("/", 1)[-1] or folder.name)
    rows = {}
    for name, row in table.items():
        facts = row if isinstance(row, dict) else {}
        is_test = part == "test" or "is_fake" in facts
        stated = str(facts.get("is_fake", facts.get("label", ""))).lower()
        label = _LABELS.get(stated)
        if label is None or ("is_fake" in facts and not stated.isdigit()):
            raise DataError(f"{str(path)!r}: {name!r}: got the label {stated!r}, wanted REAL or FAKE, or 0 or 1.")
        group = f"dfdc part {number[1]}" if number else f"dfdc original {facts.get('original') or name}"
        group = f"dfdc test {name}" if is_test else group
        inner = "videos" if is_test and (path.parent / "videos").is_dir() else ""
        generator, source = ("dfdc", None) if label == "fake" else (None, "dfdc")
        split = "test" if is_test else "train"
        rows[joined(part, inner, name)] = Described(label, (group,), generator, source, split)
    return rows


def _is_table(path: Path) -> bool:
    """Return whether a JSON file labels file names, as DFDC's do; other corpora have a metadata.json as well."""
    try:
        rows = read_json(path).values()
    except DataError:
        return False
    labels = (row.get("label", row.get("is_fake")) for row in rows if isinstance(row, dict))
    return any(str(label).lower() in _LABELS for label in labels)


def _recognises(path: Path) -> bool:
    if any(name.startswith("dfdc_train_part_") for name in (path.name, *folders_in(path))):
        return path.is_dir()
    tops = ("", *folders_in(path), *(f"{a}/{b}" for a in folders_in(path) for b in folders_in(path / a)))
    return (path / "test/labels.csv").is_file() or any(_is_table(path / top / "metadata.json") for top in tops)


def read_dfdc_preview(folder: AnyPath) -> Listing:
    """List the videos of ``dataset.json``.

    Raises:
        DataError: it is no such table, or a row has no label.
    """
    folder = Path(folder)
    require(folder, "DFDC preview", "dataset.json")
    table = read_json(folder / "dataset.json")
    rows = {path_to_text(name): _preview_row(name, row) for name, row in table.items()}
    return read_published(
        folder, "dfdc_preview", folders_in(folder),
        lambda path: rows.get(path, Refusal("not_listed", f"{path!r}: dataset.json does not name it.")),
        listed_but_absent(folder, "dataset.json", table),
    )  # fmt: skip


def _preview_row(path: str, row: Any) -> Described | Refusal:
    label = str(row.get("label", "") if isinstance(row, dict) else row).lower()
    if label not in ("real", "fake"):
        raise DataError(f"dataset.json: {path!r}: got the label {label!r}, wanted real or fake.")
    stated = [str(row[key]) for key in ("target_id", "swapped_id") if row.get(key)]
    people = stated or re.findall(r"(?<![A-Za-z\d])\d{4,}(?!\d)", path.rsplit("/", 1)[-1])
    if not people:
        return unknown_name(path, "the ids of the people in the name, as in 643786_1460296_A_000.mp4")
    groups = [f"dfdc preview person {each}" for each in people]
    split = PARTS.get(str(row.get("set", "")))
    generator, source = (None, "dfdc preview") if label == "real" else (path.split("/", 1)[0], None)
    return Described(label, groups, generator, source, split)


_BIBTEX_OF_DFDC = """@article{dolhansky2020dfdc,
  author = {Dolhansky, Brian and Bitton, Joanna and Pflaum, Ben and Lu, Jikuo and Howes, Russ and Wang, Menglin and
            Canton Ferrer, Cristian},
  title = {The {DeepFake} Detection Challenge ({DFDC}) Dataset},
  journal = {arXiv preprint arXiv:2006.07397},
  year = {2020}
}"""
_BIBTEX_OF_DFDC_PREVIEW = """@article{dolhansky2019dfdc,
  author = {Dolhansky, Brian and Howes, Russ and Pflaum, Ben and Baram, Nicole and Canton Ferrer, Cristian},
  title = {The Deepfake Detection Challenge ({DFDC}) Preview Dataset},
  journal = {arXiv preprint arXiv:1910.08854},
  year = {2019}
}"""

CORPORA.register(
    CorpusLoader(
        name="dfdc_preview",
        accepted="DFDC preview: a folder with 'dataset.json'",
        recognises=lambda path: (
            _is_table(path / "dataset.json") or ((path / "method_A").is_dir() and (path / "original_videos").is_dir())
        ),
        read=read_dfdc_preview,
        title="DFDC preview",
        corpus="DFDC preview",
        expected={"real": "in 'original_videos'", "fake": "in 'method_A' or 'method_B'"},
        paper="Dolhansky et al., arXiv:1910.08854",
        licence="DFDC terms: research only",
        fetch="https://ai.meta.com/datasets/dfdc (an account)",
        bibtex=_BIBTEX_OF_DFDC_PREVIEW,
        rank=2,
    )
)
CORPORA.register(
    CorpusLoader(
        name="dfdc",
        accepted="DFDC: a folder with 'dfdc_train_part_N/metadata.json' or 'test/labels.csv', or one such part",
        recognises=_recognises,
        read=read_dfdc,
        title="DeepFake Detection Challenge",
        corpus="DFDC",
        expected={"real": "by a metadata.json or labels.csv", "fake": "by a metadata.json or labels.csv"},
        paper="Dolhansky et al., arXiv:2006.07397",
        licence="DFDC terms: research only",
        fetch="https://www.kaggle.com/c/deepfake-detection-challenge or https://ai.meta.com/datasets/dfdc (an account)",
        bibtex=_BIBTEX_OF_DFDC,
        rank=2,  # behind folders of labels: these may have a metadata.json of their own
    )
)
