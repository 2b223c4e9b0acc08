"""Read published corpora of faces that were swapped, re-enacted or lip-synced.

A group below is a leakage group: its videos share a person or a source, and a split never divides the group. The
layouts follow the releases and the published code that reads them:

- FaceForensics++: ``original_sequences/youtube/C/videos/TTT.mp4`` are real. Fakes are
  ``manipulated_sequences/METHOD/C/videos/TTT_SSS.mp4``, the face of sequence SSS on sequence TTT. The compression C is
  raw (c0), c23 or c40. A sequence belongs to the YouTube video that it was cut from (``conversion_dict.json``): 1,000
  sequences of 977 videos make 478 groups. Seven YouTube videos are in two parts of the official split.
- DeepFakeDetection (DFD) unpacks into the same tree: ``original_sequences/actors/C/videos/AA__scene.mp4`` and
  ``manipulated_sequences/DeepFakeDetection/C/videos/AA_BB__scene__XXXXXXXX.mp4``.
- DeeperForensics-1.0: ``manipulated_videos/VARIANT/TTT_ACTOR.mp4`` are fake. Its reals are FaceForensics++'s originals
  at c23, which the release does not contain. ``source_videos`` are recordings of the actors, no reals of the same kind.
- Celeb-DF v2: ``Celeb-real/idA_N.mp4`` and ``YouTube-real/N.mp4`` are real, ``Celeb-synthesis/idA_idB_N.mp4`` is idA_N
  with the face of idB. ``List_of_testing_videos.txt`` has no header; its lines name test videos, such as
  ``1 YouTube-real/00170.mp4``, where 1 is real. People of the test part are in the training part, too.
- Celeb-DF++ has the same reals, and fakes of 22 methods in ``Celeb-synthesis/FaceSwap/METHOD/idA_idB_N.mp4``,
  ``FaceReenact/METHOD`` likewise and ``TalkingFace/METHOD/idA_N_test_REF.mp4``, which names no second person.
- DFDC: ``dfdc_train_part_N/metadata.json`` has label REAL or FAKE and the original of a fake by file name. Actors recur
  within a part, so a numbered part is one group. The test part is ``test/labels.csv`` (filename, label 0 or 1) or
  ``test/metadata.json`` (``is_fake`` by file name); neither names originals or actors.
- DFDC preview: ``dataset.json`` has label, set (train or test), target and swapped id by path.
- FakeAVCeleb: ``{RealVideo,FakeVideo}-{RealAudio,FakeAudio}/RACE/SEX/ID/*.mp4``, and ``meta_data.csv`` with nine column
  names and a trailing comma for ten values. The label is that of the video: RealVideo-FakeAudio is real here.
- WildDeepfake: ``{real,fake}_{train,test}/N.tar.gz`` unpack to ``N/{real,fake}/M/*.png``: archive N, sequence M. A
  sequence is a video. An archive is taken for one group, although nothing published says so. This layout was written
  without access to the archives.
- DeepfakeBench: ``dataset_json/NAME.json`` nests data set, kind of video, part, sometimes compression, and video, which
  has a ``label`` such as ``FF-real`` and the paths of its ``frames`` below the folder ``rgb``. The validation part
  repeats the test part where a corpus has none (``preprocessing/rearrange.py`` of its repository).
"""

import csv
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from posixpath import dirname, normpath
from typing import Any

from fvc_lib.corpus.corpus_files import CorpusFiles, Entry, Refusal, Rejections
from fvc_lib.corpus.listing import CorpusLoader, Listing, listing_of_rows, stated_label
from fvc_lib.corpus.sources.published import (
    PARTS,
    PathRules,
    Rule,
    annotations,
    entry_of_video,
    first_of,
    folders_in,
    holds,
    listed_but_absent,
    official_parts,
    read_listed,
    read_published,
)
from fvc_lib.services.atomic_files import escape_text, path_from_text, path_to_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.registry import CORPORA
from fvc_lib.services.tables import LABELS


def _require(folder: Path, title: str, name: str) -> None:
    """Raise ``DataError`` if the corpus folder ``folder`` has no folder ``name``; ``title`` is the corpus's name."""
    if not (folder / name).is_dir():
        raise DataError(
            f"corpus {str(folder)!r}: looks like {title}, but lacks {name!r}. Unpack it as it was published."
        )


