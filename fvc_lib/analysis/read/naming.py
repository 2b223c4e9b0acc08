"""Names of runs: parameters, corpus, detector and the differences from other runs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from fvc_lib.analysis.read.protocols import protocol_text
from fvc_lib.analysis.wording import clean_text, count_text
from fvc_lib.services.atomic_files import as_text, path_to_text, read_json_object
from fvc_lib.services.config import DEFAULTS, NOT_HASHED
from fvc_lib.services.errors import FvcError
from fvc_lib.services.parameters import read_params_file
from fvc_lib.services.records.digests import document_damage
from fvc_lib.services.records.ensembles import RECORD as ENSEMBLE_RECORD
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import DEFAULT_TASK, TASKS


def run_parameters(run: RunPaths) -> dict[str, object]:
    """Return the values of the run's ``params.yaml``; nothing if it is missing or unreadable."""
    if not run.params_yaml.is_file():
        return {}
    try:
        return read_params_file(run.params_yaml)
    except FvcError:
        return {}


def run_task(parameters: Mapping[str, object]) -> str:
    """Return the task that a run's parameters name; video if they name none."""
    task = parameters.get("task")
    return task if isinstance(task, str) and task in TASKS else DEFAULT_TASK


def run_names(runs: Sequence[RunPaths]) -> list[str]:
    """Return a distinct name for each of ``runs``: its id, else experiment and id, else the whole path.

    A run that was copied into another experiment keeps its id; with one name, two runs would count as one.
    """
    roots = {run.root for run in runs}
    ids = Counter(root.name for root in roots)
    names = {root: root.name if ids[root.name] == 1 else f"{root.parent.name}/{root.name}" for root in roots}
    often = Counter(names.values())
    return [names[run.root] if often[names[run.root]] == 1 else str(run.root) for run in runs]


_MOST_MARKS = 3
# These have a place of their own in every list.
_NO_MARKS = frozenset({"dev_groups", "corpus", "model", "backbone", "experiment", "task", "protocol", "target_corpora"})


def run_marks(runs: Sequence[RunPaths]) -> list[tuple[str, str, str]]:
    """Return corpus, detector and differing parameters of each of ``runs``, for a list of them.

    A parameter that can change a number is named where its value is not that of most runs of the task, up to
    ``_MOST_MARKS`` of them. Different corpora of one name carry the beginning of their fingerprints.
    """
    asked = [_readable_parameters(run) for run in runs]
    usual: dict[tuple[str, str], str] = {}
    for task in {run_task(each) for each in asked}:
        of_task = [(run.root.name, place) for place, run in enumerate(runs) if run_task(asked[place]) == task]
        alike = [asked[place] for _, place in sorted(of_task, reverse=True)]  # newest first, however they are listed
        for name in {name for each in alike for name in each}:
            counts = Counter(_value_text(each, name) for each in alike)  # of equally many the newest run's
            usual[task, name] = counts.most_common(1)[0][0]
    marks = []
    corpora = [_corpus_name(run, each) for run, each in zip(runs, asked, strict=True)]
    contents = [_fingerprint(run) for run in runs]
    known: dict[str, set[str]] = {}
    for corpus, content in zip(corpora, contents, strict=True):
        known.setdefault(corpus, set()).update(filter(None, [content]))
    for each, corpus, content in zip(asked, corpora, contents, strict=True):
        named = [name for name in each if name not in _NO_MARKS and name not in NOT_HASHED]
        own = [trial] if (trial := trial_text(each)) else []
        own += [f"{name} {each[name]}" for name in named if _value_text(each, name) != usual[run_task(each), name]]
        more = f", {len(own) - _MOST_MARKS} more" if len(own) > _MOST_MARKS else ""
        shown = f"{corpus} {content[:6]}" if content and corpus and len(known[corpus]) > 1 else corpus
        by = ", ".join(filter(None, (model_name(each), protocol_text(each))))
        marks.append((shown, by, ", ".join(own[:_MOST_MARKS]) + more))
    return marks


