"""A run's memory, explained in a terminal: ``python -m fvc_lib.analysis.memory.report FILE|RUN``."""

import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import click
import polars as pl

from fvc_lib.analysis.memory import findings
from fvc_lib.analysis.memory.findings import PROCESS, MemoryFindings, phase_text, where_text
from fvc_lib.analysis.pages.display import HtmlTable
from fvc_lib.analysis.read.logs import read_events, read_samples
from fvc_lib.analysis.read.naming import run_parameters
from fvc_lib.analysis.read.records import LogFile
from fvc_lib.analysis.wording import clean_text, count_text, duration_text, megabytes_text
from fvc_lib.services.atomic_files import as_mapping, message_text, path_to_text, read_json_object
from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.memory.policy import MEASURING, PREFLIGHT, next_settings
from fvc_lib.services.run_paths import RunPaths, stage_key
from fvc_lib.services.tasks import CONTROL_TRAININGS

# --- Tables for people: one row per thing, with units in the headings

NONE = "-"
_MOST_ROWS = 24

Row = Mapping[str, Any]
Columns = dict[str, tuple[type[pl.DataType], Callable[[Row], Any]]]
_STAGE: Columns = {"stage": (pl.String, where_text)}
_WHERE: Columns = {**_STAGE, "phase": (pl.String, lambda row: phase_text(row["phase"]))}


def _table(rows: pl.DataFrame, columns: Columns) -> pl.DataFrame:
    """A column for each of ``columns``: its type, and what a row has there."""
    values = [[value(row) for _, value in columns.values()] for row in rows.iter_rows(named=True)]
    return pl.DataFrame(values, {name: kind for name, (kind, _) in columns.items()}, orient="row")


def _text(name: str, shown: Callable[[Any], str] = str) -> tuple[type[pl.DataType], Callable[[Row], str]]:
    """A column of text of what not every row has."""
    return pl.String, lambda row: NONE if row[name] is None else shown(row[name])


def peaks_table(found: MemoryFindings) -> pl.DataFrame:
    """The highest memory of each phase; with more rows than can be read, of a stage's folds the highest alone."""
    peaks = found.peaks
    if peaks.height > _MOST_ROWS:
        highest = pl.col("used_mb") == pl.col("used_mb").max().over("stage", "phase", "place")
        peaks = peaks.filter(highest).unique(["stage", "phase", "place"], keep="first", maintain_order=True)
    columns: Columns = {
        **_WHERE,
        "of": (pl.String, itemgetter("place")),  # a process is called so
        "peak_mb": (pl.Float64, itemgetter("used_mb")),
        "usage_percent": (pl.Float64, itemgetter("usage_percent")),
        "at_seconds": (pl.Float64, itemgetter("seconds")),
        "epoch": _text("epoch"),
        "num_samples": (pl.Int64, itemgetter("num_samples")),
    }
    return _table(peaks, columns)


def near_limit_table(found: MemoryFindings) -> pl.DataFrame:
    """Spells above 90%: ``stage phase at_seconds lasting highest_percent used budget told_by``."""
    columns: Columns = {
        **_WHERE,
        "at_seconds": (pl.Float64, itemgetter("seconds")),
        "lasting": (pl.String, lambda row: duration_text(row["until_seconds"] - row["seconds"])),
        "highest_percent": (pl.Float64, itemgetter("usage_percent")),
        "used": (pl.String, lambda row: megabytes_text(row["used_mb"])),
        "budget": (pl.String, lambda row: megabytes_text(row["budget_mb"])),
        "told_by": (pl.String, _sources),
    }
    return _table(found.near_limit, columns)


def out_of_memory_table(found: MemoryFindings) -> pl.DataFrame:
    """Every out-of-memory: ``stage phase epoch step happened_in asked_for what_was_done context_file``."""
    columns: Columns = {
        **_WHERE,
        "epoch": _text("epoch"),
        "step": _text("global_step"),
        "happened_in": _text("happened_in", lambda name: name.replace("_", " ") or NONE),
        "asked_for": _text("asked_mb", megabytes_text),
        "what_was_done": (pl.String, itemgetter("done")),
        "context_file": (pl.String, _context_path),
    }
    return _table(found.out_of_memory, columns)