# --- FaceForensics++, DFD and DeeperForensics.

_REAL = r"original_sequences/(?P<source>[^/]+)/(?P<compression>raw|c0|c23|c40)/videos/"
_FAKE = r"manipulated_sequences/(?P<method>[^/]+)/(?P<compression>raw|c0|c23|c40)/videos/"
_COMPRESSION = ("compression",)
FACEFORENSICS = PathRules(
    "original_sequences/youtube/c23/videos/000.mp4 or manipulated_sequences/Deepfakes/c23/videos/000_003.mp4",
    (
        Rule(
            rf"{_REAL}(?P<a>\d{{3}})\.\w+", "real", ("ff++ sequence {a}",), origin="{source}", listed="{a}",
            attributes=_COMPRESSION,
        ),
        Rule(
            rf"{_REAL}(?P<a>\d{{2}})__.+\.\w+", "real", ("dfd actor {a}",), origin="{source}",
            attributes=_COMPRESSION, corpus="DFD",
        ),
        Rule(
            rf"{_FAKE}(?P<a>\d{{3}})_(?P<b>\d{{3}})\.\w+", "fake", ("ff++ sequence {a}", "ff++ sequence {b}"),
            "{method}", listed="{a}", attributes=_COMPRESSION,
        ),
        Rule(
            rf"{_FAKE}(?P<a>\d{{2}})_(?P<b>\d{{2}})__.+__\w{{8}}\.\w+", "fake", ("dfd actor {a}", "dfd actor {b}"),
            "{method}", attributes=_COMPRESSION, corpus="DFD",
        ),
        Rule(".*/(masks|images)/.*", ""),
    ),
)  # fmt: skip
DEEPERFORENSICS = PathRules(
    "VARIANT/target_actor such as 000_M101.mp4",
    (
        Rule(
            r"manipulated_videos/(?P<variant>[^/]+)/(?:.*/)?(?P<name>(?P<a>\d{3})_(?P<actor>[MW]\d+)\.\w+)", "fake",
            ("ff++ sequence {a}", "deeperforensics actor {actor}"), "DeeperForensics", listed="{name}",
            attributes=("variant",),
        ),
    ),
)  # fmt: skip


def read_faceforensics(folder: Path) -> Listing:
    """List the videos of FaceForensics++ and DFD.

    The lists of the official split and ``conversion_dict.json`` may lie in ``folder``, in ``splits/`` or in
    ``dataset/``, as in the authors' repository. If all of them are missing, the videos are listed without a split, and
    a note says so.

    Raises:
        DataError: only one or two of the three lists exist, or a list is damaged.
    """
    youtube = _youtube_groups(folder)
    parts = official_parts(folder, _sequences_in, "splits/{}.json", "dataset/splits/{}.json", "{}.json")
    notes = []
    if not youtube and (folder / "original_sequences/youtube").is_dir():
        notes.append(
            "conversion_dict.json is not there: 23 sequences that share their YouTube videos with others stay in "
            "groups of their own. Put it next to original_sequences."
        )
    tops = ("original_sequences", "manipulated_sequences")
    return read_published(folder, "faceforensics", tops, FACEFORENSICS.describe, notes, parts=parts, also=youtube)


def _sequences_in(text: str) -> list[str]:
    """Return the names of the sequences in a list of FaceForensics++, with three digits each, such as ``003``.

    ``text`` is the content of the list: JSON with pairs of sequences. Some copies of it hold 3 or "3" in place of
    "003".
    """
    return [str(name).zfill(3) for one, other in json.loads(text) for name in (one, other)]


def _youtube_groups(folder: Path) -> dict[str, str]:
    """Map the leakage group of each FaceForensics++ sequence to the group of the YouTube video that it was cut from.

    For example, ``{"ff++ sequence 000": "youtube VIDEO"}``. The mapping is read from ``conversion_dict.json``; it is
    empty if that file is missing.
    """
    path = first_of(folder, "conversion_dict.json", "dataset/conversion_dict.json", "splits/conversion_dict.json")
    if path is None:
        return {}
    with annotations(path) as text:
        videos = {str(name).zfill(3): source.rsplit(" ", 1)[0] for name, source in json.loads(text).items()}
    return {f"ff++ sequence {name}": f"youtube {video}" for name, video in videos.items()}


