"""What is said of a run in words: its standing beside its controls, its code and its machine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import escape
from typing import Any

import polars as pl

from fvc_lib.analysis.headline import ReportHeadline, Score
from fvc_lib.analysis.wording import clean_text, interval_text, metric_name, source_name
from fvc_lib.services.redaction import Redactor

# Within a line; no text from outside stands at the beginning of one, where more has a meaning.
_MARKDOWN = re.compile(r"([\\`*_\[\]|~$])")


def stored_text(value: object) -> str:
    r"""``value`` as it is stored: JSON unless it is a text, no secrets, nothing that a database refuses.

    Lone surrogates are no UTF-8, and PostgreSQL refuses NUL: they stand there as ``\udcXX`` and ``\x00``.
    """
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    shown = Redactor().text(text).encode("utf-8", "backslashreplace").decode()
    return shown.replace("\x00", "\\x00")


def run_tags(headline: ReportHeadline, record: Mapping[str, Any], table: pl.DataFrame) -> dict[str, str]:
    """Tags of the whole run; ``mlflow.note.content`` is what MLflow shows above it, as Markdown."""
    attempts = record.get("attempts")
    last = _object(attempts[-1]) if isinstance(attempts, list) and attempts else {}
    code = _object(last.get("code"))
    found: dict[str, object] = {
        "mlflow.note.content": _note(headline, table),
        "mlflow.source.name": "run_notebooks.py",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": code.get("commit"),
        "mlflow.source.git.branch": code.get("branch"),
        "fvc.state": headline.state,
        "fvc.standing": headline.verdict.standing,
        "fvc.verdict": headline.verdict.sentence,
        "fvc.caution": " ".join(headline.cautions),
        "fvc.failure": headline.failure,
        f"fvc.num_{headline.measure.one}s": headline.num_samples,
        "fvc.num_groups": headline.num_groups,
        "fvc.attempts": len(attempts) if isinstance(attempts, list) else None,
        "fvc.code_changed_since_commit": code.get("changed_since_commit"),
        "fvc.forked_from": record.get("forked_from"),
        "fvc.config_hash": record.get("config_hash"),
        **_hardware(_object(last.get("hardware"))),
    }
    return {name: stored_text(value) for name, value in found.items() if value not in (None, "", [])}


def scores_text(headline: ReportHeadline) -> str:
    """The model's number with its interval, in words."""
    score = headline.model_score
    return (
        "not recorded"
        if score is None
        else f"{headline.measure.name} {interval_text(score.value, score.low, score.high)}"
    )


def as_markdown(text: str) -> str:
    """``text`` such that Markdown and the HTML within it show it as it is."""
    return _MARKDOWN.sub(r"\\\1", escape(clean_text(text), quote=False))


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _hardware(hardware: dict[str, Any]) -> dict[str, object]:
    names = ("host", "processor", "cores", "machine", "memory_bytes", "gpus")
    return {f"fvc.hardware.{name}": hardware[name] for name in names if hardware.get(name)}


def _note(headline: ReportHeadline, table: pl.DataFrame) -> str:
    """The verdict, what to know about it, and the numbers beside their controls."""
    lines = [f"**{as_markdown(headline.verdict.standing)}**: {as_markdown(headline.verdict.sentence)}"]
    lines += [as_markdown(caution) for caution in headline.cautions]
    if headline.failure:
        lines.append(as_markdown(headline.failure))
    if headline.scores:
        rows = "".join(map(_score_row, headline.scores))
        lines.append(f"| Scored by | {as_markdown(headline.measure.name)} with interval |\n| --- | --- |\n{rows}")
    others = table.filter((pl.col("scope") == "all") & (pl.col("source") == "model") & (pl.col("metric") != "roc_auc"))
    if not others.is_empty():
        rows = "".join(
            f"| {as_markdown(metric_name(row['metric']))} | {interval_text(row['value'], row['low'], row['high'])} |\n"
            for row in others.iter_rows(named=True)
        )
        lines.append(f"| Model, over all folds | with interval |\n| --- | --- |\n{rows}")
    if headline.measure.remark:
        lines.append(headline.measure.remark)
    return "\n\n".join(lines)


def _score_row(score: Score) -> str:
    number = interval_text(score.value, score.low, score.high)
    return f"| {as_markdown(source_name(score.source))} | {number} |\n"