def predictions_table(found: MemoryFindings) -> pl.DataFrame:
    """What the preflight predicted of each training's peak, and what was measured then."""
    columns: Columns = {
        **_STAGE,
        "attempt": (pl.Int64, itemgetter("attempt")),
        "of": _text("place"),
        "predicted": (pl.String, lambda row: megabytes_text(row["predicted_mb"])),
        "measured": _text("measured_mb", megabytes_text),
        "off_by": _text("error_percent", "{:+.0f}%".format),
    }
    return _table(found.predictions, columns)


def _context_path(row: Row) -> str:
    path = f"memory/oom/{stage_key(row['stage'], row['fold'])}/{row['context_file']}"
    return NONE if row["context_file"] is None else path


def _sources(row: Row) -> str:
    counts = ((row["num_samples"], "sample"), (row["num_events"], "event"))
    return ", ".join(count_text(count, name) for count, name in counts if count)


# --- What held memory when it ran out, from the context files that an out-of-memory leaves

_TENSORS = {
    **dict.fromkeys(("stage", "shape", "dtype"), pl.String), **dict.fromkeys(("num_tensors", "total_bytes"), pl.Int64)
}  # fmt: skip
_MOST_TENSORS = 8


def largest_tensors(run: RunPaths, found: MemoryFindings) -> pl.DataFrame:
    """The tensors that held most when memory ran out: ``stage shape dtype num_tensors total_bytes``, largest first.

    Of each stage, shape and type the out-of-memory where they held most; a missing context file adds no row.
    """
    rows = [row for event in found.out_of_memory.iter_rows(named=True) for row in _tensors(run, event)]
    frame = pl.DataFrame(rows, schema=_TENSORS).sort("total_bytes", "stage", "shape", descending=[True, False, False])
    return frame.unique(["stage", "shape", "dtype"], keep="first", maintain_order=True).head(_MOST_TENSORS)


def _tensors(run: RunPaths, event: dict[str, Any]) -> Iterator[dict[str, object]]:
    name = event["context_file"]
    if name is None or name != Path(name).name:  # a name from a log shall not lead out of its folder
        return
    state = as_mapping(read_json_object(run.oom_contexts(event["stage"], event["fold"]) / name).get("state"))
    tensors = state.get("largest_tensors")
    for tensor in tensors if isinstance(tensors, list) else ():
        if isinstance(tensor, dict) and isinstance(tensor.get("total_bytes"), int):
            shape, count = tensor.get("shape"), tensor.get("count")
            yield {
                "stage": where_text(event),
                "shape": " × ".join(map(str, shape)) if isinstance(shape, list) else "not recorded",
                "dtype": str(tensor.get("dtype")).removeprefix("torch."),
                "num_tensors": count if isinstance(count, int) else None,
                "total_bytes": tensor["total_bytes"],
            }


# --- What to change after a look at a run's memory: advice with the numbers it rests on, most urgent first

COMFORTABLE_PERCENT = 50.0  # below it there is room for more
FULL_SHARE = 0.8  # a plan that fills more of the budget has no room for what was not foreseen
SPARE_FACTOR = 1.25  # a limit so much above the peak is safe to ask for
LARGE_CHILD_SHARE = 0.3
_LOWERED = (pl.col("kind") == "preflight") & (pl.col("micro_batch") < pl.col("micro_batch_planned"))
_TRAINED = f"^(({'|'.join(CONTROL_TRAININGS)})_)?(train|validation|test)$"


@dataclass(frozen=True)
class Advice:
    """One thing that was seen, and what to change because of it; both plain text."""

    seen: str
    change: str


def run_advice(found: MemoryFindings, parameters: Mapping[str, object]) -> tuple[Advice, ...]:
    """What to change, most urgent first, after a run with the parameters ``parameters`` (empty where not known)."""
    if found.usage.is_empty():
        return (Advice("No memory samples are recorded.", "Nothing can be said before a stage has run."),)
    measuring, found = found.near_limit.filter(pl.col("phase").is_in(MEASURING)), found.of_the_work()
    urgent = [
        *_after_out_of_memory(found),
        *_after_preflight(found),
        *_after_leaks(found),
        *_after_near_limit(found, parameters),
        *_after_measuring(measuring),
    ]
    roomy = [] if urgent else [*_larger_batch(found, parameters), *_smaller_request(found)]
    advice = [*urgent, *_off_prediction(found), *_child_processes(found, parameters), *roomy]
    return tuple(advice) or (Advice("Nothing stands out.", "Leave it as it is."),)