def _files_in(text: str) -> list[str]:
    """Return the file names in a list of DeeperForensics, without folders.

    ``text`` is the content of the list. Its lines may begin with a folder, the variant of the fake.
    """
    return [line.strip().rsplit("/", 1)[-1] for line in text.splitlines()]


def read_deeperforensics(folder: Path) -> Listing:
    """List the videos of DeeperForensics, which are all fake.

    Raises:
        DataError: one or two lists of the official split are missing.
    """
    parts = official_parts(folder, _files_in, "lists/splits/{}.txt", "splits/{}.txt")
    note = "DeeperForensics has fakes only. Its reals are FaceForensics++'s originals at c23: give both corpora."
    return read_published(
        folder, "deeperforensics", ["manipulated_videos"], DEEPERFORENSICS.describe, [note],
        parts=parts, also=_youtube_groups(folder),
    )  # fmt: skip


# --- Celeb-DF and Celeb-DF++.

_SCENARIOS = ("FaceSwap", "FaceReenact", "TalkingFace")
_FOLDERS = ("Celeb-real", "YouTube-real", "Celeb-synthesis")
_SYNTHESIS = "Celeb-synthesis/(?:(?P<scenario>FaceSwap|FaceReenact|TalkingFace)/(?P<method>[^/]+)/)"
_SWAP = r"(?:.*/)?(?P<a>id\d+)_(?P<b>id\d+)_\d+\.\w+"
_TESTED = "List_of_testing_videos.txt"
_PEOPLE = ("celeb-df {a}", "celeb-df {b}")
_SCENARIO = ("scenario",)
CELEB_DF = PathRules(
    "Celeb-real/id0_0000.mp4, YouTube-real/00000.mp4, Celeb-synthesis/id0_id1_0000.mp4 or FaceSwap/METHOD",
    (
        Rule(r"YouTube-real/(?:.*/)?(?P<a>\d+)\.\w+", "real", ("celeb-df youtube {a}",), origin="youtube"),
        Rule(r"Celeb-real/(?:.*/)?(?P<a>id\d+)_\d+\.\w+", "real", ("celeb-df {a}",), origin="celebrities"),
        # The fakes of Celeb-DF v2 that Celeb-DF++ contains.
        Rule(
            rf"Celeb-synthesis/(?P<scenario>FaceSwap)/Celeb-DF(?:-v2)?/{_SWAP}", "fake", _PEOPLE, "celeb-df synthesis",
            attributes=_SCENARIO,
        ),
        Rule(rf"{_SYNTHESIS}{_SWAP}", "fake", _PEOPLE, "{method}", attributes=_SCENARIO),
        Rule(
            rf"{_SYNTHESIS}(?:.*/)?(?P<a>id\d+)_\d+_test_\w+\.\w+", "fake", ("celeb-df {a}",), "{method}",
            attributes=_SCENARIO,
        ),
        Rule(rf"Celeb-synthesis/{_SWAP}", "fake", _PEOPLE, "celeb-df synthesis"),
    ),
)  # fmt: skip


def read_celeb_df(folder: Path) -> Listing:
    """List the videos of Celeb-DF v2 or Celeb-DF++, with the official test part if its list is there.

    Raises:
        DataError: ``Celeb-real`` is missing, or the list has a malformed line.
    """
    _require(folder, "Celeb-DF", "Celeb-real")
    parts = official_parts(folder, _tested_in, _TESTED)
    is_plus = first_of(folder / "Celeb-synthesis", *_SCENARIOS) is not None
    rules = tuple(replace(rule, corpus="Celeb-DF++" if is_plus else "") for rule in CELEB_DF.rules)
    return read_published(
        folder, "celeb_df", _FOLDERS, replace(CELEB_DF, rules=rules).describe,
        listed_but_absent(folder, _TESTED, parts), parts=parts, other_part="train" if parts else None,
    )  # fmt: skip


