"""Give verdicts on any number of files: fake, real or undecided.

The verdict is fake if few reals look as fake as the video, and real if few fakes look as real. Few means at most the
error rate, a share that the user sets. The reals and fakes are the run's videos, by their out-of-fold scores
(``metrics/abstention.py``). If neither or both hold, the verdict is undecided. A video is also undecided if its codec,
size, length or rate is outside the range of the run's videos. All videos are undecided if the run is not shown to be
above its controls (predictors that see no pixel or learned other labels).

Files are processed in blocks, so memory does not grow with their number. Each finding (the scores of a file) is
appended to a journal at once. If a call is killed, another call with the same folder continues and scores no file
twice. The journal holds no verdicts, so a call with another rule uses the same findings. Other processes may have
handled shards (shares of the files); their journals are merged first.
"""

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import polars as pl

from fvc_lib.corpus.corpus_files import Kind, Rejections, is_named_as, some_of
from fvc_lib.corpus.label_table import SUFFIXES, cell_text, read_label_table
from fvc_lib.metrics.abstention import FAKE, REAL, UNDECIDED, p_values
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.metrics.cases import case_scores
from fvc_lib.services.atomic_files import atomic_output, path_to_text, write_text
from fvc_lib.services.errors import UsageError
from fvc_lib.services.stage_logs import Report, not_reported
from fvc_lib.services.tables import VERDICTS, check_table, csv_for_people, frame_of
from fvc_lib.services.tasks import VERDICTS as VERDICTS_STAGE
from fvc_lib.tasks.journal import Journal, found_in_blocks, take_in
from fvc_lib.tasks.video.predicting import Finding, VideoDetector, known_sentence
from fvc_lib.tasks.video.verdicts.rule import (
    TAKEN_OVER,
    WITHHELD,
    WORTH,
    KnownVideos,
    Rule,
    at_prior,
    percent,
    rule_sentences,
)
from fvc_lib.tasks.video.verdicts.scoring import FINAL
from fvc_lib.tasks.video.verdicts.unfamiliar import FAMILIARITY, UNKNOWN

CSV = "verdicts.csv"
LINES = "verdicts.jsonl"
CASES = "cases.csv"
_MOST_SHOWN, _CASES_SHOWN = 1000, 20
_CASE_COLUMNS = {
    "case": pl.String, "videos": pl.Int64, "scored": pl.Int64, "score": pl.Float64, "verdict": pl.String,
    "reasons": pl.String,
}  # fmt: skip
_DECISIONS = (FAKE, REAL, UNDECIDED)
_UNSCORED, UNREAD = "without a prediction", "could not be read"
_ANSWERS = (*_DECISIONS, _UNSCORED, UNREAD)


def files_of(named: Sequence[str], kind: Kind = "video", *, folder_is_case: bool = False) -> dict[Path, str]:
    """Return the files that ``named`` selects, as a dict from absolute path to case, in the order of ``named``.

    A case is a set of videos of one event. A table may name the case of a file in a column ``case``. If
    ``folder_is_case``, files that were found in the same folder form a case, named by the path of that folder. The case
    of other files is an empty text.

    An entry of ``named`` selects files as follows:

    - a folder: all files below it with a suffix of ``kind``;
    - a table (CSV, TSV, Parquet): the files in its column ``path``, relative to the table's folder;
    - ``-``: the files that standard input lists, one per line or separated by NUL bytes;
    - anything else: a file, whether it exists or not.

    Raises:
        UsageError: no file is selected, a folder has no file of ``kind``, or a table has no column ``path``.
    """
    files: dict[Path, str] = {}
    for text in named:
        path = Path(text)
        cases = dict[Path, str]()
        if text == "-":  # standard input
            lines = sys.stdin.buffer.read().replace(b"\0", b"\n").splitlines()
            paths = [Path(os.fsdecode(line)) for line in lines if line.strip()]
        elif path.is_dir():
            of_kind = (found for found in path.rglob("*") if is_named_as(kind, found.name))
            paths = sorted(found for found in of_kind if found.is_file())
            if not paths:
                raise UsageError(f"{text!r}: a folder without a file of kind {kind}. Name the files.")
            if folder_is_case:
                cases = {found: path_to_text(found.parent) for found in paths}
        elif path.suffix.lower() in SUFFIXES:
            table = read_label_table(path)
            if "path" not in map(str.lower, table.columns):
                columns = some_of(table.columns)
                raise UsageError(f"{text}: wanted a column 'path', found {columns}. Give the videos' column this name.")
            table.further_columns([("path",)])
            rows = [cells for _, cells in table.records(Rejections()) if cells["path"]]
            cases = {path.parent / cells["path"]: cell_text(cells, "case") or "" for cells in rows}
            paths = list(cases)
        else:
            if text.startswith(("http://", "https://")):
                raise UsageError(f"{text!r}: an address is not opened. Fetch the video, and name the file.")
            paths = [path]
        # Symbolic links are not resolved, and '~nobody' without such a user stays as it is.
        for found in paths:
            absolute = os.path.abspath(os.path.expanduser(found))  # noqa: PTH100, PTH111
            files.setdefault(Path(absolute), cases.get(found, ""))
    if not files:
        raise UsageError(f"no {kind} is named. Give files, folders, tables with a column 'path', or '-' for a list.")
    return files


