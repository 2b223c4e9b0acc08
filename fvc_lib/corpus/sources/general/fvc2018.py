"""FVC-2018 as label source: seed videos in ``FVC.csv``, their near-duplicates in ``FVC_dup.csv``.

380 cascades of near-duplicates in 5,579 rows. The corpus is annotations only: videos are fetched one by one into
``videos/<platform id>.<extension>``, and many are gone. Source: Papadopoulou et al., "A corpus of debunked and
verified user-generated videos", Online Information Review 43(1), 2019.
"""

import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from fvc_lib.corpus import listing
from fvc_lib.corpus.corpus_files import CorpusFiles, Entry, Refusal, Rejections, is_named_as
from fvc_lib.corpus.label_table import cell_text, read_label_table
from fvc_lib.corpus.listing import CorpusLoader, Listing
from fvc_lib.services.atomic_files import AnyPath, escape_text, path_to_text
from fvc_lib.services.registry import CORPORA

SEED_TABLE = "FVC.csv"
DUPLICATE_TABLE = "FVC_dup.csv"
VIDEOS_FOLDER = "videos"

_PLATFORM_ID = re.compile(r"[A-Za-z0-9_-]+")
_HOSTS = {
    "youtube.com": "youtube", "youtube-nocookie.com": "youtube", "youtu.be": "youtube",
    "facebook.com": "facebook", "fb.com": "facebook", "fb.watch": "facebook",
    "twitter.com": "twitter", "x.com": "twitter",
}  # fmt: skip
# The path segment that stands before the id.
_BEFORE_ID = {
    "youtube": {"embed", "shorts", "v", "live", "e"},
    "facebook": {"videos", "reel"},
    "twitter": {"status", "statuses"},
}


def parse_video_url(url: str) -> tuple[str, str] | None:
    """Return ``(platform, platform id)`` of a YouTube, Facebook or Twitter video URL, else None."""
    text = url.strip()
    try:
        parts = urlsplit(text if "//" in text else f"//{text}")
        host = (parts.hostname or "").removeprefix("www.").removeprefix("m.").removeprefix("mobile.")
    except ValueError:  # an unbalanced bracket in the host
        return None
    platform = _HOSTS.get(host)
    if platform is None:
        return None
    segments = [segment for segment in parts.path.split("/") if segment]
    candidate = parse_qs(parts.query).get("v", [""])[0] or _id_of_segments(platform, host, segments)
    return (platform, candidate) if _PLATFORM_ID.fullmatch(candidate) else None


def read_fvc2018(folder: AnyPath) -> Listing:
    """List a folder with ``FVC.csv``, ``FVC_dup.csv`` and ``videos/<platform id>.*``.

    Labels are the tables' own, also the 74 rows labelled real inside fake cascades. Rows labelled uncertain,
    debunked or parody, and rows whose video is absent, are counted exclusions; all rows link cascades.

    Raises:
        UsageError: a table is missing, unreadable or lacks ``cascade_id``, ``video_url`` or ``label``.
    """
    folder = Path(folder)
    files = CorpusFiles(folder)
    rejections = Rejections()
    rows = [row for name in (SEED_TABLE, DUPLICATE_TABLE) for row in _label_rows(folder / name, rejections)]
    videos = _videos_by_id(files, rejections)
    listed = {row.source_id for row in rows}
    for platform_id, path in videos.items():
        if platform_id not in listed:
            detail = f"no row of {SEED_TABLE} or {DUPLICATE_TABLE} has this platform id."
            rejections.add_file(path_to_text(path), Refusal("not_listed", detail))
    places = [_locate(row, videos.get(row.source_id), files) for row in rows]
    return listing.listing_of_rows(files, "fvc2018", rows, places, rejections)


def _locate(row: Entry, path: str | None, files: CorpusFiles) -> str | Refusal:
    where = f"{row.origin} row {row.row}"
    if row.platform is None:
        return Refusal("unknown_url", f"{where}: got {row.path!r}, wanted a YouTube, Facebook or Twitter video URL.")
    if path is None:
        wanted = f"{VIDEOS_FOLDER}/{row.source_id}.*"
        return Refusal("missing_video", f"{where}: no file {wanted}. Fetch it if it still exists.")
    return files.check(path) or path_to_text(path)


def _id_of_segments(platform: str, host: str, segments: list[str]) -> str:
    if host in {"youtu.be", "fb.watch"} and segments:
        return segments[0]
    for place, segment in enumerate(segments[:-1]):
        if segment in _BEFORE_ID[platform]:
            # facebook.com/<page>/videos/vb.<page id>/<id>/ has one more segment than the usual form
            is_set = platform == "facebook" and segments[place + 1].startswith("vb.")
            return segments[-1] if is_set else segments[place + 1]
    return ""


def _label_rows(path: Path, rejections: Rejections) -> list[Entry]:
    table = read_label_table(path)
    columns = [table.require((name,)) for name in ("cascade_id", "video_url", "label")]
    rows = []
    for number, cells in table.records(columns, rejections):
        parsed = parse_video_url(cells["video_url"])
        # Each unknown URL is a source of its own: "n/a" in two cascades does not make them one.
        platform, source_id = parsed or (None, f"{table.name} row {number}")
        rows.append(
            Entry(
                path=f"{VIDEOS_FOLDER}/{source_id}" if parsed else escape_text(cells["video_url"]),
                label=listing.stated_label(cells["label"]),
                source_id=source_id,
                stated_group=cell_text(cells, "cascade_id"),
                platform=platform,
                row=number,
                origin=table.name,
            )
        )
    return rows


def _videos_by_id(files: CorpusFiles, rejections: Rejections) -> dict[str, str]:
    """Map platform ids, the case-sensitive file names up to the extension, to paths below the root."""
    folder = files.root / VIDEOS_FOLDER
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    videos: dict[str, str] = {}
    for name in names:
        if name.startswith("."):
            continue
        path = f"{VIDEOS_FOLDER}/{name}"
        if not is_named_as("video", name):
            detail = f"{name!r} has no video extension; a download that was not finished keeps its .part."
            rejections.add_file(path_to_text(path), Refusal("unknown_extension", detail))
        elif Path(name).stem in videos:
            detail = f"a second file for one platform id; {videos[Path(name).stem]!r} is used."
            rejections.add_file(path_to_text(path), Refusal("surplus_file", detail))
        else:
            videos[Path(name).stem] = path
    return videos


def _missing(folder: Path) -> list[str]:
    return [name for name in (SEED_TABLE, DUPLICATE_TABLE) if not (folder / name).is_file()]


def _lacks(folder: Path) -> str:
    missing = _missing(folder)
    there = {SEED_TABLE, DUPLICATE_TABLE}.difference(missing)
    return f"has {there.pop()} but not {missing[0]}." if len(missing) == 1 else ""


_BIBTEX = """@article{papadopoulou2019corpus,
  author = {Papadopoulou, Olga and Zampoglou, Markos and Papadopoulos, Symeon and Kompatsiaris, Ioannis},
  title = {A corpus of debunked and verified user-generated videos},
  journal = {Online Information Review},
  volume = {43},
  number = {1},
  pages = {72--88},
  doi = {10.1108/OIR-03-2018-0101},
  year = {2019}
}"""

CORPORA.register(
    CorpusLoader(
        name="fvc2018",
        accepted=f"a folder with FVC-2018's {SEED_TABLE}, {DUPLICATE_TABLE} and '{VIDEOS_FOLDER}/'",
        recognises=lambda path: not _missing(path),
        read=read_fvc2018,
        lacks=_lacks,
        corpus="FVC-2018",
        bibtex=_BIBTEX,
    )
)
