"""Read what a run has recorded in its folder: tables, state and parameters, and names for runs and corpora.

Files may be damaged, missing or not from this project. A stage is the part of a run that one notebook does. A
protocol is the rule that splits videos into training and test, such as ``kfold`` or ``cross_corpus``.
"""

import contextlib
import datetime
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from fvc_lib.analysis.wording import clean_text, count_text
from fvc_lib.services.atomic_files import as_mapping, as_text, path_to_text, read_json_object
from fvc_lib.services.config import NOT_HASHED, RunConfig
from fvc_lib.services.errors import DataError, FvcError
from fvc_lib.services.parameters import read_params_file
from fvc_lib.services.records.digests import document_damage
from fvc_lib.services.run_paths import ENSEMBLE_RECORD, RunPaths, is_held
from fvc_lib.services.tables import TableSchema, column_types, read_table
from fvc_lib.services.tasks import DEFAULT_TASK, KFOLD, PROTOCOLS, STAGES, TASKS

TARGET_SCOPE = "target:"  # prefix of ``scope`` in tables.RESULTS: a result on one target of a protocol

# --- Tables


@dataclass(frozen=True)
class Answer:
    """The result of a query over runs.

    Attributes:
        frame: the rows.
        notes: sentences on files and lines that could not be read.
    """

    frame: pl.DataFrame
    notes: tuple[str, ...] = ()


def as_list(value: object) -> list[Any]:
    """Return ``value`` if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def as_number(value: object) -> float | None:
    """Return ``value`` if it is an int or float, else None. True and False give None."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def read_tables(paths: Iterable[tuple[str, Path]], schema: TableSchema, without: Collection[str] = ()) -> Answer:
    """Read one table of several runs. Return all rows in one frame, with the additional first column ``run_id``.

    Args:
        paths: pairs ``(run id, path of the run's table)``. A missing file is skipped. A file that cannot be read, or
            does not fit ``schema``, is skipped with a note.
        schema: schema of the tables.
        without: columns to leave out.
    """
    empty = pl.DataFrame(schema=column_types(schema)).drop(without, strict=False)
    frames = [empty.select(pl.lit("").alias("run_id"), pl.all()).clear()]
    notes = []
    for run_id, path in paths:
        if path.is_file():
            try:
                frame = read_table(path, schema, without)
                frames.append(frame.select(pl.lit(run_id).alias("run_id"), pl.all()))
            except DataError as error:
                notes.append(f"{path_to_text(path)} was left out: {error}")
    return Answer(pl.concat(frames), tuple(notes))


# --- The state of a run and its tasks, also after their process has died

GONE = "stopped without a word"  # the process died before it could record a state


def run_status(run: RunPaths) -> dict[str, Any]:
    """Return the content of ``status.json``, corrected for processes that have died.

    A working process holds a lock. If a run or stage is recorded as ``running`` but no process holds its lock, the
    process has died. The state in the result is then ``GONE``.

    The entry ``stages`` of the result is always a dict. It maps the key of a stage (its name, and its fold if it has
    one) to the stage's record.
    """
    status = read_json_object(run.status_json)
    stages = {key: stage for key, stage in as_mapping(status.get("stages")).items() if isinstance(stage, dict)}
    status["stages"] = stages
    states = [stage.get("state") for stage in stages.values()]
    if "running" in (status.get("state"), *states):
        whole = is_held(run.root / "run.lock")
        working = [key for key in stages if whole or is_held(run.task_lock(key))]
        for key, stage in stages.items():
            if stage.get("state") == "running" and key not in working:
                stages[key] = {**stage, "state": GONE, "reason": "its process was killed, or the machine stopped"}
        if status.get("state") == "running" and not whole and not working:
            status["state"] = GONE
    return status