def advice_table(advice: Sequence[Advice]) -> pl.DataFrame:
    """Columns ``seen`` and ``change``."""
    return pl.DataFrame([vars(each) for each in advice], schema={"seen": pl.String, "change": pl.String})


def _after_out_of_memory(found: MemoryFindings) -> list[Advice]:
    rows = found.out_of_memory
    if rows.is_empty():
        return []
    seen = findings.out_of_memory_sentence(found) + "."
    at_one = rows.filter((pl.col("micro_batch") == 1) & pl.col("done").str.starts_with("stopped"))
    backed_off = rows.filter(pl.col("micro_batch_next") < pl.col("micro_batch"))["micro_batch_next"].min()
    if at_one.height:
        return [Advice(seen, f"One sample alone was too much: {'; else '.join(next_settings('sample'))}.")]
    if isinstance(backed_off, int):
        change = f"Begin where it ended: -p batch_size {backed_off} saves the retries and leaves the result the same."
        return [Advice(seen, change)]
    return [Advice(seen, f"It was not the batch that was too large: {'; else '.join(next_settings('elsewhere'))}.")]


def _after_preflight(found: MemoryFindings) -> list[Advice]:
    lowered = found.events.filter(_LOWERED).sort("micro_batch")
    if lowered.is_empty():
        return []
    row = lowered.row(0, named=True)
    batches, budget = f"{row['micro_batch_planned']} to {row['micro_batch']}", megabytes_text(row["budget_mb"])
    change = f"Fine as it is; for larger batches give more than {budget}."
    if found.near_limit.height and found.peak is not None:
        change = f"The result stays the same; {_enough_text(found.peak)} would leave room."
    return [Advice(f"The preflight lowered the micro-batch from {batches} to fit {budget}.", change)]


def _after_leaks(found: MemoryFindings) -> list[Advice]:
    if found.leaks.is_empty():
        return []
    worst = found.leaks.row(0, named=True)
    budget = found.usage.filter(pl.col("place") == worst["place"])["budget_mb"].min()
    left = ""
    if isinstance(budget, float) and worst["slope_mb"] > 0 and budget > worst["last_mb"]:
        epochs = math.floor((budget - worst["last_mb"]) / worst["slope_mb"])
        left = f" At this rate its budget of {megabytes_text(budget)} lasts {count_text(epochs, 'more epoch')}."
    change = "Find what is kept: -p profile_memory true records who allocates it. A resume frees it for a while."
    return [Advice(f"{findings.growth_sentence(found)}.{left}", change)]


def _after_near_limit(found: MemoryFindings, parameters: Mapping[str, object]) -> list[Advice]:
    peak = found.peak
    if (
        found.near_limit.is_empty()
        or found.out_of_memory.height
        or peak is None
        or found.events.filter(_LOWERED).height
    ):
        return []
    enough = _enough_text(peak)
    if not _trained(peak["phase"]):
        return [Advice(findings.limit_sentence(found) + ".", f"Give it more memory: {enough} would leave room.")]
    batch = micro_batch(found, parameters)
    smaller = next_settings("batch", batch_size=batch or 1)[0]
    return [Advice(findings.limit_sentence(found) + ".", f"Before it runs out: {smaller}, or {enough}.")]


def _after_measuring(spells: pl.DataFrame) -> list[Advice]:
    if spells.is_empty():
        return []
    highest = spells.sort("usage_percent").row(-1, named=True)
    by_preflight = highest["phase"] == PREFLIGHT
    what = "Measuring a step before the training" if by_preflight else "The batch-size sweep"
    setting = next_settings("preflight" if by_preflight else "batch_size_sweep")[0]
    return [Advice(f"{what} took up to {highest['usage_percent']:.0f}% of the budget.", f"{setting} spares it.")]


