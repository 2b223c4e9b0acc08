"""Names of runs for readers: parameters, corpus, detector, protocol and the differences from other runs.

A protocol is the rule that splits videos into training and test, such as ``kfold`` or ``cross_corpus``.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from fvc_lib.analysis.wording import clean_text, count_text
from fvc_lib.services.atomic_files import as_mapping, as_text, path_to_text, read_json_object
from fvc_lib.services.config import NOT_HASHED
from fvc_lib.services.errors import FvcError
from fvc_lib.services.parameters import read_params_file
from fvc_lib.services.records.digests import document_damage
from fvc_lib.services.records.ensembles import RECORD as ENSEMBLE_RECORD
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import DEFAULT_TASK, KFOLD, PROTOCOLS, TASKS

TARGET_SCOPE = "target:"  # of tables.RESULTS
_MOST_MARKS = 3
# These have a place of their own in every list.
_NO_MARKS = frozenset({"dev_groups", "corpus", "model", "backbone", "experiment", "task", "protocol", "target_corpora"})


def run_parameters(run: RunPaths) -> dict[str, object]:
    """Return the values of the run's ``params.yaml`` by name; empty if it is missing or unreadable."""
    try:
        return read_params_file(run.params_yaml) if run.params_yaml.is_file() else {}
    except (FvcError, OSError):
        return {}


def run_task(parameters: Mapping[str, object]) -> str:
    """Return the task that the parameters name (``video``, ``image`` or ``video_text``); by default ``video``."""
    task = parameters.get("task")
    return task if isinstance(task, str) and task in TASKS else DEFAULT_TASK


def protocol_name(parameters: Mapping[str, object]) -> str:
    """Return the protocol of a run; ``kfold`` if its parameters name none."""
    name = parameters.get("protocol")
    return name if isinstance(name, str) and name in PROTOCOLS else KFOLD


def protocol_text(parameters: Mapping[str, object], corpora: Sequence[str] = ()) -> str:
    """Return the protocol of a run as text; empty for ``kfold``.

    If the protocol has targets (corpora that are only tested on), they follow. ``corpora`` are all corpora of the run;
    those that are no target follow as "trained on".
    """
    name, targets = protocol_name(parameters), parameters.get("target_corpora")
    if name == KFOLD:
        return ""
    tested = [str(target) for target in targets] if isinstance(targets, list | tuple) else []
    known = {_letters_of(corpus) for corpus in tested}
    trained = [corpus for corpus in corpora if tested and _letters_of(corpus) not in known]
    parts = ((trained, "trained on"), (tested, "tested on"))
    return ", ".join([name, *(f"{use} {', '.join(map(clean_text, names))}" for names, use in parts if names)])


def _letters_of(name: str) -> str:
    """Return a corpus's name in lower case without punctuation; ``cross_corpus`` compares names in this form."""
    return "".join(filter(str.isalnum, name.lower())) or name


def run_names(runs: Sequence[RunPaths]) -> list[str]:
    """Return a name for each run: its id, or its path if another run has the same id."""
    ids = Counter(root.name for root in {run.root for run in runs})
    return [run.root.name if ids[run.root.name] == 1 else str(run.root) for run in runs]


