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

from fvc_lib.corpus.label_table import read_label_table
from fvc_lib.corpus.listing import CorpusLoader, Listing, Refusal, Rejections
from fvc_lib.corpus.sources.published import (
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
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.registry import CORPORA

_LABELS = {"0": "real", "1": "fake"}  # of the test part
_PART = re.compile(r"(?:dfdc_train_part_|part_)?(\d+)")


def read_dfdc(folder: AnyPath) -> Listing:
    """The listing of the parts that are there; the folder may also be one part, with its ``metadata.json``.

    Raises:
        DataError: a table of labels is missing or cannot be read.
    """
    folder = Path(folder)
    rows: dict[str, Described] = {}
    _refuse_unlabelled(folder)
    parts = [""] if (folder / "metadata.json").is_file() else _parts(folder)
    for part in parts:
        rows.update(_part_rows(folder, part))
    rows.update(_test_rows(folder))
    notes = listed_but_absent(folder, "metadata.json or labels.csv", rows)
    if any(row.split == "test" for row in rows.values()):
        notes.append(
            "Nothing says which test videos show one original or actor: unless looks tie them, folds may part them."
        )
    known = {path_to_text(path): found for path, found in rows.items()}

    def described(path: str) -> Described | Refusal:
        return known.get(path) or Refusal("not_listed", f"{path!r}: no metadata.json or labels.csv names it.")

    walked = ["."] if parts == [""] else [*(part for part in parts if str(Path(part).parent) not in parts), "test"]
    return read_published(folder, "dfdc", walked, described, notes)


def _is_table(path: Path) -> bool:
    """Whether a JSON file says of file names whether they are real or fake, as DFDC's do; others have any content."""
    try:
        table = read_json(path)
    except DataError:
        return False
    rows = table.values() if isinstance(table, dict) else ()
    said = (row.get("label", row.get("is_fake")) for row in rows if isinstance(row, dict))
    return any(str(each).lower() in ("real", "fake", *_LABELS) for each in said)


def _parts(folder: Path) -> list[str]:
    below = {name: folders_in(folder / name) for name in folders_in(folder) if name != "test"}
    found = [name for name in below if (folder / name / "metadata.json").is_file()]
    # The archives unpack as they are, or each into a folder of its own name.
    nested = [f"{a}/{b}" for a, names in below.items() for b in names if (folder / a / b / "metadata.json").is_file()]
    return found + nested


def _refuse_unlabelled(folder: Path) -> None:
    """A part whose table is missing would be left out without a word: its archive was not unpacked whole."""
    for name in folders_in(folder):
        tables = ("metadata.json", "labels.csv") if name == "test" else ("metadata.json",)
        there = name == "test" or _PART.fullmatch(name)
        nested = any((folder / name / below / "metadata.json").is_file() for below in folders_in(folder / name))
        if there and not nested and any((folder / name).iterdir()):
            require(folder, "DFDC", **{f"table of {name}": [f"{name}/{table}" for table in tables]})


def _part_rows(folder: Path, part: str) -> dict[str, Described]:
    """Rows by path of a ``metadata.json``; one with ``is_fake`` is of the test part."""
    path = folder / part / "metadata.json"
    table = read_json(path)
    if not isinstance(table, dict):
        raise DataError(f"{str(path)!r}: wanted an object of file name to label, got {type(table).__name__}.")
    number = _PART.fullmatch(part.rsplit("/", 1)[-1] or folder.name)
    inner = "videos" if (path.parent / "videos").is_dir() else ""
    rows = {}
    for name, row in table.items():
        said = row if isinstance(row, dict) else {}
        is_test = part == "test" or "is_fake" in said
        stated = str(said.get("is_fake", said.get("label", ""))).lower()
        label = _LABELS.get(stated, stated)
        if label not in ("real", "fake"):
            raise DataError(
                f"{str(path)!r}: {name!r}: got the label {stated!r}, wanted REAL or FAKE, or is_fake of 0 or 1."
            )
        group = f"dfdc part {number[1]}" if number else f"dfdc original {said.get('original') or name}"
        group = f"dfdc test {name}" if is_test else group
        place = "/".join(filter(None, (part, inner if is_test else "", name)))
        rows[place] = _row(label, group, "test" if is_test else "train")
    return rows


def _test_rows(folder: Path) -> dict[str, Described]:
    path = first_of(folder, "test/labels.csv", "test/metadata.json")
    if path is None:
        return {}
    if path.suffix == ".json":
        return _part_rows(folder, "test")
    try:
        table = read_label_table(path)
        columns = [table.require((name,)) for name in ("filename", "label")]
    except UsageError as error:
        raise DataError(f"{error} Fetch it again.") from error
    where = "test/videos" if (folder / "test/videos").is_dir() else "test"
    rows = {}
    for number, cells in table.records(columns, Rejections()):
        label = _LABELS.get(cells["label"].strip())
        if label is None:
            raise DataError(
                f"test/labels.csv row {number}: got the label {cells['label']!r}, wanted 0 or 1 (1 is fake)."
            )
        name = cells["filename"].strip()
        rows[f"{where}/{name}"] = _row(label, f"dfdc test {name}", "test")
    return rows


def _row(label: str, group: str, split: str) -> Described:
    fake = label == "fake"
    return Described(label, (group,), "dfdc" if fake else None, None if fake else "dfdc", split)


def read_dfdc_preview(folder: AnyPath) -> Listing:
    """The listing of ``dataset.json``.

    Raises:
        DataError: it is no such table, or a row has no label.
    """
    folder = Path(folder)
    require(folder, "DFDC preview", table=("dataset.json",))
    table = read_json(folder / "dataset.json")
    if not isinstance(table, dict):
        raise DataError(f"{str(folder / 'dataset.json')!r}: wanted an object of path to label and set.")
    rows = {path_to_text(name): _preview_row(name, row) for name, row in table.items()}
    return read_published(
        folder, "dfdc_preview", folders_in(folder),
        lambda path: rows.get(path, Refusal("not_listed", f"{path!r}: dataset.json does not name it.")),
        listed_but_absent(folder, "dataset.json", table),
    )  # fmt: skip


def _preview_row(path: str, row: Mapping[str, Any]) -> Described | Refusal:
    label = str(row.get("label", "") if isinstance(row, dict) else row).lower()
    if label not in ("real", "fake"):
        raise DataError(f"dataset.json: {path!r}: got the label {label!r}, wanted real or fake.")
    stated = [str(row[key]) for key in ("target_id", "swapped_id") if row.get(key)]
    people = stated or re.findall(r"(?<![A-Za-z\d])\d{4,}(?!\d)", path.rsplit("/", 1)[-1])
    if not people:
        return unknown_name(path, "the ids of the people in the name, as in 643786_1460296_A_000.mp4")
    groups = tuple(dict.fromkeys(f"dfdc preview person {each}" for each in people))
    split = {"train": "train", "test": "test", "val": "validation"}.get(str(row.get("set", "")))
    if label == "real":
        return Described("real", groups, None, "dfdc preview", split)
    return Described("fake", groups, path.split("/", 1)[0], None, split)


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
        recognises=lambda path: (
            path.is_dir()
            and (
                any(name.startswith("dfdc_train_part_") for name in (path.name, *folders_in(path)))
                or (path / "test/labels.csv").is_file()
                or any(_is_table(path / part / "metadata.json") for part in ("", "test", *_parts(path)))
            )
        ),
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
