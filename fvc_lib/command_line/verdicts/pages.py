"""Web pages of verdicts: a page with the evidence for each judged video, and a page with all verdicts."""

import re
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from fvc_lib.analysis.pages import answers
from fvc_lib.analysis.pages.page import stamp_of
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.stage_logs import Report, not_reported, part_text
from fvc_lib.tasks.video.verdicts.evidence import FileEvidence, file_evidence
from fvc_lib.tasks.video.verdicts.judging import Verdicts
from fvc_lib.tasks.video.verdicts.rule import percent

PAGES = "videos"  # folder next to verdicts.csv
MAX_PAGES = 50
MAP_MINUTES = 3.0  # time limit for the maps of all pages together
_FORMAT = 11  # version of the pages; if it changes, all pages are written again


def write_video_pages(
    verdicts: Verdicts,
    folder: Path,
    *,
    most: int = MAX_PAGES,
    map_minutes: float = MAP_MINUTES,
    overview: str = "../verdicts.html",
    progress: Report = not_reported,
) -> dict[str, str]:
    """Write a page ``folder/videos/NNNN_NAME.html`` for each file that has a score.

    A page that already shows the same verdict is not written again, unless a part of it failed. Pages of files that are
    not in ``verdicts`` are deleted.

    Args:
        verdicts: the verdicts on all files.
        folder: the folder with the tables of verdicts.
        most: the largest number of pages; the first files with a score get them. -1: all files.
        map_minutes: time limit in minutes for the maps (where a video looks fake) of all pages together; 0: no maps.
        overview: link to the page of all verdicts, relative to a video's page; empty: no link.
        progress: called with the number of finished pages, the number of all pages, and the part of a page that is
            being made.

    Returns:
        ``{path of a video, as in the table of verdicts: path of its page, relative to folder}``.

    Raises:
        OSError: a page cannot be written.
    """
    detector = verdicts.detector
    rule = verdicts.rule
    pages = dict[str, str]()
    tested = detector.known.tested
    seconds_left = 60 * map_minutes
    scores_of_labels = (tested.filter(label=label)["score"].to_numpy() for label in ("real", "fake"))
    known = answers.Known(*scores_of_labels)
    on_standing = detector.standing.sentences
    same: dict[str, Any] = {
        "standing": on_standing[0] if rule.withheld else "",
        "limits": (*on_standing, *verdicts.limits),
        "prior": percent(rule.prior or 0),
        "overview": overview,
    }
    scored = ((number, row) for number, row in enumerate(verdicts.rows(), 1) if row["score"] is not None)
    rows = list(islice(scored, None if most < 0 else most))
    for done, (number, row) in enumerate(rows):
        name = Path(row["path"]).name

        def report(part: str, some: int, of: int, done: int = done, name: str = name) -> None:
            progress(done, len(rows), f"{name}: {part_text(part, some, of)}")

        pages[row["path"]] = f"{PAGES}/{page_name(number, row['path'])}"
        path = folder / pages[row["path"]]
        stamp = sha256_of_json([_FORMAT, row, same, map_minutes])
        if stamp_of(path) != stamp:
            begin = time.monotonic()
            minutes = seconds_left / 60
            evidence = file_evidence(detector.networks, detector.known, row, map_minutes=minutes, tell=report)
            if evidence.occlusion is not None:
                # Never 0, which means "no maps wanted": later pages shall say that the time was up.
                seconds_left = max(1.0, seconds_left - (time.monotonic() - begin))
            path.parent.mkdir(parents=True, exist_ok=True)
            stamp = "failed" if evidence.failure else stamp
            answers.write_video_page(path, row, known, stamp=stamp, **same, **page_parts(evidence))
        progress(done + 1, len(rows))
    for old in (folder / PAGES).glob("[0-9]*_*.html"):
        if f"{PAGES}/{old.name}" not in pages.values():
            old.unlink()
    return pages


def write_overview(path: Path, verdicts: Verdicts, pages: Mapping[str, str]) -> None:
    """Write the page of all verdicts, with at most 1,000 rows.

    Args:
        path: path of the page.
        verdicts: the verdicts on all files.
        pages: ``{path of a video: path of its own page}``, which ``write_video_pages`` returned.

    Raises:
        OSError: the page cannot be written.
    """
    detector = verdicts.detector
    answer = verdicts.answer()
    limits = (*detector.standing.sentences, *verdicts.limits)
    table = answers.verdict_table(verdicts.table, pages)
    answers.write_predictions_page(
        path, f"Verdicts by {detector.name}", answer, limits, table, is_shown=detector.is_above_control
    )


def page_name(number: int, path: str) -> str:
    """Return the file name of a video's page, such as ``0007_Holiday.html`` for video 7, ``Holiday.mp4``.

    Characters other than ASCII letters, digits and underscores become dashes. At most 60 characters of the file's name
    stay.
    """
    plain = re.sub(r"[^A-Za-z0-9_]+", "-", Path(path).stem)
    short = plain.strip("-")[:60]
    return f"{number:04d}_{short}.html"


def page_parts(evidence: FileEvidence) -> dict[str, Any]:
    """Return the evidence on a file and its pictures, as keyword arguments for ``write_video_page``.

    The arguments are ``evidence`` itself and three pictures: ``frames``, ``over_time`` (the score over time) and
    ``heat_map``. A picture is None if the evidence lacks its data.
    """
    curve, mapped = evidence.windows, evidence.occlusion
    parts: dict[str, Any] = {"evidence": evidence, "frames": None, "over_time": None, "heat_map": None}
    if evidence.clips is not None:
        parts["frames"] = answers.frame_pictures(evidence.clips)
    if curve is not None:
        parts["over_time"] = answers.over_time(curve.begins, curve.ends, curve.scores, curve.middles, curve.seconds)
    if mapped is not None and mapped.values is not None and not mapped.why_hidden:
        parts["heat_map"] = answers.heat_map(mapped.picture, mapped.values, mapped.top)
    return parts