def run_marks(runs: Sequence[RunPaths]) -> list[tuple[str, str, str]]:
    """Return for each run three texts: its corpus, its detector, and the parameters in which it differs.

    The third text names at most ``_MOST_MARKS`` parameters that can change a number. A parameter is named if its value
    is not the most frequent one among the runs of the same task. If two corpora share a name, the beginning of the
    fingerprint is added.
    """
    asked = [run_parameters(run) for run in runs]
    values: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for _, parameters in sorted(zip((run.root.name for run in runs), asked, strict=True), key=lambda pair: pair[0]):
        for name, value in parameters.items():
            values[run_task(parameters), name].insert(0, str(value))  # of equally frequent values the newest run's
    usual = {key: Counter(known).most_common(1)[0][0] for key, known in values.items()}
    recorded = [_recorded_corpus(run) for run in runs]
    contents: defaultdict[str | None, set[object]] = defaultdict(set)
    for corpus in recorded:
        contents[_corpus_name(corpus)].add(corpus.get("fingerprint") or "")
    marks = []
    for parameters, corpus in zip(asked, recorded, strict=True):
        shown, task = _corpus_name(corpus) or "", run_task(parameters)
        if shown and len(contents[shown] - {""}) > 1:
            shown = f"{shown} {as_text(corpus.get('fingerprint')) or '':.6}".rstrip()
        own = [trial] if (trial := trial_text(parameters)) else []
        named = [field for field in parameters if field not in _NO_MARKS and field not in NOT_HASHED]
        own += [f"{field} {parameters[field]}" for field in named if str(parameters[field]) != usual[task, field]]
        more = f", {len(own) - _MOST_MARKS} more" if len(own) > _MOST_MARKS else ""
        detector = ", ".join(filter(None, (model_name(parameters), protocol_text(parameters))))
        place = parameters.get("corpus")
        shown = shown or (Path(place).name if isinstance(place, str) else "")
        marks.append((shown, detector, ", ".join(own[:_MOST_MARKS]) + more))
    return marks


def run_labels(runs: Sequence[RunPaths]) -> list[str]:
    """Return one line for each run: ``corpus · detector · differences · experiment / run_id``.

    A damaged ``run.json`` is mentioned at the end.
    """
    labels = []
    for run, mark in zip(runs, run_marks(runs), strict=True):
        damaged = "run.json is damaged" if document_damage(run.run_json, read_json_object(run.run_json)) else ""
        where = f"{path_to_text(run.experiment)} / {path_to_text(run.run_id)}"
        labels.append(" · ".join(filter(None, (*mark, where, damaged))))
    return labels


def corpus_text(run: RunPaths) -> str | None:
    """Return the name of a run's corpus with the first 12 digits of its fingerprint; None if no corpus is recorded."""
    recorded = _recorded_corpus(run)
    name, fingerprint = _corpus_name(recorded), as_text(recorded.get("fingerprint"))
    if not name:
        return None
    known = f"fingerprint {fingerprint[:12]}" if fingerprint else "not indexed yet"
    return ", ".join(filter(None, (name, known, trial_text(run_parameters(run)))))


def model_name(parameters: Mapping[str, object]) -> str | None:
    """Return the name of the run's network; a text encoder that is not the project's own is mentioned.

    None if the parameters name no network.
    """
    task = run_task(parameters)
    model = as_text(parameters.get(TASKS[task].network))
    foreign = task == "video_text" and parameters.get("text_encoder") not in (None, "own")
    return f"{model} with a text encoder from outside" if model and foreign else model


def ensemble_text(run: RunPaths) -> str:
    """Return method and detectors of an ensemble, such as ``mean of frame_cnn + r2plus1d_small``; empty for a run."""
    record = read_json_object(run.root / ENSEMBLE_RECORD)
    names = record.get("detectors")
    return f"{record.get('method')} of {' + '.join(map(clean_text, names))}" if isinstance(names, list) else ""


def trial_text(parameters: Mapping[str, object]) -> str:
    """Return text such as ``trial on 20 groups`` for a run on part of its corpus (``dev_groups``); else empty."""
    number = parameters.get("dev_groups")
    return f"trial on {count_text(number, 'group')}" if isinstance(number, int) and number > 0 else ""


def recorded_corpora(run: RunPaths) -> list[str]:
    """Return the names of the corpora in the run's index; empty while there is no index."""
    corpora = _recorded_corpus(run).get("corpora")
    return list(map(str, corpora)) if isinstance(corpora, list) else []


def _recorded_corpus(run: RunPaths) -> Mapping[str, object]:
    record = read_json_object(run.run_json)
    return {} if document_damage(run.run_json, record) else as_mapping(record.get("corpus"))


def _corpus_name(recorded: Mapping[str, object]) -> str | None:
    """Return the names of the corpora in the index, joined by " + ".

    While there is no index, return the name that was recorded when the run began; None if there is none.
    """
    corpora = recorded.get("corpora")
    if not isinstance(corpora, list) or not corpora or recorded.get("listing_sha256") == "":
        return as_text(recorded.get("name"))
    return " + ".join(map(str, corpora))