@dataclass(frozen=True)
class Verdicts:
    """The verdicts on files, and sentences on how far they can be trusted.

    Attributes:
        table: VERDICTS of the first ``_MOST_SHOWN`` files.
        counts: the number of files that are ``fake``, ``real``, ``undecided``, ``without a prediction``, or that
            ``could not be read``.
        cases: the verdicts on cases (sets of videos of one event), one row per case; also in ``cases.csv``.
        detector: the detector that scored the files.
        rule: the rule that gave the verdicts.
        limits: sentences on how far the verdicts can be trusted.
        files: paths of two files with the rows of all videos: CSV, where reasons are one text, and JSON lines, where
            they are a list.
    """

    table: pl.DataFrame
    counts: Mapping[str, int]
    cases: pl.DataFrame
    detector: VideoDetector
    rule: Rule
    limits: tuple[str, ...]
    files: tuple[Path, Path]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of VERDICTS of all files, one at a time, in the order of the files.

        Each row is a dict by column name; ``reasons`` is one text with a line per reason.
        """
        with self.files[1].open(encoding="utf-8") as lines:
            for line in lines:
                row: dict[str, Any] = json.loads(line)
                yield row | {"reasons": "\n".join(row["reasons"])}

    def answer(self) -> str:
        """Return one sentence with the numbers of videos, such as ``3 videos: 1 fake, 2 real, 0 undecided.``"""
        number = sum(self.counts.values())
        named = [word for word in _ANSWERS if self.counts[word] or word in _DECISIONS]
        parts = [f"{self.counts[word]:,} {word}" for word in named]
        return f"{number:,} video{'s' * (number != 1)}: {', '.join(parts)}."


def judge_files(
    detector: VideoDetector,
    files: Sequence[Path] | Mapping[Path, str],
    rule: Rule,
    folder: Path,
    *,
    workers: int = 0,
    progress: Report = not_reported,
) -> Verdicts:
    """Judge all ``files``, and write their verdicts to ``folder`` in the order of ``files``.

    Args:
        detector: the detector of a run, ensemble or bundle.
        files: absolute paths without duplicates; a mapping also gives their cases (``files_of``).
        rule: the conditions under which a video is called fake or real.
        folder: folder for the tables and the journal; journals of shards in it are merged first.
        workers: number of processes that decode; 0: one per core.
        progress: called with the number of files done and their total.

    Raises:
        FvcError: for example, a network of the detector cannot be loaded.
        OSError: a table cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    take_in(folder, VERDICTS_STAGE)
    find = partial(detector.findings, workers=workers)
    counts = Counter[str]()
    shown = _table(detector, [], rule)
    written = (folder / CSV, folder / LINES)
    case_of = {path_to_text(path): case for path, case in files.items()} if isinstance(files, Mapping) else {}
    of_case = defaultdict[str, list[Finding]](list)
    with ExitStack() as stack:
        journal = stack.enter_context(closing(Journal(folder, detector.identity, Finding)))
        temporaries = [stack.enter_context(atomic_output(path)) for path in written]
        table, lines = (stack.enter_context(path.open("w", encoding="utf-8")) for path in temporaries)
        table.write(csv_for_people(shown))
        for findings, _ in found_in_blocks(journal, list(files), find, progress):
            for found in findings:
                if case := case_of.get(found.path):
                    of_case[case].append(found)
            some = check_table(_table(detector, findings, rule), VERDICTS, CSV)
            flat = some.with_columns(pl.col("reasons").str.replace_all("\n", " "))
            table.write(csv_for_people(flat, header=False))
            lines.write(some.with_columns(pl.col("reasons").str.split("\n")).write_ndjson())
            is_read = pl.col("failure").is_null()
            without = pl.when(is_read).then(pl.lit(_UNSCORED)).otherwise(pl.lit(UNREAD))
            counts.update(some.select(pl.coalesce("verdict", without)).to_series())
            shown = pl.concat([shown, some]).head(_MOST_SHOWN)
    cases = case_table(detector, of_case, rule)
    if cases.height:
        write_text(folder / CASES, csv_for_people(cases))
    limits = (*case_sentences(cases), *detector.cautions, *detector.remarks, *_limits(detector, rule))
    return Verdicts(shown, counts, cases, detector, rule, limits, written)


