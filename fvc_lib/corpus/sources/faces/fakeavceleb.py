"""FakeAVCeleb: videos and voices of celebrities, faked together or one of them alone.

``{RealVideo,FakeVideo}-{RealAudio,FakeAudio}/RACE/SEX/ID/*.mp4``, and ``meta_data.csv`` with nine column names and a
trailing comma for ten values. What is *seen* makes the label: RealVideo-FakeAudio is real here, because audio is not
judged. Source: Khalid et al., "FakeAVCeleb: a novel audio-video multimodal deepfake dataset", NeurIPS 2021 (datasets).
"""

import csv
import io
import re
from pathlib import Path

from fvc_lib.corpus.corpus_files import Refusal
from fvc_lib.corpus.listing import CorpusLoader, Listing
from fvc_lib.corpus.sources.published import Described, listed_but_absent, read_published, require, unknown_name
from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.errors import DataError
from fvc_lib.services.registry import CORPORA

_FOLDER = re.compile(r"(Real|Fake)Video-(Real|Fake)Audio")
_FOLDERS = tuple(f"{video}Video-{audio}Audio" for video in ("Real", "Fake") for audio in ("Real", "Fake"))
_COLUMNS = ("source", "target1", "target2", "method", "category", "type", "race", "gender", "filename", "folder")


def read_fakeavceleb(folder: AnyPath) -> Listing:
    """List the four folders, with people and methods from ``meta_data.csv``.

    Raises:
        DataError: the table is missing, or a row has not ten values.
    """
    folder = Path(folder)
    top = folder / "FakeAVCeleb" if (folder / "FakeAVCeleb").is_dir() else folder  # the release's outer folder
    require(top, "FakeAVCeleb", "RealVideo-RealAudio", "meta_data.csv")
    rows = _table(top / "meta_data.csv")
    audio = "Audio is not judged: RealVideo-FakeAudio counts as real, because what is seen is."
    notes = [audio] if (top / "RealVideo-FakeAudio").is_dir() else []
    notes += listed_but_absent(top, "meta_data.csv", [row["path"] for row in rows.values()])
    return read_published(top, "fakeavceleb", _FOLDERS, lambda path: _described(path, rows), notes)


def _described(path: str, rows: dict[tuple[str, str, str], dict[str, str]]) -> Described | Refusal:
    parts = path.split("/")
    found = _FOLDER.fullmatch(parts[0])
    if found is None or len(parts) < 5:
        return unknown_name(path, "RealVideo-RealAudio/RACE/SEX/ID/NAME.mp4")
    kind, race, sex, person = parts[:4]
    row = rows.get((kind, person, parts[-1]))
    if row is None:  # its other people are not known, so they might lie in two folds
        return Refusal("not_listed", f"{path!r}: no row of meta_data.csv names it. Fetch the table again.")
    people = [person, *(row[key] for key in ("source", "target1", "target2"))]
    groups = [f"fakeavceleb {name}" for name in people if name not in ("", "-")]
    attributes = {"race": race, "sex": sex, "audio": found[2].lower()}
    if found[1] == "Real":
        return Described("real", groups, None, "voxceleb2", None, attributes)
    # faceswap-wav2lip is both: "+" is how a name says so, as "-" stands in single names elsewhere.
    return Described("fake", groups, row["method"].replace("-", "+"), None, None, attributes)


def _table(path: Path) -> dict[tuple[str, str, str], dict[str, str]]:
    """Return rows with their ``path`` by (folder, person, file name). The header does not name the tenth column."""
    text = path.read_bytes().decode("utf-8-sig", "replace")
    rows = {}
    for number, cells in enumerate(filter(None, csv.reader(io.StringIO(text, newline="")))):
        if not number:
            continue
        if len(cells) != len(_COLUMNS):
            raise DataError(
                f"meta_data.csv row {number}: got {len(cells)} values, wanted {len(_COLUMNS)}. Fetch it again."
            )
        row = dict(zip(_COLUMNS, (cell.strip() for cell in cells), strict=True))
        below = row["folder"].strip("/").split("/")
        kind = next((part for part in below if _FOLDER.fullmatch(part)), row["type"])
        person = below[-1] if below[-1].startswith("id") else row["source"]
        place = below[below.index(kind) :] if kind in below else [kind, row["race"], row["gender"], person]
        rows[kind, person, row["filename"]] = row | {"path": "/".join([*place, row["filename"]])}
    return rows


_BIBTEX = """@inproceedings{khalid2021fakeavceleb,
  author = {Khalid, Hasam and Tariq, Shahroz and Kim, Minha and Woo, Simon S.},
  title = {{FakeAVCeleb}: A Novel Audio-Video Multimodal Deepfake Dataset},
  booktitle = {NeurIPS Datasets and Benchmarks},
  year = {2021}
}"""

CORPORA.register(
    CorpusLoader(
        name="fakeavceleb",
        accepted="FakeAVCeleb: a folder with 'RealVideo-RealAudio/', 'FakeVideo-FakeAudio/' ... and 'meta_data.csv'",
        recognises=lambda path: any(
            (path / outer / name).is_dir() for outer in ("", "FakeAVCeleb") for name in _FOLDERS
        ),
        read=read_fakeavceleb,
        title="FakeAVCeleb",
        corpus="FakeAVCeleb",
        expected={"real": "in 'RealVideo-RealAudio'", "fake": "in 'FakeVideo-RealAudio' or 'FakeVideo-FakeAudio'"},
        paper="Khalid et al., NeurIPS 2021 (datasets and benchmarks), arXiv:2108.05080",
        licence="FakeAVCeleb terms: research only, on request",
        fetch="https://github.com/DASH-Lab/FakeAVCeleb (a form)",
        bibtex=_BIBTEX,
    )
)
