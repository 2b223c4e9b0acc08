"""Cautions: sentences that limit what a run's score shows, because of its data, its intervals or its leaks."""

from collections.abc import Mapping, Sequence

import polars as pl

from fvc_lib.analysis.read.naming import (
    TARGET_SCOPE,
    protocol_name,
    protocol_text,
    run_parameters,
    run_task,
    trial_text,
)
from fvc_lib.analysis.read.records import Answer, read_tables
from fvc_lib.analysis.wording import clean_text, count_text, number_text
from fvc_lib.services.atomic_files import path_to_text
from fvc_lib.services.code_versions import mixed_code
from fvc_lib.services.config import RESCALE_RATE
from fvc_lib.services.records.digests import run_damage
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import IMAGES, INDEX, LEAKAGE_AUDIT
from fvc_lib.services.tasks import KFOLD, OFFICIAL, PROTOCOLS, TASKS

_MOST_NAMED = 12  # classes or targets in a sentence
_OFFICIAL_LEAKS = "official_split_leaks"  # of tables.LEAKAGE_AUDIT


def run_cautions(run: RunPaths) -> tuple[str, ...]:
    """Return the cautions that belong on every page, table and terminal output of ``run``, worst first.

    They are about: a trial (a run on part of its corpus), damaged files, failed leakage checks, leaks of the official
    split, folds trained by different code, parameters, and fake voices. The verdict against the controls is not among
    them; see ``headline.run_headline``.
    """
    asked = run_parameters(run)
    audit = [f"The leakage audit did not pass: {clean_text(finding)}" for finding in audit_failures(run)]
    leaks = official_leaks(asked, leakage_audit_of(run).frame)
    mixed = mixed_code(sorted(run.root.glob("checkpoints/fold_*")))
    code = f"The folds were trained by different code: {mixed}." if mixed else ""
    cautions = (trial_caution(asked), *run_damage(run.root), *audit, leaks, code, *parameter_cautions(asked))
    return tuple(dict.fromkeys(filter(None, (*cautions, fake_voices(run)))))


def parameter_cautions(parameters: Mapping[str, object]) -> list[str]:
    """Return cautions that follow from the parameters: synthetic corpus, shuffled labels, re-encoding or rescaling."""
    what, rows = TASKS[run_task(parameters)].synthetic, parameters.get("rescale")
    synthetic = "The corpus is synthetic: the number shows that the pipeline works, not how well"
    if parameters.get("more_corpora"):
        synthetic = "Part of the videos is the synthetic sample corpus, which shows nothing of how well"
    holds = {
        f"{synthetic} {what}.": parameters.get("corpus") == "",
        "Labels were shuffled by group on purpose: anything but chance would be a leak.":
            parameters.get("shuffle_labels") is True,
        "Every video was re-encoded by one recipe before it was decoded or measured.":
            parameters.get("canonical") is True,
        f"Every video was brought to {rows} rows and {RESCALE_RATE} frames a second before it was decoded or measured.":
            isinstance(rows, int) and rows > 0,
    }  # fmt: skip
    return [caution for caution, is_so in holds.items() if is_so]


def trial_caution(parameters: Mapping[str, object]) -> str:
    """Return the caution of a trial (a run on part of its corpus); empty for other runs."""
    trial = trial_text(parameters)
    return f"This is a {trial}: it claims nothing of the corpus." if trial else ""


def interval_cautions(value: float | None, low: float | None, high: float | None) -> tuple[str, ...]:
    """Return a caution if the interval has no width, or if one end equals ``value``; else an empty tuple."""
    if low is not None and low == high:
        return ("An interval without width is no certainty: no draw of these groups changes the number, others may.",)
    if value is not None and value in (low, high):
        return ("No mistake was seen, so the interval is a one-sided bound: it follows from the number of groups.",)
    return ()


def weaker_than_one_answer(results: pl.DataFrame, operating_point: str) -> list[str]:
    """Return cautions if F1 or accuracy of the model is below that of giving every video the same label.

    ``results`` are rows of RESULTS. ``operating_point`` names the rule that chose the thresholds.
    """
    at = "" if operating_point == "best" else f" at the operating point {clean_text(operating_point)}"
    rows = results.filter(scope="all").drop_nulls("value").select("source", "metric", "value").rows()
    known = {(source, metric): value for source, metric, value in rows}
    one_label = known.get(("constant", "accuracy"), 0.0)  # the constant control's answer may be the rarer label
    cautions = []
    for metric, name, floor, answer in (
        ("f1", "F1", known.get(("constant", "f1"), 0.0), "calling every video fake"),
        ("accuracy", "Accuracy", max(one_label, 1 - one_label), "always giving the more frequent label"),
    ):
        value = known.get(("model", metric))
        if value is not None and ("constant", metric) in known and value < floor:
            cautions.append(f"{name} {number_text(value)}{at} is below that of {answer} ({number_text(floor)}).")
    return cautions


