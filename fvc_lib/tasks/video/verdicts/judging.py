"""Verdicts on any number of files: fake, real or undecided.

Fake or real is said where the other answer is unlikely at a stated rate, by the run's own out-of-fold scores
(``metrics/abstention.py``); else undecided. Undecided, too, is a video whose codec, size, length or rate is beyond
those of the run's videos, and every video where the run is not shown to be above its controls.

Files are looked at in blocks, so memory does not grow with their number. Each finding is appended to a journal at once:
a call that was killed goes on with the same folder and scores nothing twice. The journal holds no verdicts, so another
rule scores nothing again. Shards of the files (``find_out_shard``) have a journal each.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fvc_lib.corpus.corpus_files import Kind, Rejections, is_named_as
from fvc_lib.corpus.label_table import SUFFIXES, read_label_table
from fvc_lib.metrics.abstention import FAKE, REAL, UNDECIDED, p_values
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.metrics.classification import FloatArray
from fvc_lib.services.atomic_files import atomic_output, path_from_text
from fvc_lib.services.errors import UsageError
from fvc_lib.services.progress import Report, not_reported, part_text
from fvc_lib.services.tables import VERDICTS, check_table, csv_for_people, frame_of
from fvc_lib.services.tasks import VERDICTS as VERDICTS_STAGE
from fvc_lib.tasks.journal import Journal, find_out, found_in_blocks, take_in
from fvc_lib.tasks.video.predicting import Finding, VideoDetector, known_sentence, mean_of
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
from fvc_lib.video.clips.clip_file import Pixels

STANDARD_INPUT = "-"


def files_of(asked: Sequence[str], kind: Kind = "video") -> list[Path]:
    """Return the files that ``asked`` names, absolute, each once and in this order.

    A folder names all files below it with a suffix of the ``kind``; a table (CSV, TSV, Parquet) the files in its column
    ``path``, relative to the table's folder; ``-`` the lines of standard input. Anything else is a file, whether it
    exists or not.

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
_UNSCORED, _UNREAD = "no prediction", "not read"
_RANGE = "The range of a score is that of the folds' networks, no interval with a stated coverage."


