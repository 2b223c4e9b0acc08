"""Read corpora of any kind of fake: folders of labels, manifests, tars, and FVC-2018.

A manifest is a table with one row per video. FVC-2018 has seed videos in ``FVC.csv``, and near-duplicates of them in
``FVC_dup.csv``. A cascade is a seed video with its near-duplicates; 5,579 rows form 380 cascades. The corpus consists
of annotations only. Videos have to be fetched one by one into ``videos/<platform id>.<extension>``, and many were
deleted. Source: Papadopoulou et al., "A corpus of debunked and verified user-generated videos", Online Information
Review 43(1), 2019.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from posixpath import dirname

from fvc_lib.corpus.corpus_files import (
    LABEL_FOLDER,
    LAYOUT,
    READING,
    CorpusFiles,
    Entry,
    Refusal,
    Rejections,
    counts_text,
    is_named_as,
    is_picture,
    joined,
    picture_folders,
)
from fvc_lib.corpus.label_table import (
    GROUP_COLUMNS,
    PART_NAMES,
    PREFERRED_NAMES,
    SOURCE_COLUMNS,
    SPLIT_COLUMNS,
    SUFFIXES,
    cell_text,
    entry_of,
    file_rows,
    join_frames,
    read_label_table,
)
from fvc_lib.corpus.listing import (
    CorpusLoader,
    Listing,
    attributes_text,
    label_map_hint,
    listing_of_files,
    listing_of_rows,
    stated_label,
)
from fvc_lib.corpus.sources.published import folders_in, holds
from fvc_lib.corpus.tar_samples import tar_files, tar_samples, tars_in
from fvc_lib.services.atomic_files import escape_text, path_from_text, path_to_text
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.registry import CORPORA
from fvc_lib.services.tables import LABELS

# --- Folders ``real`` and ``fake``.


def read_label_folders(folder: Path) -> Listing:
    """List every video below folders called ``real`` and ``fake``, with or without a number, such as ``0_real``.

    Case is ignored. If ``folder`` has no such folders, they are searched in its folders ``train``, ``val`` and
    ``test``, which are the official parts. A video is a file, or a folder of pictures that are its frames.
    """
    files = CorpusFiles(folder)
    rejections = Rejections()
    entries = []
    for top, label, part in _label_folders(folder):
        paths = [path_to_text(path) for path in files.walk(top, rejections, label, pictures=True)]
        videos = [(path, [place], "") for place, path in enumerate(paths) if not is_picture(path)]
        with_videos = {dirname(path) for path, _, _ in videos}
        for path, places, problem in (*videos, *picture_folders(paths, [None] * len(paths))):
            refusal = files.check(str(path_from_text(path)))
            if path in with_videos:
                refusal = Refusal("unknown_extension", f"{path!r} holds videos: its pictures are no frames. {LAYOUT}.")
            elif problem:
                refusal = Refusal("unassigned_picture", f"{problem}. {LAYOUT}.")
            if refusal is None:
                entries.append(Entry(path=path, label=label, source_id=path, official_split=part))
                continue
            for place in places:
                rejections.add_file(paths[place], refusal, label)
    unread = "lies in the folder and is not read: to use its groups, name this file in place of the folder."
    notes = [f"{name} {unread}" for name in PREFERRED_NAMES if (folder / name).is_file()]
    return listing_of_files(files, "folder", entries, rejections, notes)


def _label_folders(folder: Path) -> list[tuple[str, str, str | None]]:
    """Return (path, label, part) of each folder whose name is a label, such as ``real`` or ``1_fake``.

    ``path`` is relative to ``folder``, ``label`` is real or fake, and ``part`` is the official part (train, validation
    or test) or None. If ``folder`` holds such folders, only these are returned. Otherwise they are searched in its
    folders of official parts.
    """
    parts = [(name, PART_NAMES[name.lower()]) for name in folders_in(folder) if name.lower() in PART_NAMES]
    for tops in ([("", None)], parts):
        found = [
            (joined(top, name), match[1].lower(), part)
            for top, part in tops
            for name in folders_in(folder / top)
            if (match := LABEL_FOLDER.fullmatch(name))
        ]
        if found:
            return found
    return []


# --- A CSV or Parquet manifest: one row per video, with paths relative to the manifest's folder.

_PATHS = ("path", "video_path")


def read_manifest(manifest: Path) -> Listing:
    """List the videos of a manifest with the columns ``path`` (or ``video_path``) and ``label``.

    If the file has other column names, the user's option ``columns`` says which they are (``Reading.columns``).

    Optional columns are ``group`` (or ``group_id``), ``case``, ``manipulation``, ``platform``, ``generator``,
    ``real_source`` (or ``source``) and the official ``split`` (or ``part``). Every other column is stored as an
    attribute; reports also list results for each value of an attribute. Case and surrounding space of labels are
    ignored. Rows with labels other than real and fake are rejected.

    Videos with the same ``case`` show the same event, and the case gets a score of its own. All videos of a case are in
    the same leakage group (even if they state different groups), because a split must not divide them.

    A row may name a folder of pictures, which are the frames of a video. Rows that name single pictures in the same
    folder are joined to one row for their video (``label_table.join_frames``).

    Raises:
        UsageError: the file is no table, a column is missing or misspelt, or the split has an unknown part.
        DataError: no row has a usable label, or a case has both labels.
    """
    files, rejections = CorpusFiles(manifest.parent), Rejections()
    kinds = [(name,) for name in ("manipulation", "platform", "generator", "case")]
    needed = (_PATHS, ("label",))
    optional = (GROUP_COLUMNS, SOURCE_COLUMNS, SPLIT_COLUMNS, *kinds)
    known = [*chain(*needed, *optional)]
    table = read_label_table(manifest).renamed(READING.get().columns, known)
    others = table.further_columns(needed, optional)
    rows = list[Entry]()
    places = list[str | Refusal]()
    words = list[str]()
    unknown = list[str]()
    labels_of = defaultdict[str, set[str | None]](set)
    for row in file_rows(table, files, rejections, _PATHS):
        word = row.cells["label"]
        label = stated_label(word, table.label_column)
        entry, no_part = entry_of(row.cells, row.path, label, row.number, table.name)
        if no_part is not None:
            unknown.append(cell_text(row.cells, *SPLIT_COLUMNS) or "")
        stated = {name: cell_text(row.cells, name.lower()) for name in (*others, "case")}
        further = {name: text for name, text in stated.items() if text is not None}
        links = (f"case {further['case']}",) if "case" in further else ()
        for link in links:
            labels_of[link].add(entry.label)
        rows.append(replace(entry, attributes=attributes_text(further), links=links))
        places.append(row.refused() or row.path)
        words.append(word)
    if unknown:  # these videos could be in the wrong part otherwise
        raise UsageError(
            f"{table.name}: the column of the split has {counts_text(unknown)}; wanted one of {', '.join(PART_NAMES)}, "
            "or nothing. Write these, or, if it is no split, rename the column, such as to 'my_split'."
        )
    for case, labels in labels_of.items():
        if labels.issuperset(LABELS):
            raise DataError(
                f"{table.name}: {case!r} has real and fake videos, so it has no verdict. Make two cases of it."
            )
    _require_labels(f"{table.name}, column {table.label_column!r}", rows, "Fill it with real and fake.")
    rows, places, notes = join_frames(files, rows, places, words, rejections)
    return listing_of_rows(files, "manifest", rows, places, rejections, notes)


def _require_labels(what: str, rows: Sequence[Entry], remedy: str) -> None:
    """Raise ``DataError`` if none of the ``rows`` is labelled real or fake.

    ``what`` names the label source in the message, and ``remedy`` is a sentence on what to do.
    """
    labels = [row.label or "" for row in rows]
    if set(LABELS).isdisjoint(labels):
        got = counts_text(labels) or "no data row or video with a label"
        raise DataError(
            f"{what}: nothing is labelled real or fake; got {got}. {remedy} (In a params file, put the names of "
            f"label_map into quotes; with audit it is --label-map.) {label_map_hint()}"
        )


# --- Tars of videos in WebDataset's layout, which are not unpacked.

_WORDS = (".cls", "label", "cls", "is_fake", "fake")  # names of the cells of a sample that may state its label


def read_tar_shards(corpus: Path) -> Listing:
    """List every video in a tar, in the tars of a folder, or in tars that match a pattern (``shards/{000..099}.tar``).

    The label of ``KEY.mp4`` is the content of ``KEY.cls``, or the field ``label``, ``cls``, ``is_fake`` or ``fake`` of
    ``KEY.json``, as ``label_map`` translates it. If a video has several of these, they must agree. Other fields of
    ``KEY.json`` are read like the columns of a manifest. If the folder has a manifest, the manifest is read instead.
    Only a manifest can name folders of pictures in a tar.

    Raises:
        UsageError: a pattern of tars or a manifest is unusable (``run_paths.tars_of``, ``read_manifest``).
        DataError: no video has a usable label.
    """
    manifests = [corpus / name for name in PREFERRED_NAMES if corpus.is_dir() and (corpus / name).is_file()]
    if manifests:
        return read_manifest(manifests[0])
    files, rejections = tar_files(corpus), Rejections()
    samples, notes = tar_samples(corpus, files, rejections)
    rows = list[Entry]()
    places = list[str | Refusal]()
    for number, sample in enumerate(samples, start=1):
        stated = {name: word for name in _WORDS if (word := cell_text(sample.cells, name))}
        labels = {stated_label(word, name) for name, word in stated.items()}
        row, no_part = entry_of(sample.cells, sample.path, next(iter(labels), None), number, "the tars")
        if len(labels) != 1 or (sample.refusal is not None and labels.isdisjoint(LABELS)):
            detail = f"{sample.path}: got the labels {stated}, wanted one in KEY.cls or KEY.json."
            unclear = Refusal("conflicting_labels" if labels else "label_not_used", detail)
            rejections.add_file(sample.path, sample.refusal or unclear, row=number)
            continue
        rows.append(replace(row, links=sample.links))
        places.append(sample.refusal or no_part or sample.path)
    first = f"For example: {rejections.rows[0][5]} " if rejections.rows and not rows else ""
    remedy = (
        f"{first}Put 'real' or 'fake' next to each KEY.mp4, into KEY.cls or as 'label' into KEY.json; or put a "
        "manifest.csv next to the tars, with paths like 000.tar/KEY.mp4."
    )
    _require_labels("the tars", rows, remedy)
    return listing_of_rows(files, "tar_shards", rows, places, rejections, notes)


# --- FVC-2018.

TABLES = ("FVC.csv", "FVC_dup.csv")  # seed videos, and their near-duplicates
VIDEOS_FOLDER = "videos"

_QUERY = r"[^?#]*\?(?:[^#]*&)?v="
# The part of a URL before the id of the video, by platform. facebook.com/PAGE/videos/vb.PAGE_ID/ID/ has one more
# segment than usual.
_BEFORE_ID = {
    "youtube": rf"(?:youtube(?:-nocookie)?\.com/(?:{_QUERY}|(?:embed|shorts|v|live|e)/)|youtu\.be/)",
    "facebook": rf"(?:(?:facebook|fb)\.com/(?:{_QUERY}|[^?#]*(?:videos/(?:vb\.[^/]+/)?|reel/))|fb\.watch/)",
    "twitter": r"(?:twitter|x)\.com/[^?#]*status(?:es)?/",
}
_URLS = {
    platform: re.compile(rf"(?:https?:)?(?://)?(?:(?:www|m|mobile)\.)?{before}([\w-]+)(?:[/?#&].*)?", re.ASCII | re.I)
    for platform, before in _BEFORE_ID.items()
}


def parse_video_url(url: str) -> tuple[str, str] | None:
    """Return (platform, platform id) of the URL of a YouTube, Facebook or Twitter video; None for any other URL."""
    matches = ((platform, pattern.fullmatch(url.strip())) for platform, pattern in _URLS.items())
    return next(((platform, match[1]) for platform, match in matches if match), None)


def read_fvc2018(folder: Path) -> Listing:
    """List a folder with ``FVC.csv``, ``FVC_dup.csv`` and ``videos/<platform id>.*``.

    A cascade is a seed video with its near-duplicates, and a leakage group. Labels are taken from the tables, even for
    the 74 rows that are labelled real in fake cascades. Rows that are labelled uncertain, debunked or parody are
    rejected, and so are rows whose video is missing. Rejected rows still show which cascades share a video.

    Raises:
        UsageError: a table is missing or unreadable, or lacks a column ``cascade_id``, ``video_url`` or ``label``.
    """
    files = CorpusFiles(folder)
    rejections = Rejections()
    rows = list[Entry]()
    for table in (read_label_table(folder / name) for name in TABLES):
        table.further_columns([("cascade_id",), ("video_url",), ("label",)])
        for number, cells in table.records(rejections):
            # Every row with an unknown URL gets a different source id: else "n/a" in two cascades would join them.
            platform, source_id = parse_video_url(cells["video_url"]) or (None, f"{table.name} row {number}")
            row = Entry(
                path=f"{VIDEOS_FOLDER}/{source_id}" if platform else escape_text(cells["video_url"]),
                label=stated_label(cells["label"]),
                source_id=source_id,
                stated_group=cell_text(cells, "cascade_id"),
                platform=platform,
                row=number,
                origin=table.name,
            )
            rows.append(row)
    videos = _videos_by_id(files, {row.source_id for row in rows}, rejections)
    places = list[str | Refusal]()
    for row in rows:
        where = f"{row.origin} row {row.row}"
        refusal = Refusal("unknown_url", f"{where}: got {row.path!r}, wanted a YouTube, Facebook or Twitter video URL.")
        if row.platform:
            refusal = Refusal("missing_video", f"{where}: no file {row.path}.*. Fetch it if it still exists.")
        path = videos.get(row.source_id)
        places.append(refusal if path is None else files.check(path) or path_to_text(path))
    return listing_of_rows(files, "fvc2018", rows, places, rejections)


def _videos_by_id(files: CorpusFiles, listed: Collection[str], rejections: Rejections) -> dict[str, str]:
    """Map the platform id of each video of FVC-2018 to the path of its file, relative to the root.

    The platform id (such as a YouTube id) is the file name without its extension; case matters.

    Args:
        files: access to the files of the corpus.
        listed: the ids in the tables.
        rejections: receives the files of other ids, and further files of the same id.
    """
    videos = dict[str, str]()
    for path in sorted((files.root / VIDEOS_FOLDER).glob("[!.]*")):
        place = f"{VIDEOS_FOLDER}/{path.name}"
        if path.stem in listed and path.stem not in videos and is_named_as("video", path.name):
            videos[path.stem] = place
        else:
            detail = f"{path.name!r} is no video called by the platform id of a row, or a second one for that id."
            rejections.add_file(path_to_text(place), Refusal("not_listed", detail))
    return videos


# --- Declarations.

CORPORA.register(
    CorpusLoader(
        name="folder",
        accepted="a folder with 'real/' and 'fake/' in it, or with 'train/real/', 'train/fake/', 'test/real/' ... "
        "(frames of a video: real/VIDEO/000.png or .jpg)",
        recognises=lambda path: bool(_label_folders(path)),
        read=read_label_folders,
        rank=1,
    )
)
CORPORA.register(
    CorpusLoader(
        name="manifest",
        accepted="a CSV or Parquet manifest with the columns 'path' and 'label' (real, fake)",
        recognises=lambda path: path.is_file() and path.suffix.lower() in SUFFIXES,
        read=read_manifest,
        rank=1,
    )
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
CORPORA.register(
    CorpusLoader(
        name="fvc2018",
        accepted=f"a folder with FVC-2018's {', '.join(TABLES)} and '{VIDEOS_FOLDER}/'",
        recognises=holds(*TABLES),
        read=read_fvc2018,
        corpus="FVC-2018",
        bibtex="""@article{papadopoulou2019corpus,
  author = {Papadopoulou, Olga and Zampoglou, Markos and Papadopoulos, Symeon and Kompatsiaris, Ioannis},
  title = {A corpus of debunked and verified user-generated videos},
  journal = {Online Information Review},
  volume = {43},
  number = {1},
  pages = {72--88},
  doi = {10.1108/OIR-03-2018-0101},
  year = {2019}
}""",
    )
)
