"""Read the corpus FVC-2018: seed videos in ``FVC.csv``, and their near-duplicates in ``FVC_dup.csv``.

A cascade is a seed video with its near-duplicates; 5,579 rows form 380 cascades. The corpus consists of annotations
only. Videos have to be fetched one by one into ``videos/<platform id>.<extension>``, and many were deleted. Source:
Papadopoulou et al., "A corpus of debunked and verified user-generated videos", Online Information Review 43(1), 2019.
"""

import re
from collections.abc import Collection
from pathlib import Path

from fvc_lib.corpus import listing
from fvc_lib.corpus.corpus_files import CorpusFiles, Entry, Refusal, Rejections, is_named_as
from fvc_lib.corpus.label_table import cell_text, read_label_table
from fvc_lib.corpus.listing import CorpusLoader, Listing
from fvc_lib.services.atomic_files import AnyPath, escape_text, path_to_text
from fvc_lib.services.registry import CORPORA

TABLES = ("FVC.csv", "FVC_dup.csv")  # seed videos, and their near-duplicates
VIDEOS_FOLDER = "videos"

_QUERY = r"[^?#]*\?(?:[^#]*&)?v="
# What stands before the id, by platform. facebook.com/PAGE/videos/vb.PAGE_ID/ID/ has one more segment than usual.
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


def read_fvc2018(folder: AnyPath) -> Listing:
    """List a folder with ``FVC.csv``, ``FVC_dup.csv`` and ``videos/<platform id>.*``.

    Labels are those of the tables, even for the 74 rows labelled real in fake cascades. Rows labelled uncertain,
    debunked or parody, and rows whose video is missing, are rejected. But all rows, rejected or not, show which
    cascades share a video.

    Raises:
        UsageError: a table is missing, unreadable or lacks ``cascade_id``, ``video_url`` or ``label``.
    """
    folder = Path(folder)
    files, rejections, rows = CorpusFiles(folder), Rejections(), list[Entry]()
    for table in (read_label_table(folder / name) for name in TABLES):
        columns = [table.require((name,)) for name in ("cascade_id", "video_url", "label")]
        for number, cells in table.records(columns, rejections):
            # Each unknown URL is a source of its own: "n/a" in two cascades does not make them one.
            platform, source_id = parse_video_url(cells["video_url"]) or (None, f"{table.name} row {number}")
            rows.append(
                Entry(
                    path=f"{VIDEOS_FOLDER}/{source_id}" if platform else escape_text(cells["video_url"]),
                    label=listing.stated_label(cells["label"]),
                    source_id=source_id,
                    stated_group=cell_text(cells, "cascade_id"),
                    platform=platform,
                    row=number,
                    origin=table.name,
                )
            )
    videos = _videos_by_id(files, {row.source_id for row in rows}, rejections)
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


def _videos_by_id(files: CorpusFiles, listed: Collection[str], rejections: Rejections) -> dict[str, str]:
    """Map platform ids to the paths of their files below the root; reject files that belong to no listed id.

    The platform id is the file name without its extension; case matters.
    """
    folder, videos = files.root / VIDEOS_FOLDER, dict[str, str]()
    for name in sorted(path.name for path in folder.iterdir()) if folder.is_dir() else ():
        path, platform_id = f"{VIDEOS_FOLDER}/{name}", Path(name).stem
        if name.startswith("."):
            continue
        if not is_named_as("video", name):
            detail = f"{name!r} has no video extension; a download that was not finished keeps its .part."
            refusal = Refusal("unknown_extension", detail)
        elif platform_id in videos:
            detail = f"a second file for one platform id; {videos[platform_id]!r} is used."
            refusal = Refusal("surplus_file", detail)
        elif platform_id not in listed:
            refusal = Refusal("not_listed", f"no row of {' or '.join(TABLES)} has this platform id.")
        else:
            videos[platform_id] = path
            continue
        rejections.add_file(path_to_text(path), refusal)
    return videos


def _lacks(folder: Path) -> str:
    there = [name for name in TABLES if (folder / name).is_file()]
    return f"has {there[0]}, wanted {' and '.join(TABLES)}." if there else ""


CORPORA.register(
    CorpusLoader(
        name="fvc2018",
        accepted=f"a folder with FVC-2018's {', '.join(TABLES)} and '{VIDEOS_FOLDER}/'",
        recognises=lambda path: all((path / name).is_file() for name in TABLES),
        read=read_fvc2018,
        lacks=_lacks,
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