def _tested_in(text: str) -> list[str]:
    """Return the paths of the test videos in the list of Celeb-DF.

    ``text`` is the content of the list, with lines such as ``1 YouTube-real/00170.mp4`` (label and path).
    """
    return [path_to_text(path) for _, path in map(str.split, filter(str.strip, text.splitlines()))]


# --- DFDC and its preview.

_LABELS = {"0": "real", "1": "fake", "real": "real", "fake": "fake"}
_PART = re.compile(r"(?:dfdc_train_part_|part_)?(\d+)")
# The begin of a JSON object that maps file names to objects with a label.
_LABELLED = re.compile(rb'\s*\{\s*"[^"]*"\s*:\s*\{[^{}]*"(label|is_fake)"\s*:\s*"?(real|fake|[01])\b', re.IGNORECASE)


def read_dfdc(folder: Path) -> Listing:
    """List the videos of DFDC: of all parts in ``folder``, or of ``folder`` itself if it is a part.

    Raises:
        DataError: a table of labels is missing or damaged, or has an unknown label.
    """
    tables = _dfdc_tables(folder)
    entries = {entry.path: entry for table in tables for entry in _dfdc_entries(folder, table)}
    is_tested = any(entry.official_split == "test" for entry in entries.values())
    note = "The originals and actors of test videos are not published: folds may separate related videos."
    tops = [table.parent.relative_to(folder).as_posix() for table in tables]
    return read_listed(folder, "dfdc", tops, "metadata.json or labels.csv", entries, [note] * is_tested)


def _dfdc_tables(folder: Path) -> list[Path]:
    """Return for each part of DFDC the path of its file of labels, ``metadata.json`` or ``labels.csv``.

    A part is a folder such as ``dfdc_train_part_3`` or ``test``. ``folder`` itself and the folders at most two levels
    below it are searched for parts. The file of labels may be missing in a part.
    """
    tops = [folder, *sorted(folder.glob("*/")), *sorted(folder.glob("*/*/"))]
    parts = [top for top in tops if (top.name == "test" or _PART.fullmatch(top.name)) and any(top.glob("*.mp4"))]
    tables = {top: first_of(top, "metadata.json", "labels.csv") for top in tops}
    return [table or top / "metadata.json" for top, table in tables.items() if table or top in parts]


def _dfdc_entries(folder: Path, path: Path) -> Iterator[Entry]:
    """Yield the entries of the videos in a part of DFDC, whose file of labels is ``path``.

    Videos are in the official test part if their row has ``is_fake`` or the file is in a folder ``test``. All other
    videos are in the training part.
    """
    number = _PART.fullmatch(path.parent.name)
    with annotations(path) as text:
        rows = _dfdc_rows(path, text)
        if not rows:
            raise ValueError("it lists no video")
        for name, row in rows.items():
            is_test = path.parent.name == "test" or "is_fake" in row
            label = _LABELS[str(row.get("is_fake", row.get("label"))).lower()]
            group = f"dfdc part {number[1]}" if number else f"dfdc original {row.get('original') or name}"
            inner = "videos" if is_test and (path.parent / "videos").is_dir() else ""
            groups = [f"dfdc test {name}" if is_test else group]
            place = path_to_text((path.parent / inner / name).relative_to(folder))
            yield entry_of_video(place, label, groups, "dfdc", "test" if is_test else "train")


def _dfdc_rows(path: Path, text: str) -> dict[str, dict[str, Any]]:
    """Map the file name of each video to its row in a file of labels, a mapping from field names to values.

    ``text`` is the content of the CSV or JSON file ``path``.
    """
    if path.suffix == ".csv":
        return {row["filename"].strip(): {"is_fake": row["label"].strip()} for row in csv.DictReader(text.splitlines())}
    rows: dict[str, dict[str, Any]] = json.loads(text)
    return rows


def _has_labels(path: Path) -> bool:
    """Return whether the JSON file ``path`` begins like a file of labels of DFDC: with a file name and its label.

    This distinguishes DFDC from other corpora with JSON files of the same name. A missing file gives False.
    """
    return path.is_file() and _LABELLED.match(path.read_bytes()[:4096]) is not None


def _is_dfdc(path: Path) -> bool:
    if any(name.startswith("dfdc_train_part_") for name in (path.name, *folders_in(path))):
        return path.is_dir()
    tables = (table for top in ("", "*/", "*/*/") for table in path.glob(f"{top}metadata.json"))
    return (path / "test/labels.csv").is_file() or any(map(_has_labels, tables))


