"""The files of a run that MLflow keeps: the report with its figures, the results as tables, and the record."""

from __future__ import annotations

import polars as pl

from fvc_lib.analysis.records import Answer, read_tables
from fvc_lib.analysis.wording import bytes_text
from fvc_lib.services import tables
from fvc_lib.services.redaction import Redactor
from fvc_lib.services.run_paths import RunPaths

# A report of five folds is 6 MB, plotly with it.
LARGEST_BYTES = 64_000_000

Artifacts = dict[str, bytes]


def run_artifacts(
    run: RunPaths, results: Answer, predictions: Answer, task_results: Answer
) -> tuple[Artifacts, tuple[str, ...]]:
    """Content by path, and what was left out. Tables are CSV, which MLflow's pages show as tables."""
    files = {
        "report.html": run.report_html,
        "params.yaml": run.params_yaml,
        "run.json": run.run_json,
        "status.json": run.status_json,
        "code.patch": run.code_patch,
    }
    slices = read_tables([("", run.slices)], tables.SLICES)
    audit = read_tables([("", run.leakage_audit)], tables.LEAKAGE_AUDIT)
    frames = {
        "kfold_results": results, "task_results": task_results, "predictions": predictions, "slices": slices,
        "leakage_audit": audit,
    }  # fmt: skip
    found: Artifacts = {}
    notes = [note for answer in (task_results, predictions, slices, audit) for note in answer.notes]
    for name, path in files.items():
        if path.is_file():
            notes += _keep(found, name, _without_secrets(path.read_bytes()))
    for name, answer in frames.items():
        if not answer.frame.is_empty():
            notes += _keep(found, f"tables/{name}.csv", _csv(answer.frame))
    if "report.html" not in found and not run.report_html.is_file():
        notes.append("There is no report.html yet: `run_notebooks.py report` writes it; export again after it.")
    return found, tuple(notes)


def fold_artifacts(run: RunPaths, fold: int) -> tuple[Artifacts, tuple[str, ...]]:
    """What a fold's training found, if it is finished."""
    found: Artifacts = {}
    path = run.fold_outcome(fold)
    notes = _keep(found, path.name, _without_secrets(path.read_bytes())) if path.is_file() else []
    return found, tuple(notes)


def _keep(found: Artifacts, name: str, content: bytes) -> list[str]:
    if len(content) > LARGEST_BYTES:
        most = bytes_text(LARGEST_BYTES)
        return [f"{name} was left out: it has {bytes_text(len(content))}, and what is kept has at most {most}."]
    found[name] = content
    return []


def _without_secrets(content: bytes) -> bytes:
    """A run's files hold none of the secrets of the process that wrote them; those of this one may be others."""
    text = content.decode("utf-8", "surrogateescape")
    return Redactor().text(text).encode("utf-8", "surrogateescape")


def _csv(frame: pl.DataFrame) -> bytes:
    return frame.drop("run_id", strict=False).write_csv().encode()