def _larger_batch(found: MemoryFindings, parameters: Mapping[str, object]) -> list[Advice]:
    """Doubling the micro-batch at most doubles what the steps add to what stood before."""
    trained = found.peaks.filter(pl.col("phase").str.contains(_TRAINED), pl.col("budget_mb").is_not_null())
    if trained.is_empty():
        return []
    row = trained.sort("usage_percent", descending=True).row(0, named=True)
    before = found.before_training_mb(row)
    batch, effective = micro_batch(found, parameters), parameters.get("effective_batch_size")
    if before is None or (batch and isinstance(effective, int) and 2 * batch > effective):
        return []
    added = max(row["used_mb"] - before, 0.0)
    doubled = before + 2 * added
    if row["usage_percent"] >= COMFORTABLE_PERCENT or doubled > FULL_SHARE * row["budget_mb"]:
        return []
    seen = (
        f"Training peaks at {row['usage_percent']:.1f}% of its budget ({where_text(row)}), of which its steps add "
        f"{megabytes_text(added)}."
    )
    how = f"-p batch_size {2 * batch}" if batch else "a batch_size of twice the model's default"
    change = f"If training is slow: {how} would need about {megabytes_text(doubled)}; the result stays the same."
    return [Advice(seen, change)]


def _smaller_request(found: MemoryFindings) -> list[Advice]:
    rows = found.peaks.filter((pl.col("place") == PROCESS) & pl.col("budget_mb").is_not_null())
    if rows.is_empty():
        return []
    row = rows.sort("used_mb", descending=True).row(0, named=True)
    if row["usage_percent"] >= COMFORTABLE_PERCENT:
        return []
    seen = f"The work itself used {megabytes_text(row['used_mb'])} of {megabytes_text(row['budget_mb'])} allowed."
    enough = f"{_request_text(row['used_mb'] * SPARE_FACTOR)} would have been enough"
    return [Advice(seen, f"Ask for less: {enough}, with {SPARE_FACTOR - 1:.0%} to spare.")]


def _off_prediction(found: MemoryFindings) -> list[Advice]:
    change = "Do not plan by the preflight here: plan by the measured peak."
    return [Advice(findings.prediction_sentence(found) + ".", change)] * bool(found.predictions["is_off"].any())


def _child_processes(found: MemoryFindings, parameters: Mapping[str, object]) -> list[Advice]:
    peak = found.peak
    if peak is None or peak["alone_mb"] is None or (peak["usage_percent"] or 0) < COMFORTABLE_PERCENT:
        return []
    children = peak["used_mb"] - peak["alone_mb"]
    if children < LARGE_CHILD_SHARE * peak["used_mb"]:
        return []
    share = f"{children / peak['used_mb']:.0%} of the peak"
    name = "num_workers" if _trained(peak["phase"]) else "workers"
    workers = parameters.get(name)
    each = f", about {megabytes_text(children / workers)} each" if isinstance(workers, int) and workers else ""
    seen = f"Worker processes hold {share} ({megabytes_text(children)}{each})."
    return [Advice(seen, f"Fewer of them (-p {name}) is the cheapest way to less memory; the result stays the same.")]


def micro_batch(found: MemoryFindings, parameters: Mapping[str, object]) -> int | None:
    """The micro-batch last worked with: what events say, else what was asked for; None where neither is known."""
    known = found.events.filter(
        pl.col("kind").is_in(["preflight", "micro_batch"]) & pl.col("micro_batch").is_not_null()
    )
    if known.height:
        return int(known["micro_batch"][-1])
    batch = parameters.get("batch_size")
    return batch if isinstance(batch, int) and batch > 0 else None


def _enough_text(peak: Mapping[str, Any]) -> str:
    return f"a limit of {_request_text(peak['used_mb'] / FULL_SHARE)}"


def _trained(phase: Any) -> bool:
    return re.search(_TRAINED, str(phase)) is not None


def _request_text(megabytes: float) -> str:
    gigabytes = math.ceil(megabytes / 100) / 10
    mebibytes = math.ceil(gigabytes * 1e9 / 2**20 / 100) * 100  # what SLURM calls M
    return f"FVC_MEM_GB={gigabytes:g} (or --mem={mebibytes}M)"


# --- Plain text: sentences, aligned tables and a timeline of block characters

_SENTENCE_WIDTH = 102


