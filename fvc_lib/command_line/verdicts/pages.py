"""A page of its own for each judged video: evidence is gathered, drawn and written, one video after the other."""

import atexit
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from fvc_lib.analysis.dashboard.verdict_desk import Judged, verdict_desk
from fvc_lib.analysis.figures.evidence.when import Known
from fvc_lib.analysis.pages.video_page import (
    Section,
    footage_section,
    frames_section,
    is_there,
    provenance_section,
    what_section,
    when_section,
    where_section,
    write_video_page,
)
from fvc_lib.analysis.read.headline import run_headline
from fvc_lib.analysis.wording import interval_text
from fvc_lib.command_line.export import model_card
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.progress import Report, Tell, not_reported, part_text, silent
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.tasks.bundle_folder import CARD, is_bundle
from fvc_lib.tasks.video.traces import LIMIT as TRACE_LIMIT, KnownTraces
from fvc_lib.tasks.video.verdicts.bundle import BundleNetworks
from fvc_lib.tasks.video.verdicts.detector import TrainedDetector
from fvc_lib.tasks.video.verdicts.evidence import FileEvidence, file_evidence
from fvc_lib.tasks.video.verdicts.judging import Verdicts, judge_files
from fvc_lib.tasks.video.verdicts.maps import LIMIT as MAP_LIMIT, picture_of
from fvc_lib.tasks.video.verdicts.rule import Rule, percent, score_bounds
from fvc_lib.tasks.video.verdicts.scoring import FINAL, scratch_folder
from fvc_lib.tasks.video.verdicts.shots import NOTHING_ODD
from fvc_lib.tasks.video.verdicts.windows import LIMIT

PAGES = "videos"  # folder beside verdicts.csv
MOST_PAGES = 50  # where nothing else is asked for
MAP_MINUTES = 3.0  # likewise, in all
_PAGE = re.compile(r"\d{4,}_[\w.-]*\.html", re.ASCII)
_FORMAT = 6  # of the pages; another number writes them all anew


def write_video_pages(
    verdicts: Verdicts,
    model: Path,
    folder: Path,
    *,
    most: int = MOST_PAGES,
    map_minutes: float = MAP_MINUTES,
    overview: str = "../verdicts.html",
    progress: Report = not_reported,
    tell: Tell = silent,
) -> dict[str, str]:
    """Write ``folder/videos/NNNN_NAME.html`` for the first ``most`` files that have a score; -1: for all.

    A page that is there and of the same verdict is not made again, but where a part of it failed; those of other files
    go. ``model`` is the folder of
    the run or bundle that judged, ``overview`` where the page of all is; empty: there is none. Pages have maps, the
    first ones, as long as making them takes at most ``map_minutes`` in all; 0: none has. ``progress`` is told how many
    pages are done and what is looked for of the next, ``tell`` the latter.

    Returns:
        The page of each file, relative to ``folder``, by the file's ``path`` in the table.

    Raises:
        OSError: a page cannot be written.
    """
    pages = {row["path"]: f"{PAGES}/{page_name(number, row['path'])}" for number, row in _scored(verdicts, most)}
    for left in (folder / PAGES).glob("*.html"):
        if _PAGE.fullmatch(left.name) and f"{PAGES}/{left.name}" not in pages.values():
            left.unlink()
    if not pages:
        return pages
    detector = verdicts.detector
    card = _card(model, final=FINAL in detector.networks.folds)
    standing = detector.standing.sentences[0] if verdicts.rule.withheld else ""
    known, map_seconds = _known(verdicts), 60 * map_minutes
    networks = detector.networks
    quantiles = networks.quantiles() if isinstance(networks, BundleNetworks) else None
    traces = KnownTraces(networks, verdicts.known, detector.distance, quantiles)
    for done, (_, row) in enumerate(_scored(verdicts, most)):
        name = Path(row["path"]).name

        def told(part: str, some: int, of: int, done: int = done, name: str = name) -> None:
            tell(part, some, of)
            progress(done, len(pages), f"{name}: {part_text(part, some, of)}")

        path = folder / pages[row["path"]]
        stamp = sha256_of_json([_FORMAT, row, verdicts.limits, standing, card, map_minutes])
        if is_there(path, stamp):
            progress(done + 1, len(pages))
            continue
        begin = time.monotonic()
        found = file_evidence(
            detector.networks, verdicts.known, row, map_minutes=map_seconds / 60, distance=detector.distance,
            traces=traces, judged_alone=detector.judges_alone, tell=told,
        )  # fmt: skip
        if found.maps is not None and found.maps.maps:
            map_seconds = max(1.0, map_seconds - (time.monotonic() - begin))  # at 0 a page would not say why
        path.parent.mkdir(parents=True, exist_ok=True)
        write_video_page(
            path, row, known, sections_of(found, known), stamp="again" if found.may_pass else stamp,
            prior=percent(verdicts.rule.prior or 0), standing=standing, failures=found.failures,
            limits=(*detector.standing.sentences, *verdicts.limits), card=card, overview=overview,
        )  # fmt: skip
        progress(done + 1, len(pages))
    return pages