def earlier_attempt(run: RunPaths, table: Path) -> str:
    """Return text that says why ``table`` may be outdated. It names the attempt (start of a stage) that wrote it.

    The text is empty if the table is up to date or missing. There are two cases:

    - The stage that writes the table is done. The table counts as outdated if the run has failed since.
    - The stage is not done. The table counts as outdated if it is older than the stage's last start, or if the stage
      has yet to start again.

    The times of files in a copied folder may be wrong. An up-to-date table may then count as outdated.
    """
    status = run_status(run)
    key = next((stage.name for stage in STAGES if table in stage.outputs(run, None)), "")
    stage = status["stages"].get(key, {})
    state = stage.get("state", "interactive")
    if not table.is_file() or state in ("interactive", "by hand"):
        return ""
    if state == "done":
        ended_badly = status.get("state") in ("failed", "interrupted", "requeue", GONE)
        return f"of attempt {stage.get('attempts')} of {key}; the run has failed since" if ended_badly else ""
    written = datetime.datetime.fromtimestamp(table.stat().st_mtime, datetime.UTC)
    if state != "pending" and str(stage.get("started_utc")) <= f"{written:%Y-%m-%dT%H:%M:%SZ}":
        return ""
    return f"of an earlier attempt, written {written:%Y-%m-%d %H:%M} UTC: {key} is {state}"


def failure(status: dict[str, Any]) -> str | None:
    """Return a sentence on the first stage that failed, was interrupted, or whose process died (state ``GONE``).

    Return None if there is no such stage. ``status`` is the outcome of ``run_status``.
    """
    for name, stage in status["stages"].items():
        if stage.get("state") in ("failed", "interrupted", GONE):
            error = as_mapping(stage.get("error"))
            reason = f"{error.get('name')}: {error.get('message')}" if error else stage.get("reason")
            return f"Stage {name} {stage['state']}: {reason or 'no reason recorded'}"
    return None


# --- Parameters


def run_parameters(run: RunPaths) -> dict[str, object]:
    """Return the run's ``params.yaml`` as a dict from name to value. Empty if it is missing or unreadable."""
    try:
        return read_params_file(run.params_yaml) if run.params_yaml.is_file() else {}
    except (FvcError, OSError):
        return {}


def effective_parameters(run: RunPaths) -> dict[str, object]:
    """Return the parameters that the run works with, as a dict from name to value.

    In ``params.yaml``, 0 or an empty text can mean "use the value that the model declares". Such values are replaced by
    the model's. They stay unchanged if the model is a file of the user or cannot be loaded.
    """
    parameters = run_parameters(run)
    with contextlib.suppress(FvcError, ValueError, ImportError):
        parameters |= RunConfig.model_validate(parameters).effective_values()
    return parameters


def run_task(parameters: Mapping[str, object]) -> str:
    """Return the task that the parameters name: ``video`` (the default), ``image`` or ``video_text``."""
    return next((task for task in TASKS if task == parameters.get("task")), DEFAULT_TASK)


def protocol_name(parameters: Mapping[str, object]) -> str:
    """Return the name of a run's protocol, the rule that splits videos into training and test. Default: ``kfold``."""
    return next((name for name in PROTOCOLS if name == parameters.get("protocol")), KFOLD)


def protocol_text(parameters: Mapping[str, object]) -> str:
    """Return the protocol of a run as text, with the corpora that the run only tests on.

    An example is ``cross_corpus, tested on NAME``. For the default protocol ``kfold`` the text is empty.
    """
    name, targets = protocol_name(parameters), parameters.get("target_corpora")
    if name == KFOLD:
        return ""
    tested = ", ".join(map(clean_text, targets)) if isinstance(targets, list | tuple) else ""
    return f"{name}, tested on {tested}" if tested else name


def trial_text(parameters: Mapping[str, object]) -> str:
    """Return text such as ``trial on 20 groups`` if the run is a trial, a run on part of its corpus.

    The parameter ``dev_groups`` is the number of groups. For other runs the text is empty.
    """
    number = parameters.get("dev_groups")
    return f"trial on {count_text(number, 'group')}" if isinstance(number, int) and number > 0 else ""


def model_name(parameters: Mapping[str, object]) -> str | None:
    """Return the name of the run's network, or None if the parameters name none."""
    return as_text(parameters.get(TASKS[run_task(parameters)].network))


def ensemble_text(run: RunPaths) -> str:
    """Return the method and the detectors of an ensemble as text, such as ``mean of frame_cnn + r2plus1d_small``.

    The method says how the scores of the detectors are combined. The text is empty if ``run`` is a single run.
    """
    record = read_json_object(run.root / ENSEMBLE_RECORD)
    names = record.get("detectors")
    return f"{record.get('method')} of {' + '.join(map(clean_text, names))}" if isinstance(names, list) else ""