def case_table(detector: VideoDetector, of_case: Mapping[str, Sequence[Finding]], rule: Rule) -> pl.DataFrame:
    """Return the verdict on each case, a set of videos of one event, in a table with one row per case.

    The columns are ``case videos scored score verdict reasons``; ``videos`` and ``scored`` are counts. The logits of
    each network are combined over the videos of a case, by their mean or maximum (the setting ``case_score`` of the
    run). The score is the mean over networks of the resulting probabilities. The verdict comes from the p-values of
    the videos (``PValues.of_case``). A video that is unlike the run's videos makes the case undecided.

    Args:
        detector: the detector that gave the findings.
        of_case: the findings on the videos of each case.
        rule: the conditions under which a case is called fake or real.
    """
    rows = list[tuple[object, ...]]()
    how = detector.config.case_score
    for case, findings in of_case.items():
        scored = [found for found in findings if found.logits]
        columns, reasons = dict[str, Any](), ["No video of it has a score."]
        if scored:
            num_networks = max(len(found.logits) for found in scored)
            logits = np.array([np.broadcast_to(found.logits, num_networks) for found in scored])
            merged = p_values(detector.known.witnesses, logits).of_case(how)
            (answer,) = detector.known.answers_to(merged, rule)
            unlike = dict.fromkeys(sentence for found in scored for sentence in found.unfamiliar)
            one = np.zeros(len(scored))
            combined = [case_scores(column, one, how)[1][0] for column in logits.T]
            columns, reasons = judged(combined, answer, detector.known, rule, list(unlike))
        judgement = columns.get("score"), columns.get("verdict"), " ".join(reasons)
        rows.append((case, len(findings), len(scored), *judgement))
    return pl.DataFrame(rows, _CASE_COLUMNS, orient="row")


def case_sentences(cases: pl.DataFrame) -> list[str]:
    """Return a sentence on each of the first 20 rows of ``cases`` (``case_table``), with its verdict and score.

    If there are more rows, a last sentence gives their number.
    """
    lines = []
    for case, videos, scored, score, verdict, reasons in cases.head(_CASES_SHOWN).rows():
        said = "no prediction" if score is None else f"{verdict}, probability of fake {score:.3f}"
        lines.append(f"Case {case!r}, {scored} of {videos} videos scored: {said}. {reasons}")
    more = cases.height - len(lines)
    of_others = [f"And {more:,} more cases: {CASES}."] if more > 0 else []
    return [*lines, *of_others]


def _limits(detector: VideoDetector, rule: Rule) -> Iterator[str]:
    yield from rule_sentences(detector.known, rule)
    yield f"{FAMILIARITY} Of the run's own videos {percent(detector.ranges.share_unfamiliar)} are."
    yield detector.distance.limit() if detector.distance else UNKNOWN
    yield "The rates hold for videos that come from where the run's videos come from; of others nothing is promised."
    if FINAL in detector.networks.judges:
        yield from (WORTH, TAKEN_OVER)
    else:
        yield "The range of a score is that of the folds' networks, no interval with a stated coverage."
    if not detector.config.near_duplicate_bits:
        yield "Copies of the run's videos were not looked for: the run has near_duplicate_bits 0."


