"""Cautions: sentences that a reader needs next to a run's number, on its data, its intervals and its leaks."""

from collections.abc import Mapping

import polars as pl

from fvc_lib.analysis.read.naming import run_parameters, run_task, trial_text
from fvc_lib.analysis.read.protocols import official_leaks
from fvc_lib.analysis.read.records import Answer, read_tables
from fvc_lib.analysis.wording import clean_text, count_text, number_text
from fvc_lib.services.atomic_files import path_to_text
from fvc_lib.services.code.training_code import mixed_code
from fvc_lib.services.config import RESCALE_RATE
from fvc_lib.services.records.digests import run_damage
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import IMAGES, INDEX, LEAKAGE_AUDIT
from fvc_lib.services.tasks import TASKS

_MOST_CLASSES = 12  # named in a sentence
# Parameter, value and caution.
_OF_PARAMETERS = (
    ("shuffle_labels", True, "Labels were shuffled by group on purpose: anything but chance would be a leak."),
    ("canonical", True, "Every video was re-encoded by one recipe before it was decoded or measured."),
)


def parameter_cautions(parameters: Mapping[str, object]) -> tuple[str, ...]:
    """Return the cautions that follow from the run's parameters."""
    cautions = [sentence for name, value, sentence in _OF_PARAMETERS if parameters.get(name) == value]
    if parameters.get("corpus") == "":
        what, more = TASKS[run_task(parameters)].synthetic, parameters.get("more_corpora")
        whole = "The corpus is synthetic: the number shows that the pipeline works, not how well"
        part = "Part of the videos is the synthetic sample corpus, which shows nothing of how well"
        cautions.insert(0, f"{part if more else whole} {what}.")
    rows = parameters.get("rescale")
    if isinstance(rows, int) and rows > 0:
        size = f"{rows} rows and {RESCALE_RATE} frames a second"
        cautions.append(f"Every video was brought to {size} before it was decoded or measured.")
    return tuple(cautions)


def trial_caution(parameters: Mapping[str, object]) -> tuple[str, ...]:
    """Return the caution of a trial run on part of its corpus; nothing for other runs."""
    trial = trial_text(parameters)
    return (f"This is a {trial}: it claims nothing of the corpus.",) if trial else ()


def run_cautions(run: RunPaths) -> tuple[str, ...]:
    """Return the cautions that belong on every page, table and terminal output of ``run``, worst first.

    They name a trial, damage, failed leakage checks, leaks of the official split, mixed code and parameters.
    ``run_headline`` adds the verdict against the controls.
    """
    asked = run_parameters(run)
    audit = [f"The leakage audit did not pass: {clean_text(finding)}" for finding in audit_failures(run)]
    leaks = official_leaks(asked, leakage_audit_of(run).frame)
    mixed = mixed_code(sorted(run.root.glob("checkpoints/fold_*")))
    code = f"The folds were trained by different code: {mixed}." if mixed else ""
    damage = run_damage(run.root)
    cautions = (*trial_caution(asked), *damage, *audit, leaks, code, *parameter_cautions(asked), *fake_voices(run))
    return tuple(dict.fromkeys(filter(None, cautions)))


def interval_cautions(value: float | None, low: float | None, high: float | None) -> tuple[str, ...]:
    """Return the caution of an interval without width or of a one-sided bound; nothing for other intervals."""
    if low is None or high is None:
        return ()
    if low == high:
        return ("An interval without width is no certainty: no draw of these groups changes the number, others may.",)
    if value in (low, high):
        return ("No mistake was seen, so the interval is a one-sided bound: it follows from the number of groups.",)
    return ()


def weaker_than_one_answer(results_frame: pl.DataFrame, operating_point: str = "") -> tuple[str, ...]:
    """Return cautions where the model's decisions (RESULTS) are worse than one answer to every video.

    They name ``operating_point`` unless it is the default, ``best``.
    """
    at = f" at the operating point {clean_text(operating_point)}" if operating_point not in ("", "best") else ""
    rows = results_frame.filter(scope="all").select("source", "metric", "value").drop_nulls().rows()
    known = {(source, metric): value for source, metric, value in rows}
    cautions = []
    f1, always_fake = known.get(("model", "f1")), known.get(("constant", "f1"))
    if f1 is not None and always_fake is not None and f1 < always_fake:
        cautions.append(
            f"F1 {number_text(f1)}{at} is below that of calling every video fake ({number_text(always_fake)})."
        )
    accuracy, of_constant = known.get(("model", "accuracy")), known.get(("constant", "accuracy"))
    if accuracy is not None and of_constant is not None:
        one_label = max(of_constant, 1 - of_constant)  # the constant control gives one answer, which may be the rarer
        if accuracy < one_label:
            usual = f"always giving the more frequent label ({number_text(one_label)})"
            cautions.append(f"Accuracy {number_text(accuracy)}{at} is below that of {usual}.")
    return tuple(cautions)


def fake_voices(run: RunPaths) -> tuple[str, ...]:
    """Return the caution that audio is not judged, if the corpus marks some of it as fake."""
    index = read_tables([(path_to_text(run.run_id), run.index)], INDEX, without=["perceptual_hash"]).frame
    marked = index.filter(pl.col("attributes").str.json_path_match("$.audio").str.to_lowercase() == "fake")
    if marked.is_empty():
        return ()
    real = marked.filter(label="real").height
    caution = f"Audio is not judged: {count_text(marked.height, 'video')} of the corpus have a fake voice"
    return (f"{caution}; {real} of them count as real, because what is seen is." if real else f"{caution}.",)


def untested_classes(run: RunPaths) -> tuple[str, ...]:
    """Return the caution that names classes without a tested image; nothing if every class has one."""
    images = read_tables([(path_to_text(run.run_id), run.images)], IMAGES).frame.drop_nulls("class_label")
    classes = set(images["class_label"])
    untested = sorted(classes - set(images.filter(part="test")["class_label"]))
    if not untested:
        return ()
    named = ", ".join(map(clean_text, untested[:_MOST_CLASSES]))
    named += f" and {len(untested) - _MOST_CLASSES} more" if len(untested) > _MOST_CLASSES else ""
    were = "was" if len(untested) == 1 else "were"
    caution = (
        f"{len(untested)} of {count_text(len(classes), 'class', 'classes')} {were} never tested ({named}): the number "
        f"is of the other {len(classes) - len(untested)}, and no overall figure is meant."
    )
    return (caution,)


def leakage_audit_of(run: RunPaths) -> Answer:
    """Return the run's LEAKAGE_AUDIT; no rows if there is none."""
    return read_tables([(path_to_text(run.run_id), run.leakage_audit)], LEAKAGE_AUDIT)


def audit_failures(run: RunPaths) -> list[str]:
    """Return the failed findings of the run's leakage audit, and the reason if it cannot be read."""
    audit = leakage_audit_of(run)
    return [*audit.notes, *audit.frame.filter(~pl.col("passed").fill_null(value=True))["finding"]]


def audit_facts(run: RunPaths) -> tuple[tuple[str, str], ...]:
    """Return the number of passed leakage checks as a report's fact; nothing if none is recorded."""
    judged = leakage_audit_of(run).frame.filter(pl.col("passed").is_not_null())
    if judged.is_empty():
        return ()
    passed = int(judged["passed"].sum())
    return (("Leakage audit", f"{passed} of {count_text(judged.height, 'check')} passed"),)