# --- Corpora


def _recorded_corpus(run: RunPaths) -> tuple[str, str]:
    """Return ``(names, fingerprint)``: the names of a run's corpora, joined by " + ", and a digest of their content.

    Both are text, which is empty if it is not recorded.
    """
    record = read_json_object(run.run_json)
    corpus = {} if document_damage(run.run_json, record) else as_mapping(record.get("corpus"))
    names = " + ".join(map(str, as_list(corpus.get("corpora"))))
    name = names or as_text(corpus.get("name")) or ""
    return name, as_text(corpus.get("fingerprint")) or ""


def corpus_text(run: RunPaths) -> str | None:
    """Return the name of a run's corpus, with the first 12 digits of its fingerprint (digest of its content).

    Text on a trial (a run on part of its corpus) follows. Return None if no corpus is recorded.
    """
    name, fingerprint = _recorded_corpus(run)
    known = f"fingerprint {fingerprint[:12]}" if fingerprint else "not indexed yet"
    trial = trial_text(run_parameters(run))
    return ", ".join(filter(None, (name, known, trial))) if name else None


# --- Names of runs

_MOST_MARKS = 3
# Parameters that ``differing_parameters`` leaves out, because lists of runs show them elsewhere or not at all.
_NO_MARKS = NOT_HASHED | {
    "dev_groups", "corpus", "model", "backbone", "experiment", "task", "protocol", "target_corpora",
}  # fmt: skip


def run_names(runs: Sequence[RunPaths]) -> list[str]:
    """Return a name for each run: its id, or its path if another run has the same id."""
    ids = Counter(root.name for root in {run.root for run in runs})
    return [run.root.name if ids[run.root.name] == 1 else str(run.root) for run in runs]


def differing_parameters(parameters: Mapping[str, object], first: Mapping[str, object]) -> list[str]:
    """Return texts such as ``epochs 7``, one for each of ``parameters`` that has another value in ``first``.

    ``first`` holds the parameters of the run to compare with. Left out are parameters that cannot change a result, and
    those that lists of runs show elsewhere, such as the corpus (``_NO_MARKS``).
    """
    names = [name for name in parameters if name not in _NO_MARKS and parameters[name] != first.get(name)]
    return [f"{name} {clean_text(parameters[name])}" for name in names]


def run_marks(runs: Sequence[RunPaths]) -> list[tuple[str, str, str]]:
    """Return three texts for each run, to tell runs apart in a list: ``(corpus, detector, differences)``.

    - ``corpus``: name of the corpus, with the first six digits of its fingerprint (digest of its content).
    - ``detector``: name of the network, with the protocol if it is not ``kfold``.
    - ``differences``: at most ``_MOST_MARKS`` parameters whose values differ from those of the first run with the same
      task. For a trial (a run on part of its corpus), the text begins with ``trial on 20 groups`` or similar.
    """
    firsts: dict[str, Mapping[str, object]] = {}
    marks = []
    for run in runs:
        parameters = effective_parameters(run)
        differing = differing_parameters(parameters, firsts.setdefault(run_task(parameters), parameters))
        detector = ", ".join(filter(None, (model_name(parameters), protocol_text(parameters))))
        name, fingerprint = _recorded_corpus(run)
        folder = Path(as_text(parameters.get("corpus")) or "").name
        corpus = f"{name} {fingerprint[:6]}".rstrip() or folder
        differences = (trial_text(parameters), *differing[:_MOST_MARKS])
        marks.append((corpus, detector, ", ".join(filter(None, differences))))
    return marks


def run_labels(runs: Sequence[RunPaths]) -> list[str]:
    """Return one line of text for each run: ``corpus · detector · differences · experiment / run_id``.

    ``detector`` is the name of the network. ``differences`` are parameters that differ between the runs, as in
    ``run_marks``. A damaged ``run.json`` is mentioned at the end of the line.
    """
    labels = []
    for run, mark in zip(runs, run_marks(runs), strict=True):
        damaged = "run.json is damaged" if document_damage(run.run_json, read_json_object(run.run_json)) else ""
        where = f"{path_to_text(run.experiment)} / {path_to_text(run.run_id)}"
        labels.append(" · ".join(filter(None, (*mark, where, damaged))))
    return labels
