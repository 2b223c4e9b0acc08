"""Is this video fake? A finished run's networks asked of new files, with an answer only where one can be stood by.

Every fold's network judges a new file, with the run's own eyes (``scoring.py``). Fake or real is said where the other
answer is unlikely at a stated rate, by the run's own out-of-fold scores (``metrics/abstention.py``); else undecided.
Undecided, too, is whatever the run's videos say nothing about: a codec, size, length or rate beyond theirs, and
everything, where the run is not shown to be above its controls. A video of the run gets the score of the network that
had not seen it, and a copy of one gets none.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fvc_lib.corpus.label_table import SUFFIXES, read_label_table
from fvc_lib.corpus.listing import Rejections, is_named_as
from fvc_lib.corpus.probing import VIDEO_FILES, ProbeResult, probe_files
from fvc_lib.metrics.abstention import FAKE, REAL, UNDECIDED, p_values
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.services.atomic_files import path_to_text, sha256_of_json, write_text
from fvc_lib.services.errors import UsageError, command_text
from fvc_lib.services.parameters import run_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import AUGMENTED, VERDICTS, frame_of, read_table, write_table
from fvc_lib.tasks.video.verdicts.rule import WITHHELD, KnownVideos, Rule, agreeing, percent, rule_sentences
from fvc_lib.tasks.video.verdicts.scoring import FileToScore, Networks, RunNetworks, score_files
from fvc_lib.tasks.video.verdicts.unfamiliar import FAMILIARITY, Familiar, copied_rows
from fvc_lib.video.clips.store import Pixels

# --- Which files are meant

STANDARD_INPUT = "-"


def files_of(asked: Sequence[str]) -> list[Path]:
    """The files that ``asked`` names, absolute, each once and in this order.

    A folder stands for all files below it that are named as videos; a table (CSV, TSV, Parquet) for what its column
    ``path`` names, relative to the table's folder; ``-`` for the lines of standard input. Whatever else is named is
    taken for a video, there or not: what is wrong with it is said in its row.

    Raises:
        UsageError: nothing is named, a folder without videos, or a table without that column.
    """
    found: dict[Path, None] = {}
    for text in asked:
        path = Path(text)
        if text == STANDARD_INPUT:
            lines = (os.fsdecode(line.rstrip(b"\r\n")) for line in sys.stdin.buffer)
            named = [Path(line) for line in lines if line.strip()]
        elif path.is_dir():
            named = sorted(each for each in path.rglob("*") if is_named_as("video", each.name) and each.is_file())
            if not named:
                raise UsageError(f"{text!r}: a folder without a file that is named as a video. Name the files.")
        elif path.suffix.lower() in SUFFIXES:
            table, malformed = read_label_table(path), Rejections()
            column = table.require(["path"])
            named = [path.parent / cells[column] for _, cells in table.records([column], malformed) if cells[column]]
        else:
            named = [path]
        # Links stay links, and a list's '~nobody' is a name like any other.
        found |= {Path(os.path.abspath(os.path.expanduser(each))): None for each in named}  # noqa: PTH100, PTH111
    if not found:
        raise UsageError("no video is named. Give files, folders, tables with a column 'path', or '-' for a list.")
    return list(found)


# --- The verdicts


@dataclass(frozen=True)
class Verdicts:
    """What was found: ``table`` (VERDICTS), and the sentences that belong beside it."""

    table: pl.DataFrame
    known: KnownVideos
    familiar: Familiar
    rule: Rule
    limits: tuple[str, ...] = field(default=())

    @property
    def num_judged(self) -> int:
        """Videos that got a row without failure."""
        return int(self.table["failure"].null_count())

    def answer(self) -> str:
        """How many of each, in one sentence."""
        counts = {word: self.table.filter(verdict=word).height for word in (FAKE, REAL, UNDECIDED)}
        copies = int(self.table.filter(pl.col("verdict").is_null() & pl.col("failure").is_null()).height)
        told = [f"{number} {word}" for word, number in counts.items()]
        told += [f"{copies} without a prediction"] if copies else []
        failed = self.table.height - self.num_judged
        told += [f"{failed} could not be read"] if failed else []
        return f"{self.table.height:,} video{'s' * (self.table.height != 1)}: {', '.join(told)}."

    def write(self, folder: Path) -> list[Path]:
        """Write the table as CSV, reasons as one text, and as JSON lines, reasons as a list."""
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / "verdicts.csv", folder / "verdicts.jsonl"]
        write_table(self.table.with_columns(pl.col("reasons").str.replace_all("\n", " ")), VERDICTS, files[0])
        rows = [{**row, "reasons": row["reasons"].splitlines()} for row in self.table.to_dicts()]
        write_text(files[1], "".join(f"{json.dumps(row)}\n" for row in rows))
        return files


def judge_files(
    run: RunPaths,
    files: Sequence[Path],
    rule: Rule,
    work_dir: Path,
    *,
    workers: int = 0,
    seen: Callable[[Path, Pixels], None] = lambda _path, _frames: None,
) -> Verdicts:
    """A verdict on each of ``files``, in their order.

    Args:
        run: of task video, all folds finished.
        files: absolute.
        rule: when an answer is given.
        work_dir: where what was found out about files is remembered.
        workers: processes that decode; 0: one per core.
        seen: is given a scored file and its frames, uint8 (T, 3, S, S), as the networks saw them.

    Raises:
        UsageError: a run of another task or an unfinished one.
    """
    networks = RunNetworks(run, held=run_config(run).num_trainings)  # every file is judged by all
    known = KnownVideos.of(run, list(networks.folds))
    familiar = Familiar(known.rows)
    texts = [path_to_text(path.relative_to("/")) for path in files]
    found, _ = probe_files(VIDEO_FILES, "/", texts, work_dir, workers=workers)
    probed = [found[text] for text in texts]
    digests = {str(fold): networks.weights(fold) for fold in networks.folds}
    model_id = f"{run.run_id}@{sha256_of_json(digests)[:12]}"

    place_of = {content: place for place, content in enumerate(known.rows["content_sha256"])}
    new = [n for n, each in enumerate(probed) if each.probe is not None and each.content_sha256 not in place_of]
    bits = networks.config.near_duplicate_bits
    hashes = [probed[n].perceptual_hash for n in new]
    copies = dict(zip(new, copied_rows(known.rows["perceptual_hash"].to_list(), hashes, bits), strict=True))
    todo = [n for n in new if not copies[n]]
    scored = dict(_scored(networks, files, probed, todo, workers, seen))
    own = _OwnVideos(known, rule)

    rows = []
    for number, (path, each) in enumerate(zip(files, probed, strict=True)):
        row: dict[str, Any] = dict.fromkeys(VERDICTS.columns)
        row |= {"path": path_to_text(path), "model_id": model_id, "reasons": ""}
        if each.probe is None:
            row["failure"] = f"{each.reason}: {each.detail}"
        else:
            row |= {"sha256": each.content_sha256, "video_id": each.content_sha256[:16]}
            if each.content_sha256 in place_of:
                row |= own.row(place_of[each.content_sha256])
            elif copied := copies[number]:
                row |= _copy_row(known.rows[copied])
            elif isinstance(scored[number], str):
                row["failure"] = scored[number]
            else:
                row |= judged(scored[number], known, rule, familiar.reasons(vars_of(each)))
        row["reasons"] = "\n".join([row["failure"]] if row["failure"] else row["reasons"])
        rows.append(row)
    table = frame_of({name: [row[name] for row in rows] for name in VERDICTS.columns}, VERDICTS)
    limits = (*decoding_cautions(run, networks), *_limits(known, familiar, rule, bits))
    return Verdicts(table, known, familiar, rule, limits)


def vars_of(each: ProbeResult) -> dict[str, Any]:
    """What the probe found, named as in INDEX."""
    assert each.probe is not None
    return vars(each.probe)


def decoding_cautions(run: RunPaths, networks: Networks) -> tuple[str, ...]:
    """A sentence where files are not known to be decoded by the code and library that the run's videos were."""
    paths = read_table(run.augmented_metadata, AUGMENTED)["clip_path"] if run.augmented_metadata.is_file() else ()
    if {networks.store.decode_folder.name in Path(path).parts for path in paths} == {True}:
        return ()
    check = command_text("robustness", run.root, "--levels", "lossless")
    told = "The code or library that decodes is not known to be that which decoded the run's videos, so scores may not"
    return (f"{told} compare with theirs. Whether they still come out as stored: {check}",)