def _value_text(parameters: Mapping[str, object], name: str) -> str:
    """Return a parameter's value as text; the default of one that the record lacks."""
    return str(parameters.get(name, DEFAULTS.get(name)))


def run_labels(runs: Sequence[RunPaths]) -> list[str]:
    """Return one line for each run: ``corpus · detector · what differs · experiment / run_id``, and damage."""
    labels = []
    for run, mark in zip(runs, run_marks(runs), strict=True):
        damaged = "" if _record(run) or not run.run_json.exists() else f"{run.run_json.name} is damaged"
        where = f"{path_to_text(run.experiment)} / {path_to_text(run.run_id)}"
        labels.append(" · ".join(filter(None, (*mark, where, damaged))))
    return labels


def corpus_text(run: RunPaths) -> str | None:
    """Return the name of a run's corpus with the beginning of its fingerprint; None if none is recorded."""
    name, fingerprint = _recorded_name(_recorded_corpus(run)), _fingerprint(run)
    if not name:
        return None
    trial = trial_text(run_parameters(run))
    known = f"fingerprint {fingerprint[:12]}" if fingerprint else "not indexed yet"
    return ", ".join(filter(None, (name, known, trial)))


def model_name(asked: Mapping[str, object]) -> str | None:
    """Return the network of the run's task, and whether its text encoder is from outside."""
    model = as_text(asked.get(TASKS[run_task(asked)].network))
    foreign = run_task(asked) == "video_text" and asked.get("text_encoder") not in (None, "own")
    return f"{model} with a text encoder from outside" if model and foreign else model


def ensemble_text(run: RunPaths) -> str:
    """Return ``mean of frame_cnn + r2plus1d_small`` for an ensemble's folder; empty for a run."""
    record = read_json_object(run.root / ENSEMBLE_RECORD)
    names = record.get("detectors")
    return f"{record.get('method')} of {' + '.join(map(clean_text, names))}" if isinstance(names, list) else ""


def trial_text(parameters: Mapping[str, object]) -> str:
    """Return ``trial on 20 groups`` for a run on part of its corpus (``dev_groups``); empty for other runs."""
    number = parameters.get("dev_groups")
    return f"trial on {count_text(number, 'group')}" if isinstance(number, int) and number > 0 else ""


def _readable_parameters(run: RunPaths) -> dict[str, object]:
    try:
        return run_parameters(run)
    except (OSError, ValueError, RecursionError):  # that run's own row says so
        return {}


def _corpus_name(run: RunPaths, parameters: Mapping[str, object]) -> str:
    """Return the recorded name of the corpus, else the last part of its path, else an empty text."""
    path = parameters.get("corpus")
    return _recorded_name(_recorded_corpus(run)) or (Path(path).name if isinstance(path, str) and path else "")


def _record(run: RunPaths) -> dict[str, object]:
    """Return ``run.json``; nothing if it is missing, damaged or unreadable."""
    record = read_json_object(run.run_json)
    return {} if document_damage(run.run_json, record) else record


def _recorded_corpus(run: RunPaths) -> dict[str, object]:
    recorded = _record(run).get("corpus")
    return recorded if isinstance(recorded, dict) else {}


def recorded_corpora(run: RunPaths) -> list[str]:
    """Return the names of the corpora in the run's index; nothing before there is an index."""
    corpora = _recorded_corpus(run).get("corpora")
    return list(map(str, corpora)) if isinstance(corpora, list) else []


def _recorded_name(recorded: Mapping[str, object]) -> str | None:
    """Return the names of the corpora in the index; before there is one, the name recorded at the start."""
    corpora, name = recorded.get("corpora"), as_text(recorded.get("name"))
    if not isinstance(corpora, list) or not corpora or recorded.get("listing_sha256") == "":
        return name
    return " + ".join(map(str, corpora))


def _fingerprint(run: RunPaths) -> str:
    return as_text(_recorded_corpus(run).get("fingerprint")) or ""