def _scored(verdicts: Verdicts, most: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The first ``most`` rows with a score, or all, with their numbers from 1."""
    rows = ((number, row) for number, row in enumerate(verdicts.rows(), 1) if row["score"] is not None)
    return rows if most < 0 else islice(rows, most)


def _card(model: Path, *, final: bool) -> str:
    """The model card of a run or a bundle."""
    if is_bundle(model):
        return (model / CARD).read_text(encoding="utf-8", errors="replace")
    run = RunPaths(model)
    return model_card(run, run_headline(run), final=final)


def page_name(number: int, path: str) -> str:
    """``0007_holiday.html`` of the seventh file; what is no plain letter becomes a dash."""
    plain = re.sub(r"[^A-Za-z0-9_]+", "-", Path(path).stem).strip("-")[:60]
    return f"{number:04d}_{plain}.html"


def sections_of(found: FileEvidence, known: Known) -> list[Section]:
    """What the page shows, in this order; a part that is not there has no section."""
    sections: list[Section] = []
    if found.shown is not None:
        sections.append(frames_section(found.shown))
    if (footage := found.footage) is not None:
        told = footage.sentences or (NOTHING_ODD,)
        sections.append(footage_section((*told, found.familiar) if found.familiar else told))
    if (said := found.provenance) is not None:
        sections.append(provenance_section(said.sentences, said.claims, said.traces))
    if (each := found.windows) is not None:
        cuts = () if footage is None else footage.cuts.tolist()
        sections.append(
            when_section(
                each.begins, each.ends, each.scores, each.middles, each.seconds, known, notes=each.notes, limit=LIMIT,
                cuts=cuts,
            )
        )  # fmt: skip
    if (where := found.maps) is not None:
        rows, columns = picture_of(where.clip)  # without black bars
        maps = [replace(each, values=each.values[:, rows, columns]) for each in where.maps]
        sections.append(where_section(where.clip[..., rows, columns], maps, note=where.note, limit=MAP_LIMIT))
    if (what := found.traces) is not None:
        sections.append(
            what_section(what.frames, what.features, num_reals=what.num_reals, notes=what.notes, limit=TRACE_LIMIT)
        )
    return sections


def _known(verdicts: Verdicts) -> Known:
    tested = verdicts.known.tested
    reals, fakes = (tested.filter(label=label)["score"].to_numpy() for label in ("real", "fake"))
    return Known(reals, fakes, *score_bounds(verdicts.known, verdicts.rule))


def upload_desk(
    detector: TrainedDetector,
    model: Path,
    rule: Rule,
    *,
    limit_mb: int,
    workers: int = 0,
    file_seconds: float = 0.0,
    map_minutes: float = MAP_MINUTES,
) -> Any:
    """A widget on which videos of at most ``limit_mb`` are dropped, judged, and their pages read and downloaded.

    What is dropped lies in a folder of this process in the cache until its page is made; the folder goes with the
    process, or, where that is killed, when the next one begins.
    """
    stack = ExitStack()
    folder = stack.enter_context(scratch_folder(detector.networks.config))
    atexit.register(stack.close)

    def judge(path: Path, tell: Tell) -> Judged:
        detector.prepare(tell)
        number = len(detector.networks.judges)
        tell(f"decoding it and asking {number} network{'s' * (number != 1)}", 0, 0)
        answers = path.parent / "answers"  # goes with the upload
        found = judge_files(detector, [path], rule, answers, workers=workers, file_seconds=file_seconds)
        row = next(found.rows())
        if row["score"] is None:
            return Judged(row["verdict"] or "", "", tuple(row["reasons"].splitlines()))
        score = interval_text(row["score"], row["score_low"], row["score_high"])

        def told(part: str, done: int, total: int) -> None:
            tell(f"{row['verdict']}, score {score}; for its page: {part}", done, total)

        pages = write_video_pages(found, model, answers, most=1, map_minutes=map_minutes, overview="", tell=told)
        (page,) = pages.values()
        return Judged(row["verdict"] or "", score, tuple(row["reasons"].splitlines()), (answers / page).read_bytes())

    return verdict_desk(folder, judge, limit_mb)