def _limits(known: KnownVideos, familiar: Familiar, rule: Rule, bits: int) -> tuple[str, ...]:
    return (
        *rule_sentences(known, rule),
        f"{FAMILIARITY} Of the run's own videos {percent(familiar.share_outside)} are.",
        "The rates hold for videos that come from where the run's videos come from; of others nothing is promised.",
        "From to is the range over the folds' networks, no interval with a stated coverage.",
        *([] if bits else ["Copies of the run's videos were not looked for: the run has near_duplicate_bits 0."]),
    )


def _scored(
    networks: Networks,
    files: Sequence[Path],
    probed: Sequence[ProbeResult],
    todo: Sequence[int],
    workers: int,
    seen: Callable[[Path, Pixels], None],
) -> Iterator[tuple[int, Any]]:
    """Of each file its logits by fold over the fold's temperature, float64 (K,), or why there are none."""
    folds = tuple(networks.folds)
    asked = [FileToScore(files[n], folds, content_sha256=probed[n].content_sha256) for n in todo]
    answers = score_files(
        networks, asked, workers=workers, seen=lambda place, clips: seen(files[todo[place]], clips[0])
    )
    with closing(answers):
        for each in answers:
            logits = [each.logits[f] / networks.folds[f].temperature for f in folds if not each.failure]
            yield todo[each.position], each.failure or np.array(logits)


