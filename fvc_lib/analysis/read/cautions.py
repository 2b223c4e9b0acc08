"""What a reader must know of a run besides its number: where it is from, how few groups it stands on, what leaked."""

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
# Parameter, value, and what a reader of the number must then know.
_OF_PARAMETERS = (
    ("shuffle_labels", True, "Labels were shuffled by group on purpose: anything but chance would be a leak."),
    ("canonical", True, "Every video was re-encoded by one recipe before it was decoded or measured."),
)


def parameter_cautions(parameters: Mapping[str, object]) -> tuple[str, ...]:
    """What must be known because of how the run was asked for."""
    told = [sentence for name, value, sentence in _OF_PARAMETERS if parameters.get(name) == value]
    if parameters.get("corpus") == "":
        what = TASKS[run_task(parameters)].synthetic
        if not parameters.get("more_corpora"):
            told.insert(0, f"The corpus is synthetic: the number shows that the pipeline works, not how well {what}.")
        else:
            told.insert(
                0, f"Part of the videos is the synthetic sample corpus, which shows nothing of how well {what}."
            )
    rows = parameters.get("rescale")
    if isinstance(rows, int) and rows > 0:
        at = f"{rows} rows and {RESCALE_RATE} frames a second"
        told.append(f"Every video was brought to {at} before it was decoded or measured.")
    return tuple(told)


def trial_caution(parameters: Mapping[str, object]) -> tuple[str, ...]:
    """That a run on a part of its corpus claims nothing; nothing of one on all of it."""
    trial = trial_text(parameters)
    return (f"This is a {trial}: it claims nothing of the corpus.",) if trial else ()


def run_cautions(run: RunPaths) -> tuple[str, ...]:
    """What must be said beside whatever is made of ``run``, on a page, in a table or on a terminal; worst first.

    That it is a trial or damaged, that its audit did not pass, what its official split leaks, and how it was asked for.
    What its number is beside its controls is ``run_headline``'s, which says these too.
    """
    asked = run_parameters(run)
    audit = [f"The leakage audit did not pass: {clean_text(each)}" for each in audit_failures(run)]
    leaks = official_leaks(asked, leakage_audit_of(run).frame)
    mixed = mixed_code(sorted(run.root.glob("checkpoints/fold_*")))
    code = f"The folds were trained by different code: {mixed}." if mixed else ""
    told = (*trial_caution(asked), *run_damage(run.root), *audit, leaks, code, *parameter_cautions(asked))
    return tuple(dict.fromkeys(filter(None, (*told, *of_fake_voices(run)))))


def interval_cautions(value: float | None, low: float | None, high: float | None) -> tuple[str, ...]:
    """Return what to know of a number's interval over groups; nothing where it may be taken as it stands."""
    if low is None or high is None:
        return ()
    if low == high:
        return ("An interval without width is no certainty: no draw of these groups changes the number, others may.",)
    if value in (low, high):
        return ("No mistake was seen, so the interval is a one-sided bound: it follows from the number of groups.",)
    return ()


def weaker_than_one_answer(results_frame: pl.DataFrame, operating_point: str = "") -> tuple[str, ...]:
    """Where the model's decisions over all folds are worse than one answer to every video (``tables.RESULTS``).

    ``operating_point`` is named where it is not the usual one, which aims at as many reals as fakes told right.
    """
    at = f" at the operating point {clean_text(operating_point)}" if operating_point not in ("", "best") else ""
    rows = results_frame.filter(scope="all").select("source", "metric", "value").drop_nulls().rows()
    known = {(source, metric): value for source, metric, value in rows}
    told = []
    f1, always_fake = known.get(("model", "f1")), known.get(("constant", "f1"))
    if f1 is not None and always_fake is not None and f1 < always_fake:
        told.append(f"F1 {number_text(f1)}{at} is below that of calling every video fake ({number_text(always_fake)}).")
    accuracy, of_constant = known.get(("model", "accuracy")), known.get(("constant", "accuracy"))
    if accuracy is not None and of_constant is not None:
        one_label = max(of_constant, 1 - of_constant)  # the constant control gives one answer, which may be the rarer
        if accuracy < one_label:
            usual = f"always giving the more frequent label ({number_text(one_label)})"
            told.append(f"Accuracy {number_text(accuracy)}{at} is below that of {usual}.")
    return tuple(told)


def of_fake_voices(run: RunPaths) -> tuple[str, ...]:
    """That audio is not judged, of a corpus that says of some videos that theirs is fake."""
    index = read_tables([(path_to_text(run.run_id), run.index)], INDEX, without=["perceptual_hash"]).frame
    fake_voices = index.filter(pl.col("attributes").str.json_path_match("$.audio").str.to_lowercase() == "fake")
    if fake_voices.is_empty():
        return ()
    real = fake_voices.filter(label="real").height
    told = f"Audio is not judged: {count_text(fake_voices.height, 'video')} of the corpus have a fake voice"
    return (f"{told}; {real} of them count as real, because what is seen is." if real else f"{told}.",)


def untested_classes(run: RunPaths) -> tuple[str, ...]:
    """The classes of the run's images of which none was tested, in a sentence; nothing where there are none."""
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
    """The run's LEAKAGE_AUDIT, without rows where there is none."""
    return read_tables([(path_to_text(run.run_id), run.leakage_audit)], LEAKAGE_AUDIT)


def audit_failures(run: RunPaths) -> list[str]:
    """The findings of the run's leakage audit that did not pass, or why it cannot be read."""
    audit = leakage_audit_of(run)
    return [*audit.notes, *audit.frame.filter(~pl.col("passed").fill_null(value=True))["finding"]]


def audit_facts(run: RunPaths) -> tuple[tuple[str, str], ...]:
    """For the head of a report: how many of a run's checks for leaks passed; nothing where none are recorded."""
    judged = leakage_audit_of(run).frame.filter(pl.col("passed").is_not_null())
    if judged.is_empty():
        return ()
    passed = int(judged["passed"].sum())
    return (("Leakage audit", f"{passed} of {count_text(judged.height, 'check')} passed"),)