def _table(detector: VideoDetector, findings: Sequence[Finding], rule: Rule) -> pl.DataFrame:
    """Return the table VERDICTS, one row per finding, in the order of ``findings``.

    Args:
        detector: the detector that gave the findings.
        findings: the scores of each file, or why it has none.
        rule: the conditions under which a video is called fake or real.
    """
    known = detector.known
    rows = list[dict[str, Any]]()
    own_answers = known.answers_to(known.left_out, rule)
    answers_to_own = dict(zip(known.tested["content_sha256"], own_answers, strict=True))
    new = [found.logits for found in findings if found.logits and not found.is_known]
    answers_to_new = iter(known.answers_to(p_values(known.witnesses, np.array(new)), rule) if new else ())
    for found in findings:
        row: dict[str, Any] = {"path": found.path, "model_id": detector.model_id, "failure": found.failure or None}
        reasons = [found.failure] if found.failure else list(found.no_prediction)
        if found.sha256:
            row |= {"sha256": found.sha256, "video_id": found.sha256[:16]}
        if found.is_known:
            video = known.rows.row(detector.place_of[found.sha256], named=True)
            row["video_id"] = video["video_id"]
        if found.is_known and found.logits:
            row["score"] = video["score"]
            row["verdict"], reasons = _concluded(answers_to_own[found.sha256], rule)
            stored = f"its score is that of the one network that had not seen it (fold {video['fold']})."
            reasons.insert(int(rule.withheld), f"{known_sentence(video)}; {stored}")
        elif found.logits:
            columns, reasons = judged(found.logits, next(answers_to_new), known, rule, found.unfamiliar)
            row |= columns
        rows.append(row | {"reasons": "\n".join(reasons)})
    return frame_of(rows, VERDICTS)


def judged(
    logits: Sequence[float], answer: str, known: KnownVideos, rule: Rule, unfamiliar: Sequence[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Return ``(columns, reasons)`` for a new video: its score and verdict, and sentences on the verdict.

    ``columns`` are columns of VERDICTS by name.

    Args:
        logits: K calibrated log odds of fake by K networks.
        answer: ``fake``, ``real`` or ``undecided`` at the rule's error rates (``KnownVideos.answers_to``).
        known: the run's videos.
        rule: the conditions of a verdict.
        unfamiliar: sentences on how the video differs from the run's videos; a single sentence makes it undecided.
    """
    odds = np.array(logits)
    scores = probabilities(odds, 1.0).tolist()
    verdict, reasons = _concluded(answer, rule, unfamiliar)
    probability = at_prior(odds, known.base_rates, rule.prior)
    columns = {"score": fmean(scores), "probability": probability, "verdict": verdict}
    if len(scores) > 1:  # the range of a single network has width 0, which would look like certainty
        columns |= {"score_low": min(scores), "score_high": max(scores)}
    return columns, reasons


def _concluded(answer: str, rule: Rule, unfamiliar: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Return ``(verdict, reasons)``: ``fake``, ``real`` or ``undecided``, and a list of sentences.

    Args:
        answer: the answer at the rule's error rates.
        rule: the conditions of a verdict; if it withholds verdicts, the verdict is undecided.
        unfamiliar: sentences on how the video differs from the run's videos; a single sentence makes it undecided.
    """
    against = [WITHHELD, *unfamiliar] if rule.withheld else list(unfamiliar)
    if answer == UNDECIDED:
        against.append(
            "By the run's videos, this score shows neither fake nor real at these error rates: reals and fakes both "
            "score like this, or neither do, or the videos are too few to tell."
        )
    if against:
        return UNDECIDED, against
    rate = rule.called_fake if answer == FAKE else rule.called_real
    other = REAL if answer == FAKE else FAKE
    return answer, [f"At most {percent(rate)} of the run's {other}s look as {answer} as this."]