def judged(logits: np.ndarray[Any, Any], known: KnownVideos, rule: Rule, unfamiliar: Sequence[str]) -> dict[str, Any]:
    """Columns of VERDICTS for a new video, by what each fold's network says of it, float64 (K,)."""
    scores = probabilities(logits, 1.0)
    score = float(scores.mean())
    answer = p_values(known.witnesses, logits[None]).answers((rule.called_fake, rule.called_real))[0]
    verdict, reasons = _concluded(answer, score, known, rule, unfamiliar)
    return {
        "score": score,
        "score_low": float(scores.min()),
        "score_high": float(scores.max()),
        "probability": _at_prior(logits, known, rule),
        "verdict": verdict,
        "reasons": reasons,
    }


def _concluded(
    answer: str, score: float, known: KnownVideos, rule: Rule, more: Sequence[str] = ()
) -> tuple[str, list[str]]:
    """The verdict, and the sentences why; each of ``more`` alone makes it undecided."""
    against = [*([WITHHELD] if rule.withheld else []), *more]
    if answer == UNDECIDED:
        against.append("Among the run's videos such scores are found of reals and of fakes, or of neither.")
    elif agreeing(answer, score, known.threshold(rule)) == UNDECIDED:
        against.append(f"The operating point {rule.point} gives another answer than the stated error rates.")
    if against:
        return UNDECIDED, against
    rate = rule.called_fake if answer == FAKE else rule.called_real
    other = REAL if answer == FAKE else FAKE
    return answer, [f"At most {percent(rate)} of the {other}s are called {answer}."]


def _at_prior(logits: np.ndarray[Any, Any], known: KnownVideos, rule: Rule) -> float | None:
    share = known.share_of_fakes
    if rule.prior is None or not 0 < share < 1:
        return None
    shift = np.log(rule.prior / (1 - rule.prior)) - np.log(share / (1 - share))
    return float(probabilities(logits + shift, 1.0).mean())


class _OwnVideos:
    """What the run has stored of its own videos."""

    def __init__(self, known: KnownVideos, rule: Rule) -> None:
        self._known, self._rule = known, rule
        said = known.left_out.answers((rule.called_fake, rule.called_real))
        self._answers = dict(zip(known.tested["video_id"].to_list(), said, strict=True))

    def row(self, place: int) -> dict[str, Any]:
        """Columns of VERDICTS for the run's video at ``place``."""
        video, known, rule = self._known.rows.row(place, named=True), self._known, self._rule
        told = f"This is a video of the run, {video['video_id']}, labelled {video['label']}"
        found = {"video_id": video["video_id"], "reasons": [f"{told}, that no network was tested on: no prediction."]}
        if video["score"] is None:
            return found
        verdict, reasons = _concluded(self._answers[video["video_id"]], video["score"], known, rule)
        scale = np.array([video["logit"] / video["temperature"]])
        stored = f"{told}; its score is that of the one network that had not seen it (fold {video['fold']})."
        return {
            **found,
            "score": video["score"],
            "probability": _at_prior(scale, known, rule),
            "verdict": verdict,
            "reasons": [*reasons[: rule.withheld], stored, *reasons[rule.withheld :]],
        }


_NAMED = 5


def _copy_row(videos: pl.DataFrame) -> dict[str, Any]:
    named = [f"{name}, labelled {label}" for name, label in videos.select("video_id", "label").iter_rows()]
    more = f" and {len(named) - _NAMED:,} more" if len(named) > _NAMED else ""
    reasons = [f"A near-duplicate of a video of the run: {'; '.join(named[:_NAMED])}{more}. No prediction."]
    if videos["label"].n_unique() > 1:
        reasons.append("Reals and fakes of the run show this footage, so their labels do not tell which this is.")
    return {"reasons": reasons}