def read_dfdc_preview(folder: Path) -> Listing:
    """List the videos of the DFDC preview, which are in ``dataset.json``.

    Raises:
        DataError: ``dataset.json`` is missing or damaged, or a row has no known label, or names no person.
    """
    entries = dict[str, Entry]()
    with annotations(folder / "dataset.json") as text:
        for path, row in json.loads(text).items():
            label, (top, _, name) = _LABELS[row["label"].lower()], path.rpartition("/")
            stated = [str(row[key]) for key in ("target_id", "swapped_id") if row.get(key)]
            people = stated or re.findall(r"(?<![A-Za-z\d])\d{4,}(?!\d)", name)
            if not people:
                raise ValueError(f"{path!r} has no ids of people")
            groups = [f"dfdc preview person {person}" for person in people]
            origin = top.split("/")[0] if label == "fake" else "dfdc preview"
            place = path_to_text(path)
            entries[place] = entry_of_video(place, label, groups, origin, PARTS.get(row.get("set")))
    return read_listed(folder, "dfdc_preview", folders_in(folder), "dataset.json", entries)


# --- FakeAVCeleb.

_AUDIO_FOLDERS = ("RealVideo-RealAudio", "RealVideo-FakeAudio", "FakeVideo-RealAudio", "FakeVideo-FakeAudio")
_AUDIO_FOLDER = re.compile(r"((Real|Fake)Video-(Real|Fake)Audio.*?)/?$")


def read_fakeavceleb(folder: Path) -> Listing:
    """List the videos of FakeAVCeleb, with people and methods from ``meta_data.csv``.

    Raises:
        DataError: the table is missing or damaged, or a row has not ten values or names no folder of the corpus.
    """
    top = first_of(folder, "FakeAVCeleb") or folder  # the release's outer folder
    _require(top, "FakeAVCeleb", "RealVideo-RealAudio")
    entries = dict[str, Entry]()
    with annotations(top / "meta_data.csv") as text:
        for cells in list(filter(None, csv.reader(text.splitlines())))[1:]:
            source, target1, target2, method, _, _, race, sex, name, place = map(str.strip, cells)
            below, kind, sound = _AUDIO_FOLDER.findall(place)[0]
            people = dict.fromkeys((below.rpartition("/")[2], source, target1, target2))
            groups = [f"fakeavceleb {person}" for person in people if person not in ("", "-")]
            attributes = {"race": race, "sex": sex, "audio": sound.lower()}
            # faceswap-wav2lip means two methods. They are joined by "+", because single names elsewhere contain "-".
            origin = method.replace("-", "+") if kind == "Fake" else "voxceleb2"
            path = f"{below}/{name}"
            entries[path] = entry_of_video(path, kind.lower(), groups, origin, None, attributes)
    note = "Audio is not judged: RealVideo-FakeAudio counts as real, because its picture is."
    return read_listed(top, "fakeavceleb", _AUDIO_FOLDERS, "meta_data.csv", entries, [note])


# --- WildDeepfake.

_WILD_FOLDERS = ("real_train", "real_test", "fake_train", "fake_test")
_OUTER = "deepfake_in_the_wild"
WILDDEEPFAKE = PathRules(
    "a folder of pictures such as real_train/1/real/3",
    tuple(
        Rule(
            rf"(?P<top>{label}_(?P<part>train|test))/(?P<archive>[^/]+)/{label}/[^/]+", label,
            ("wilddeepfake {top} {archive}",), origin, listed="{part}",
        )
        for label, origin in (("real", "internet"), ("fake", ""))
    ),
)  # fmt: skip


def read_wilddeepfake(folder: Path) -> Listing:
    """List the videos of WildDeepfake; a video is a folder of pictures, which are its frames.

    The name of the top folder, such as ``real_train``, states the label and the official part.
    """
    top = first_of(folder, _OUTER) or folder
    notes = ["Archives are taken for groups, because nothing says which sequences are of one video."]
    return read_published(top, "wilddeepfake", _WILD_FOLDERS, WILDDEEPFAKE.describe, notes, pictures=True, parts=PARTS)