def report_lines(
    found: MemoryFindings, parameters: Mapping[str, object], tensors: pl.DataFrame, *, title: str
) -> list[str]:
    """The whole report below ``title``, with ``run_advice`` for ``parameters`` and the ``largest_tensors``."""
    unread = [*([""] if found.notes else []), *(f"could not be read: {note}" for note in found.notes)]
    if found.usage.is_empty() and found.events.is_empty():
        return [clean_text(title), "", findings.peak_sentence(found) + ".", *unread]
    lines = [clean_text(title), "", findings.peak_sentence(found) + ".", findings.parts_sentence(found) + "."]
    lines += _section("Peak per phase", "", peaks_table(found))
    lines += ["", f"  {findings.event_counts_sentence(found)}."]
    lines += _section("Close to the limit", findings.limit_sentence(found), near_limit_table(found))
    lines += _section("Growth per epoch", findings.growth_sentence(found))
    if found.growth.height:
        lines += textwrap.wrap(f"({findings.RULE})", _SENTENCE_WIDTH, initial_indent="  ", subsequent_indent="  ")
    lines += _section("Out of memory", findings.out_of_memory_sentence(found), out_of_memory_table(found))
    if tensors.height:
        lines += _section("What tensors held when memory ran out", "", tensors)
    lines += _section("Prediction and measurement", findings.prediction_sentence(found))
    lines += ["", "What to change"]
    lines += [line for each in run_advice(found, parameters) for line in (f"  - {each.seen}", f"    {each.change}")]
    return [*lines, *unread]


def _section(heading: str, sentence: str, table: pl.DataFrame | None = None) -> list[str]:
    rows = repr(HtmlTable(table)).splitlines() if table is not None and table.height else []
    return ["", heading, *(f"  {line}" for line in ([f"{sentence}."] * bool(sentence) + rows))]


def open_subject(path: Path) -> tuple[MemoryFindings, RunPaths, str]:
    """Findings, run and title for a memory log, its event log, or a run folder; ``UsageError``: it is none of these."""
    if path.is_dir():
        root = path.parent if path.name == "memory" else path
        run = RunPaths(root.absolute())
        if not (root / "memory").is_dir() and not run.run_json.is_file():
            raise UsageError(f"{_shown(path)} is no run folder: it has neither memory/ nor run.json. {_WANTED}")
        return findings.run_memory(run), run, f"Memory of {path_to_text(run.run_id)}"
    if not path.exists():
        raise UsageError(f"{_shown(path)}: no such file or folder. {_WANTED}")
    # The events of a stage lie in a folder of their own, below its samples and under the same name.
    samples_path = path.parent.parent / path.name if path.parent.name == "events" else path
    events_path = samples_path.parent / "events" / samples_path.name
    run = RunPaths(samples_path.absolute().parents[1])
    samples = read_samples([LogFile.named(samples_path, run.run_id)])
    events = read_events([LogFile.named(events_path, run.run_id)] if events_path.is_file() else [], samples.frame)
    if samples.frame.is_empty() and samples_path.is_file() and samples_path.stat().st_size:
        why = " ".join(samples.notes) or "It holds nothing but blank lines."
        raise UsageError(f"{_shown(samples_path)} is no memory log: no line of it is a memory sample. {why} {_WANTED}")
    return findings.find(samples, events), run, f"Memory of {_shown(path)}"


_WANTED = "Give one of a run's memory/*.jsonl files, or the run folder."


def _shown(path: Path) -> str:
    return repr(message_text(str(path)))


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("log", metavar="FILE|RUN", type=click.Path(path_type=Path))
def main(log: Path) -> None:
    """Explain the memory of one stage (a memory/*.jsonl file) or of a whole run (its folder).

    Says where memory peaked and what it consisted of, lists every moment above 90% of the budget,
    judges growth from epoch to epoch, tells each out-of-memory and what was done, compares the prediction with what
    was measured, and ends with what to change. Works while the run goes on, and on logs that a crash has torn: lines
    that cannot be read are counted.

    \b
    python -m fvc_lib.analysis.memory.report runs/demo/run_20250304_101500_abcdef01
    python -m fvc_lib.analysis.memory.report runs/demo/run_*/memory/04_fold_training_fold_0.jsonl

    Megabytes are 1e6 bytes. Resident memory counts the process with its children, as a job's limit does. Exit codes:
    0 reported, 2 the file is no memory log.
    """  # noqa: D301 - click wants the backspace character itself before lines it shall not re-wrap
    try:
        found, run, title = open_subject(log)
    except FvcError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        click.echo(f"error: {_shown(log)}: {error.strerror}. {_WANTED}", err=True)
        sys.exit(2)
    encoding = sys.stdout.encoding or "ascii"
    for line in report_lines(found, run_parameters(run), largest_tensors(run, found), title=title):
        click.echo(line.encode(encoding, "replace").decode(encoding))


if __name__ == "__main__":
    main()