def fake_voices(run: RunPaths) -> str:
    """Return the caution that audio is not judged if the index marks the voice of a video as fake; else empty."""
    index = read_tables([(path_to_text(run.run_id), run.index)], INDEX, without=["perceptual_hash"]).frame
    marked = index.filter(pl.col("attributes").str.json_path_match("$.audio").str.to_lowercase() == "fake")
    real = marked.filter(label="real").height
    counted = f"{count_text(marked.height, 'video')} of the corpus have a fake voice; {real} of them count as real"
    return f"Audio is not judged: {counted}, because what is seen is." if marked.height else ""


def untested_classes(run: RunPaths) -> list[str]:
    """Return a caution that names the classes without a test image; an empty list if every class has one."""
    images = read_tables([(path_to_text(run.run_id), run.images)], IMAGES).frame.drop_nulls("class_label")
    classes = set(images["class_label"])
    untested = sorted(classes - set(images.filter(part="test")["class_label"]))
    if not untested:
        return []
    named = _some_of(list(map(clean_text, untested)))
    number = f"{len(untested)} of {count_text(len(classes), 'class', 'classes')}"
    others = f"the number is of the other {len(classes) - len(untested)}, and no overall figure is meant."
    return [f"{number} were never tested ({named}): {others}"]


def _some_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


# --- Protocols: what a number is the mean of, and the leaks of an official split


def protocol_cautions(
    parameters: Mapping[str, object], results: pl.DataFrame, metric: str, corpora: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the caution that explains the protocol and gives the score at each target; empty for ``kfold``.

    Args:
        parameters: parameters of the run.
        results: rows of RESULTS.
        metric: name of the score.
        corpora: all corpora of the run.
    """
    name = protocol_name(parameters)
    if name == KFOLD:
        return ()
    rows = results.filter(pl.col("scope").str.starts_with(TARGET_SCOPE), source="model", metric=metric)
    known = rows.sort("value", "scope", nulls_last=True).select("scope", "value").rows()
    numbers = [f"{clean_text(scope.removeprefix(TARGET_SCOPE))} {number_text(value)}" for scope, value in known]
    counted = f"The number is the plain mean over {count_text(len(numbers), 'target')}, the worst first"
    mean = f" {counted}: {_some_of(numbers)}." if numbers else ""
    text = protocol_text(parameters, corpora)
    return (f"Protocol {text if ' trained on ' in text else f'{name}: {PROTOCOLS[name].meaning}'}.{mean}",)


def official_leaks(parameters: Mapping[str, object], audit: pl.DataFrame) -> str:
    """Return a sentence on the leaks of the official split (the one that the corpus publishes).

    Empty if the run uses another protocol or nothing leaks. ``audit`` holds rows of LEAKAGE_AUDIT.
    """
    if protocol_name(parameters) != OFFICIAL:
        return ""
    rows = audit.filter(check=_OFFICIAL_LEAKS).select("count", "finding").rows()
    if not rows:
        return "What the official split leaks is not recorded."
    return str(rows[0][1]) if rows[0][0] else ""


# --- The leakage audit


def leakage_audit_of(run: RunPaths) -> Answer:
    """Return the run's table LEAKAGE_AUDIT with a ``run_id``; without rows if the run has none."""
    return read_tables([(path_to_text(run.run_id), run.leakage_audit)], LEAKAGE_AUDIT)


def audit_failures(run: RunPaths) -> list[str]:
    """Return the findings of failed leakage checks; if the audit cannot be read, the reason comes first."""
    audit = leakage_audit_of(run)
    return [*audit.notes, *audit.frame.filter(~pl.col("passed").fill_null(value=True))["finding"]]


def audit_facts(run: RunPaths) -> tuple[tuple[str, str], ...]:
    """Return one fact for a report, (name, text), with the number of passed leakage checks; empty without checks."""
    passed = leakage_audit_of(run).frame["passed"].drop_nulls()
    if passed.is_empty():
        return ()
    return (("Leakage audit", f"{passed.sum()} of {count_text(passed.len(), 'check')} passed"),)