# --- Lists of frames of DeepfakeBench.

_DFDC_RULE = Rule(r"(?:.*/)?dfdc_train_part_(?P<a>\d+)/.*", "fake", ("dfdc part {a}",))
_GROUPED = PathRules("", (*FACEFORENSICS.rules, *CELEB_DF.rules, _DFDC_RULE))


def read_deepfakebench(path: Path) -> Listing:
    """List the videos of a list of DeepfakeBench. A video is the folder of its frames, relative to the list's folder.

    Raises:
        DataError: the list is damaged.
    """
    files = CorpusFiles(path.parent)
    rows = dict[str, Entry]()
    with annotations(path) as text:
        for part, video in _frame_lists(json.loads(text), None):
            row = _frames_entry(video, part)
            key = f"{row.path} {row.label}"
            parts = {part, rows.get(key, row).official_split}
            if len(parts) > 1:
                part = "test" if parts == {"test", "validation"} else None
            rows[key] = replace(row, official_split=part, origin=path.name, row=len(rows) + 1)
    named = (files.normalized(str(path_from_text(row.path))) for row in rows.values())
    places = [place if isinstance(place, Refusal) else files.check(place) or escape_text(place) for place in named]
    return listing_of_rows(files, "deepfakebench", list(rows.values()), places, Rejections())


def _frame_lists(node: Mapping[str, Any], part: str | None) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    """Yield (part, video) for every video in a list of DeepfakeBench, which is nested JSON.

    ``part`` of a result is train, validation, test or None. ``video`` is the mapping with the video's ``label`` and the
    paths of its ``frames``.

    Args:
        node: the list, or a mapping nested in it.
        part: part that the outer mappings state, or None.
    """
    for name, inner in node.items():
        inner_part = PARTS.get(name, part)
        if "frames" in inner:
            yield inner_part, inner
        else:
            yield from _frame_lists(inner, inner_part)


def _frames_entry(video: Mapping[str, Any], part: str | None) -> Entry:
    """Return the ``Entry`` (path, label, leakage groups, part) of a video in a list of DeepfakeBench.

    The frames come from FaceForensics++, DFD, Celeb-DF, DFDC or other corpora. For these four, the leakage groups are
    read from the names of files and folders, as in the original corpus.

    Args:
        video: the video's ``label``, such as ``FF-DF``, and the paths of its ``frames``.
        part: official part: train, validation, test or None.
    """
    word = video["label"]
    label = stated_label(word) or ""
    if label not in LABELS and "real" in label:
        label = "real"
    elif "fake" in label or label.startswith("ff-"):
        label = "fake"
    first = next(iter(video["frames"]), "")
    folder = normpath(dirname(first.replace("\\", "/")))
    name = folder.replace("/frames/", "/videos/") + ".mp4"
    ends = (name.split("/", start)[-1] for start in range(name.count("/") + 1))
    known = [
        (entry.stated_group or "", *entry.links) for entry in map(_GROUPED.describe, ends) if isinstance(entry, Entry)
    ]
    return entry_of_video(escape_text(folder), label, known[0] if known else (), word, part)


# --- Declarations.

