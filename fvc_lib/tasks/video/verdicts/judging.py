"""Is this video fake? A detector asked of any number of files, with an answer only where one can be stood by.

Fake or real is said where the other answer is unlikely at a stated rate, by the run's own out-of-fold scores
(``metrics/abstention.py``); else undecided. Undecided, too, is whatever the run's videos say nothing about: a codec,
size, length or rate beyond theirs, and everything, where the run is not shown to be above its controls.

Files are looked at in blocks, so that as much is in memory of a hundred thousand as of a thousand. What is found of one
is appended to a journal at once: whoever is killed goes on with the same folder, and nothing is scored twice. The
journal knows no rule, so another rule on the same files scores nothing either. Shards of the files (``find_out_shard``)
have a journal each, and what is found of a file depends on no other file, so that how many there are changes no bit.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fvc_lib.corpus.corpus_files import Kind, Rejections, is_named_as
from fvc_lib.corpus.label_table import SUFFIXES, read_label_table
from fvc_lib.metrics.abstention import FAKE, REAL, UNDECIDED, p_values
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.metrics.classification import FloatArray
from fvc_lib.services.atomic_files import atomic_output
from fvc_lib.services.errors import UsageError
from fvc_lib.services.progress import Report, not_reported, part_text
from fvc_lib.services.tables import VERDICTS, check_table, csv_for_people, frame_of
from fvc_lib.services.tasks import VERDICTS as VERDICTS_STAGE
from fvc_lib.tasks.journal import Journal, find_out, found_in_blocks, take_in
from fvc_lib.tasks.video.verdicts.detector import (
    Finding,
    Seen,
    TrainedDetector,
    known_sentence,
    mean_of,
    nobody,
)
from fvc_lib.tasks.video.verdicts.feature_distance import UNKNOWN
from fvc_lib.tasks.video.verdicts.final import final_sentences
from fvc_lib.tasks.video.verdicts.rule import (
    WITHHELD,
    KnownVideos,
    Rule,
    agreeing,
    at_prior,
    percent,
    rule_sentences,
)
from fvc_lib.tasks.video.verdicts.scoring import FINAL
from fvc_lib.tasks.video.verdicts.unfamiliar import FAMILIARITY

# --- Which files are meant

STANDARD_INPUT = "-"


def files_of(asked: Sequence[str], kind: Kind = "video") -> list[Path]:
    """Return the files that ``asked`` names, absolute, each once and in this order.

    A folder stands for all files below it that are named as the ``kind`` is; a table (CSV, TSV, Parquet) for what its
    column ``path`` names, relative to the table's folder; ``-`` for the lines of standard input. Whatever else is named
    is taken for one, there or not: what is wrong with it is said in its row.

    Raises:
        UsageError: nothing is named, a folder without videos, a table without that column, or a name with a NUL byte.
    """
    found: dict[Path, None] = {}
    a_kind = "an image" if kind == "image" else f"a {kind}"
    for text in asked:
        path = Path(text)
        if text == STANDARD_INPUT:
            lines = (os.fsdecode(line.rstrip(b"\r\n")) for line in sys.stdin.buffer)
            named = [Path(line) for line in lines if line.strip()]
        elif path.is_dir():
            named = sorted(each for each in path.rglob("*") if is_named_as(kind, each.name) and each.is_file())
            if not named:
                raise UsageError(f"{text!r}: a folder without a file that is named as {a_kind}. Name the files.")
        elif path.suffix.lower() in SUFFIXES:
            table, malformed = read_label_table(path), Rejections()
            column = table.require(["path"])
            named = [path.parent / cells[column] for _, cells in table.records([column], malformed) if cells[column]]
        else:
            named = [path]
        # Links stay links, and a list's '~nobody' is a name like any other.
        found |= {Path(os.path.abspath(os.path.expanduser(each))): None for each in named}  # noqa: PTH100, PTH111
    if wrong := next((path for path in found if "\0" in str(path)), None):
        raise UsageError(
            f"{str(wrong)[:80]!r}: no file's name has a NUL byte. A list has a name a line: find -print, not -print0."
        )
    if not found:
        raise UsageError(f"no {kind} is named. Give files, folders, tables with a column 'path', or '-' for a list.")
    return list(found)


# --- The verdicts

CSV, LINES = "verdicts.csv", "verdicts.jsonl"
_MOST_SHOWN = 1000


@dataclass(frozen=True)
class Verdicts:
    """What was found, and the sentences that belong beside it.

    Attributes:
        table: VERDICTS of the first thousand files; those of all are in ``files``.
        counts: how many of ``fake``, ``real``, ``undecided``, ``no prediction`` and ``not read``.
        num_resumed: files of which an earlier call had found out what was needed.
        detector, rule: who judged, and by which rule.
        limits: what the answers can be held to.
        files: the rows of all, as CSV with reasons as one text, and as JSON lines with reasons as a list.
    """

    table: pl.DataFrame
    counts: Mapping[str, int]
    num_resumed: int
    detector: TrainedDetector
    rule: Rule
    limits: tuple[str, ...]
    files: tuple[Path, ...]

    @property
    def known(self) -> KnownVideos:
        """The run's videos."""
        return self.detector.known

    @property
    def num_files(self) -> int:
        """All that were named."""
        return sum(self.counts.values())

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows of VERDICTS in turn; one is in memory."""
        with self.files[1].open(encoding="utf-8") as lines:
            for line in lines:
                row: dict[str, Any] = json.loads(line)
                yield row | {"reasons": "\n".join(row["reasons"])}

    def answer(self) -> str:
        """How many of each, in one sentence."""
        told = [f"{self.counts[word]:,} {word}" for word in (FAKE, REAL, UNDECIDED)]
        told += [f"{self.counts[_UNSAID]:,} without a prediction"] if self.counts[_UNSAID] else []
        told += [f"{self.counts[_UNREAD]:,} could not be read"] if self.counts[_UNREAD] else []
        return f"{self.num_files:,} video{'s' * (self.num_files != 1)}: {', '.join(told)}."


_UNSAID, _UNREAD = "no prediction", "not read"


def judge_files(
    detector: TrainedDetector,
    files: Sequence[Path],
    rule: Rule,
    folder: Path,
    *,
    workers: int = 0,
    file_seconds: float = 0.0,
    seen: Seen = nobody,
    progress: Report = not_reported,
) -> Verdicts:
    """Write a verdict on each of ``files``, in their order, to ``folder``.

    Args:
        detector: of a run or a bundle.
        files: absolute, each once.
        rule: when an answer is given.
        folder: for the tables, and for the journal by which a call that was killed goes on, and into which goes what
            shards found.
        workers: processes that decode; 0: one per core.
        file_seconds: after so long a file is given up; 0: after a minute and a second for each megabyte.
        seen: is given a file that is scored now and its frames, uint8 (T, 3, S, S), as the networks saw them.
        progress: is told how many files are done.

    Raises:
        FvcError: as ``TrainedDetector.findings``.
        OSError: a table cannot be written.
    """
    detector.prepare(lambda part, done, total: progress(0, len(files), part_text(part, done, total)))
    folder.mkdir(parents=True, exist_ok=True)
    take_in(folder, VERDICTS_STAGE)
    written, judge = (folder / CSV, folder / LINES), _Judge(detector, rule)
    counts, shown, num_resumed = Counter[str](), [judge.table([])], 0

    def find(rest: list[Path]) -> Generator[Finding]:
        return detector.findings(
            rest, workers=workers, seen=lambda path, clips: seen(path, clips[0]), file_seconds=file_seconds
        )

    with ExitStack() as stack:
        journal = stack.enter_context(closing(Journal(folder, detector.identity, Finding)))
        temporaries = [stack.enter_context(atomic_output(path)) for path in written]
        table, lines = (stack.enter_context(path.open("w", encoding="utf-8")) for path in temporaries)

        table.write(csv_for_people(shown[0]))
        for found, num_known in found_in_blocks(journal, files, find, progress):
            num_resumed += num_known
            some = check_table(judge.table(found), VERDICTS, CSV)
            flat = some.with_columns(pl.col("reasons").str.replace_all("\n", " "))
            table.write(csv_for_people(flat, header=False))
            for row in some.iter_rows(named=True):
                lines.write(f"{json.dumps({**row, 'reasons': row['reasons'].splitlines()})}\n")
            said = pl.when(pl.col("failure").is_null()).then(pl.lit(_UNSAID)).otherwise(pl.lit(_UNREAD))
            counts.update(some.select(pl.coalesce("verdict", said)).to_series().to_list())
            if sum(each.height for each in shown) < _MOST_SHOWN:
                shown.append(some)
    limits = (*detector.cautions, *detector.remarks, *_limits(detector, rule))
    return Verdicts(pl.concat(shown).head(_MOST_SHOWN), counts, num_resumed, detector, rule, limits, written)


def find_out_shard(
    detector: TrainedDetector,
    files: Sequence[Path],
    folder: Path,
    shard: str,
    *,
    workers: int = 0,
    file_seconds: float = 0.0,
    progress: Report = not_reported,
) -> None:
    """Note in ``folder`` what is found of the ``files`` of one ``shard``, such as ``3_of_16``; ``judge_files`` goes on.

    The other arguments, and what is raised, as of ``judge_files``.
    """

    def find(rest: list[Path]) -> Generator[Finding]:
        return detector.findings(rest, workers=workers, file_seconds=file_seconds)

    find_out(Journal(folder, detector.identity, Finding, shard=shard), files, find, progress)


_RANGE = "The range beside a score is that of the folds' networks, no interval with a stated coverage."


def _limits(detector: TrainedDetector, rule: Rule) -> tuple[str, ...]:
    share, bits = detector.familiar.share_outside, detector.networks.config.near_duplicate_bits
    is_final = FINAL in detector.networks.judges
    outside = "an unknown share" if share is None else percent(share)
    return (
        *rule_sentences(detector.known, rule),
        *(final_sentences(detector.known, rule) if is_final else ()),
        f"{FAMILIARITY} Of the run's own videos {outside} are.",
        detector.distance.limit() if detector.distance else UNKNOWN,
        "The rates hold for videos that come from where the run's videos come from; of others nothing is promised.",
        *([] if is_final else [_RANGE]),
        *([] if bits else ["Copies of the run's videos were not looked for: the run has near_duplicate_bits 0."]),
    )


# --- One file


class _Judge:
    """Rows of VERDICTS for what was found of files."""

    def __init__(self, detector: TrainedDetector, rule: Rule) -> None:
        self._detector, self._known, self._rule = detector, detector.known, rule
        said = self._known.answers_to(self._known.left_out, rule)
        self._answers = dict(zip(self._known.tested["content_sha256"].to_list(), said, strict=True))

    def table(self, found: Sequence[Finding]) -> pl.DataFrame:
        """VERDICTS, in the order of ``found``."""
        new = [place for place, each in enumerate(found) if each.logits and not each.is_known]
        said = answers_to(np.array([found[place].logits for place in new]), self._known, self._rule) if new else []
        answers = dict(zip(new, said, strict=True))
        rows = [self._row(each, answers.get(place, "")) for place, each in enumerate(found)]
        return frame_of({name: [row[name] for row in rows] for name in VERDICTS.columns}, VERDICTS)

    def _row(self, found: Finding, answer: str) -> dict[str, Any]:
        row: dict[str, Any] = dict.fromkeys(VERDICTS.columns)
        row |= {"path": found.path, "model_id": self._detector.model_id, "failure": found.failure or None}
        if found.sha256:
            row |= {"sha256": found.sha256, "video_id": found.sha256[:16]}
        reasons = [found.failure] if found.failure else list(found.no_prediction)
        if found.is_known:
            known, reasons = self._own(found, reasons)
            row |= known
        elif found.logits:
            given, reasons = judged(np.array(found.logits), answer, self._known, self._rule, found.unfamiliar)
            row |= given
        return row | {"reasons": "\n".join(reasons)}

    def _own(self, found: Finding, reasons: list[str]) -> tuple[dict[str, Any], list[str]]:
        """Columns of VERDICTS for a video of the run, and its reasons."""
        video, rule = self._known.rows.row(self._detector.place_of[found.sha256], named=True), self._rule
        if not found.logits:
            return {"video_id": video["video_id"]}, reasons
        verdict, why = _concluded(self._answers[found.sha256], video["score"], self._known, rule)
        rate = self._known.base_rates[video["fold"] : video["fold"] + 1]
        stored = f"{known_sentence(video)}; its score is that of the one network that had not seen it"
        given = {
            "video_id": video["video_id"],
            "score": video["score"],
            "probability": at_prior(np.array(found.logits), rate, rule.prior),
            "verdict": verdict,
        }
        return given, [*why[: rule.withheld], f"{stored} (fold {video['fold']}).", *why[rule.withheld :]]


def answers_to(logits: FloatArray, known: KnownVideos, rule: Rule) -> list[str]:
    """Return the answers at the stated rates to M new videos by K networks, log odds float64 (M, K)."""
    return known.answers_to(p_values(known.witnesses, logits), rule)


def judged(
    logits: FloatArray, answer: str, known: KnownVideos, rule: Rule, unfamiliar: Sequence[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Columns of VERDICTS for a new video, and the reasons, by what each fold's network says of it, float64 (K,)."""
    scores = probabilities(logits, 1.0).tolist()
    score = mean_of(scores)
    verdict, reasons = _concluded(answer, score, known, rule, unfamiliar)
    several = len(scores) > 1  # the range of one network would look like certainty
    given = {
        "score": score,
        "score_low": min(scores) if several else None,
        "score_high": max(scores) if several else None,
        "probability": at_prior(logits, known.judges_rates, rule.prior),
        "verdict": verdict,
    }
    return given, reasons


def _concluded(
    answer: str, score: float, known: KnownVideos, rule: Rule, more: Sequence[str] = ()
) -> tuple[str, list[str]]:
    """Return the verdict and the reasons; each of ``more`` alone makes it undecided."""
    against = [*([WITHHELD] if rule.withheld else []), *more]
    if answer == UNDECIDED:
        against.append("Among the run's videos such scores are found of reals and of fakes alike, or of neither.")
    elif agreeing(answer, score, known.threshold(rule)) == UNDECIDED:
        against.append(f"The operating point {rule.point} gives another answer than the stated error rates.")
    if against:
        return UNDECIDED, against
    rate = rule.called_fake if answer == FAKE else rule.called_real
    other = REAL if answer == FAKE else FAKE
    return answer, [f"At most {percent(rate)} of the run's {other}s look as {answer} as this."]