@dataclass(frozen=True)
class Verdicts:
    """The verdicts on files, and their limits.

    Attributes:
        table: VERDICTS of the first thousand files.
        counts: the number of ``fake``, ``real``, ``undecided``, ``no prediction`` and ``not read``.
        num_resumed: files whose findings an earlier call had stored.
        detector, rule: that judged.
        limits: sentences.
        files: the rows of all files, as CSV with reasons as one text, and as JSON lines with reasons as a list.
    """

    table: pl.DataFrame
    counts: Mapping[str, int]
    num_resumed: int
    detector: VideoDetector
    rule: Rule
    limits: tuple[str, ...]
    files: tuple[Path, ...]

    @property
    def known(self) -> KnownVideos:
        """The run's videos."""
        return self.detector.known

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield all rows of VERDICTS; one is in memory."""
        with self.files[1].open(encoding="utf-8") as lines:
            for line in lines:
                row: dict[str, Any] = json.loads(line)
                yield row | {"reasons": "\n".join(row["reasons"])}

    def answer(self) -> str:
        """Return the counts as one sentence."""
        told = [f"{self.counts[word]:,} {word}" for word in (FAKE, REAL, UNDECIDED)]
        told += [f"{self.counts[_UNSCORED]:,} without a prediction"] if self.counts[_UNSCORED] else []
        told += [f"{self.counts[_UNREAD]:,} could not be read"] if self.counts[_UNREAD] else []
        number = sum(self.counts.values())
        return f"{number:,} video{'s' * (number != 1)}: {', '.join(told)}."


def judge_files(
    detector: VideoDetector,
    files: Sequence[Path],
    rule: Rule,
    folder: Path,
    *,
    workers: int = 0,
    file_seconds: float = 0.0,
    seen: Callable[[Path, Pixels], None] = lambda _path, _frames: None,
    progress: Report = not_reported,
) -> Verdicts:
    """Write a verdict on each of ``files``, in their order, to ``folder``.

    Args:
        detector: of a run, ensemble or bundle.
        files: absolute, each once.
        rule: when an answer is given.
        folder: of the tables and the journal; journals of shards are merged into it.
        workers: processes that decode; 0: one per core.
        file_seconds: time limit of a file; 0: a minute, and a second for each megabyte.
        seen: called with each file that is scored now and its frames, uint8 (T, 3, S, S), as the networks see them.
        progress: called with the number of files done.

    Raises:
        FvcError: as ``VideoDetector.findings``.
        OSError: a table cannot be written.
    """
    detector.distance_now(lambda part, done, total: progress(0, len(files), part_text(part, done, total)))
    folder.mkdir(parents=True, exist_ok=True)
    take_in(folder, VERDICTS_STAGE)
    known = detector.known
    answers = dict(zip(known.tested["content_sha256"], known.answers_to(known.left_out, rule), strict=True))

    def picture(path: str, clips: Pixels) -> str:
        seen(path_from_text(path), clips[0])
        return ""

    find = partial(detector.findings, workers=workers, picture=picture, file_seconds=file_seconds)
    counts, shown, num_resumed = Counter[str](), [_table(detector, [], answers, rule)], 0
    written = (folder / CSV, folder / LINES)
    with ExitStack() as stack:
        journal = stack.enter_context(closing(Journal(folder, detector.identity, Finding)))
        temporaries = [stack.enter_context(atomic_output(path)) for path in written]
        table, lines = (stack.enter_context(path.open("w", encoding="utf-8")) for path in temporaries)

        table.write(csv_for_people(shown[0]))
        for found, num_known in found_in_blocks(journal, files, find, progress):
            num_resumed += num_known
            some = check_table(_table(detector, found, answers, rule), VERDICTS, CSV)
            flat = some.with_columns(pl.col("reasons").str.replace_all("\n", " "))
            table.write(csv_for_people(flat, header=False))
            for row in some.iter_rows(named=True):
                lines.write(f"{json.dumps({**row, 'reasons': row['reasons'].splitlines()})}\n")
            without = pl.when(pl.col("failure").is_null()).then(pl.lit(_UNSCORED)).otherwise(pl.lit(_UNREAD))
            counts.update(some.select(pl.coalesce("verdict", without)).to_series().to_list())
            if sum(each.height for each in shown) < _MOST_SHOWN:
                shown.append(some)
    limits = (*detector.cautions, *detector.remarks, *_limits(detector, rule))
    return Verdicts(pl.concat(shown).head(_MOST_SHOWN), counts, num_resumed, detector, rule, limits, written)


def find_out_shard(
    detector: VideoDetector,
    files: Sequence[Path],
    folder: Path,
    shard: str,
    *,
    workers: int = 0,
    file_seconds: float = 0.0,
    progress: Report = not_reported,
) -> None:
    """Store the findings on the ``files`` of one ``shard``, such as ``3_of_16``, in ``folder``, for ``judge_files``.

    The other arguments, and errors, as of ``judge_files``.
    """
    find = partial(detector.findings, workers=workers, file_seconds=file_seconds)
    find_out(Journal(folder, detector.identity, Finding, shard=shard), files, find, progress)


def _limits(detector: VideoDetector, rule: Rule) -> tuple[str, ...]:
    is_final = FINAL in detector.networks.judges
    return (
        *rule_sentences(detector.known, rule),
        *(final_sentences(detector.known, rule) if is_final else ()),
        f"{FAMILIARITY} Of the run's own videos {percent(detector.ranges.share_unfamiliar)} are.",
        detector.distance.limit() if detector.distance else UNKNOWN,
        "The rates hold for videos that come from where the run's videos come from; of others nothing is promised.",
        *([] if is_final else [_RANGE]),
        *([] if detector.config.near_duplicate_bits else [
            "Copies of the run's videos were not looked for: the run has near_duplicate_bits 0."]),
    )  # fmt: skip


def _table(
    detector: VideoDetector, found: Sequence[Finding], answers_of_known: Mapping[str, str], rule: Rule
) -> pl.DataFrame:
    """Return VERDICTS, in the order of ``found``; ``answers_of_known``: at the stated rates, by content."""
    new, known = [each for each in found if each.logits and not each.is_known], detector.known
    answers = answers_to(np.array([each.logits for each in new]), known, rule) if new else []
    answer_of, rows = dict(zip((each.path for each in new), answers, strict=True)), []
    for each in found:
        row: dict[str, Any] = dict.fromkeys(VERDICTS.columns)
        row |= {"path": each.path, "model_id": detector.model_id, "failure": each.failure or None}
        if each.sha256:
            row |= {"sha256": each.sha256, "video_id": each.sha256[:16]}
        reasons = [each.failure] if each.failure else list(each.no_prediction)
        if each.is_known:
            video = known.rows.row(detector.place_of[each.sha256], named=True)
            row["video_id"] = video["video_id"]
            if each.logits:
                given, reasons = _of_known(video, each.logits, answers_of_known[each.sha256], known, rule)
                row |= given
        elif each.logits:
            given, reasons = judged(np.array(each.logits), answer_of[each.path], known, rule, each.unfamiliar)
            row |= given
        rows.append(row | {"reasons": "\n".join(reasons)})
    return frame_of({name: [row[name] for row in rows] for name in VERDICTS.columns}, VERDICTS)


def _of_known(
    video: Mapping[str, Any], logits: Sequence[float], answer: str, known: KnownVideos, rule: Rule
) -> tuple[dict[str, Any], list[str]]:
    """Return columns of VERDICTS for a video of the run, and the reasons."""
    verdict, why = _concluded(answer, video["score"], known, rule)
    rate = known.base_rates[video["fold"] : video["fold"] + 1]
    probability = at_prior(np.array(logits), rate, rule.prior)
    stored = f"{known_sentence(video)}; its score is that of the one network that had not seen it"
    reasons = [*why[: rule.withheld], f"{stored} (fold {video['fold']}).", *why[rule.withheld :]]
    return {"score": video["score"], "probability": probability, "verdict": verdict}, reasons


def answers_to(logits: FloatArray, known: KnownVideos, rule: Rule) -> list[str]:
    """Return the answers at the stated rates to M new videos by K networks, log odds float64 (M, K)."""
    return known.answers_to(p_values(known.witnesses, logits), rule)


def judged(
    logits: FloatArray, answer: str, known: KnownVideos, rule: Rule, unfamiliar: Sequence[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Return columns of VERDICTS for a new video with calibrated log odds float64 (K,), and the reasons."""
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
    answer: str, score: float, known: KnownVideos, rule: Rule, unfamiliar: Sequence[str] = ()
) -> tuple[str, list[str]]:
    """Return the verdict and the reasons; each of ``unfamiliar`` alone makes it undecided."""
    against = [*([WITHHELD] if rule.withheld else []), *unfamiliar]
    if answer == UNDECIDED:
        against.append("Among the run's videos such scores are found of reals and of fakes alike, or of neither.")
    elif agreeing(answer, score, known.threshold(rule)) == UNDECIDED:
        against.append(f"The operating point {rule.point} gives another answer than the stated error rates.")
    if against:
        return UNDECIDED, against
    rate = rule.called_fake if answer == FAKE else rule.called_real
    other = REAL if answer == FAKE else FAKE
    return answer, [f"At most {percent(rate)} of the run's {other}s look as {answer} as this."]