CORPORA.register(
    CorpusLoader(
        name="faceforensics",
        accepted="FaceForensics++ or DFD: a folder with 'original_sequences/' and 'manipulated_sequences/'",
        recognises=holds("original_sequences", "manipulated_sequences"),
        read=read_faceforensics,
        title="FaceForensics++ (with FaceShifter) and DeepFakeDetection",
        corpus="FaceForensics++",
        expected={
            "real": "in 'original_sequences/youtube/c23/videos' or the like",
            "fake": "in 'manipulated_sequences/Deepfakes/c23/videos' or the like",
        },
        paper="Rossler et al., ICCV 2019, arXiv:1901.08971",
        licence="FaceForensics terms of use: research only, on request",
        fetch="https://github.com/ondyari/FaceForensics (a form); its dataset/ has splits/ and conversion_dict.json",
        bibtex=r"""@inproceedings{roessler2019faceforensics,
  author = {R{\"o}ssler, Andreas and Cozzolino, Davide and Verdoliva, Luisa and Riess, Christian and Thies, Justus and
            Nie{\ss}ner, Matthias},
  title = {{FaceForensics++}: Learning to Detect Manipulated Facial Images},
  booktitle = {IEEE/CVF International Conference on Computer Vision (ICCV)},
  year = {2019}
}""",
    )
)
CORPORA.register(
    CorpusLoader(
        name="deeperforensics",
        accepted="DeeperForensics-1.0: a folder with 'manipulated_videos/'",
        recognises=holds("manipulated_videos", "lists/splits"),
        read=read_deeperforensics,
        title="DeeperForensics-1.0",
        corpus="DeeperForensics",
        expected={"fake": "in 'manipulated_videos/VARIANT'"},
        paper="Jiang et al., CVPR 2020, arXiv:2001.03024",
        licence="DeeperForensics terms: research only, on request",
        fetch="https://github.com/EndlessSora/DeeperForensics-1.0 (a form); the reals are FaceForensics++'s",
        bibtex="""@inproceedings{jiang2020deeperforensics,
  author = {Jiang, Liming and Li, Ren and Wu, Wayne and Qian, Chen and Loy, Chen Change},
  title = {{DeeperForensics-1.0}: A Large-Scale Dataset for Real-World Face Forgery Detection},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
  year = {2020}
}""",
    )
)
CORPORA.register(
    CorpusLoader(
        name="celeb_df",
        accepted="Celeb-DF: a folder with 'Celeb-real/', 'YouTube-real/' and 'Celeb-synthesis/'",
        recognises=holds("Celeb-real", "Celeb-synthesis"),
        read=read_celeb_df,
        title="Celeb-DF v2 or Celeb-DF++",
        corpus="Celeb-DF",
        expected={"real": "in 'Celeb-real' or 'YouTube-real'", "fake": "in 'Celeb-synthesis'"},
        paper="Li et al., CVPR 2020, arXiv:1909.12962; Celeb-DF++: Li et al., arXiv:2507.18015",
        licence="Celeb-DF terms: research only, on request",
        fetch="https://github.com/yuezunli/celeb-deepfakeforensics and https://github.com/OUC-VAS/Celeb-DF-PP (forms)",
        bibtex="""@inproceedings{li2020celebdf,
  author = {Li, Yuezun and Yang, Xin and Sun, Pu and Qi, Honggang and Lyu, Siwei},
  title = {{Celeb-DF}: A Large-Scale Challenging Dataset for {DeepFake} Forensics},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
  year = {2020}
}""",
    )
)
CORPORA.register(
    CorpusLoader(
        name="dfdc_preview",
        accepted="DFDC preview: a folder with 'dataset.json'",
        recognises=lambda path: (
            _has_labels(path / "dataset.json") or ((path / "method_A").is_dir() and (path / "original_videos").is_dir())
        ),
        read=read_dfdc_preview,
        title="DFDC preview",
        corpus="DFDC preview",
        expected={"real": "in 'original_videos'", "fake": "in 'method_A' or 'method_B'"},
        paper="Dolhansky et al., arXiv:1910.08854",
        licence="DFDC terms: research only",
        fetch="https://ai.meta.com/datasets/dfdc (an account)",
        bibtex="""@article{dolhansky2019dfdc,
  author = {Dolhansky, Brian and Howes, Russ and Pflaum, Ben and Baram, Nicole and Canton Ferrer, Cristian},
  title = {The Deepfake Detection Challenge ({DFDC}) Preview Dataset},
  journal = {arXiv preprint arXiv:1910.08854},
  year = {2019}
}""",
        rank=2,
    )
)
CORPORA.register(
    CorpusLoader(
        name="dfdc",
        accepted="DFDC: a folder with 'dfdc_train_part_N/metadata.json' or 'test/labels.csv', or one such part",
        recognises=_is_dfdc,
        read=read_dfdc,
        title="DeepFake Detection Challenge",
        corpus="DFDC",
        expected={"real": "by a metadata.json or labels.csv", "fake": "by a metadata.json or labels.csv"},
        paper="Dolhansky et al., arXiv:2006.07397",
        licence="DFDC terms: research only",
        fetch="https://www.kaggle.com/c/deepfake-detection-challenge or https://ai.meta.com/datasets/dfdc (an account)",
        bibtex="""@article{dolhansky2020dfdc,
  author = {Dolhansky, Brian and Bitton, Joanna and Pflaum, Ben and Lu, Jikuo and Howes, Russ and Wang, Menglin and
            Canton Ferrer, Cristian},
  title = {The {DeepFake} Detection Challenge ({DFDC}) Dataset},
  journal = {arXiv preprint arXiv:2006.07397},
  year = {2020}
}""",
        rank=2,  # tried after folders of labels, which may have another metadata.json
    )
)
CORPORA.register(
    CorpusLoader(
        name="fakeavceleb",
        accepted="FakeAVCeleb: a folder with 'RealVideo-RealAudio/', 'FakeVideo-FakeAudio/' ... and 'meta_data.csv'",
        recognises=holds(*_AUDIO_FOLDERS, *(f"FakeAVCeleb/{name}" for name in _AUDIO_FOLDERS)),
        read=read_fakeavceleb,
        title="FakeAVCeleb",
        corpus="FakeAVCeleb",
        expected={"real": "in 'RealVideo-RealAudio'", "fake": "in 'FakeVideo-RealAudio' or 'FakeVideo-FakeAudio'"},
        paper="Khalid et al., NeurIPS 2021 (datasets and benchmarks), arXiv:2108.05080",
        licence="FakeAVCeleb terms: research only, on request",
        fetch="https://github.com/DASH-Lab/FakeAVCeleb (a form)",
        bibtex="""@inproceedings{khalid2021fakeavceleb,
  author = {Khalid, Hasam and Tariq, Shahroz and Kim, Minha and Woo, Simon S.},
  title = {{FakeAVCeleb}: A Novel Audio-Video Multimodal Deepfake Dataset},
  booktitle = {NeurIPS Datasets and Benchmarks},
  year = {2021}
}""",
    )
)
CORPORA.register(
    CorpusLoader(
        name="wilddeepfake",
        accepted="WildDeepfake: a folder with 'real_train/', 'fake_train/' ... and unpacked archives in them",
        recognises=holds(*_WILD_FOLDERS, *(f"{_OUTER}/{name}" for name in _WILD_FOLDERS)),
        read=read_wilddeepfake,
        title="WildDeepfake",
        corpus="WildDeepfake",
        expected={"real": "in 'real_train/N/real/M'", "fake": "in 'fake_train/N/fake/M'"},
        paper="Zi et al., ACM Multimedia 2020, arXiv:2101.01456",
        licence="the terms on its page",
        fetch="https://github.com/OpenTAI/wild-deepfake or https://huggingface.co/datasets/xingjunm/WildDeepfake",
        bibtex="""@inproceedings{zi2020wilddeepfake,
  author = {Zi, Bojia and Chang, Minghao and Chen, Jingjing and Ma, Xingjun and Jiang, Yu-Gang},
  title = {{WildDeepfake}: A Challenging Real-World Dataset for Deepfake Detection},
  booktitle = {ACM International Conference on Multimedia},
  year = {2020}
}""",
    )
)
CORPORA.register(
    CorpusLoader(
        name="deepfakebench",
        accepted="a list of frames of DeepfakeBench, dataset_json/NAME.json, put into its folder 'rgb'",
        recognises=lambda path: path.suffix == ".json" and path.is_file() and b'"frames"' in path.read_bytes()[:4096],
        read=read_deepfakebench,
        title="DeepfakeBench's frames of FaceForensics++, Celeb-DF, DFDC and others",
        paper="Yan et al., NeurIPS 2023 (Datasets and Benchmarks), arXiv:2307.01426",
        licence="the terms of each corpus; the lists: CC BY-NC 4.0",
        fetch="https://github.com/SCLBD/DeepfakeBench (its README: Rgb-format Datasets, Json Configurations)",
        bibtex="""@inproceedings{yan2023deepfakebench,
  author = {Yan, Zhiyuan and Zhang, Yong and Yuan, Xinhang and Lyu, Siwei and Wu, Baoyuan},
  title = {DeepfakeBench: A Comprehensive Benchmark of Deepfake Detection},
  booktitle = {Advances in Neural Information Processing Systems},
  volume = {36},
  pages = {4534--4565},
  year = {2023}
}""",
    )
)
