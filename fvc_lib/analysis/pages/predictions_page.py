"""The offline page of a run's answers on new files: how far they can be trusted, then file by file."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl
from markupsafe import Markup

from fvc_lib.analysis.figures.gallery import Card, card_html
from fvc_lib.analysis.pages.page import render, write_page
from fvc_lib.analysis.read.headline import run_headline, run_verdict, task_scores
from fvc_lib.analysis.read.naming import run_parameters, run_task
from fvc_lib.analysis.read.records import read_tables
from fvc_lib.analysis.wording import count_text, interval_text, source_name
from fvc_lib.services.atomic_files import path_to_text
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import TASK_RESULTS
from fvc_lib.services.tasks import TASKS

MOST_CARDS = 300  # some 5 kB each


def worth_of(run: RunPaths) -> tuple[str, ...]:
    """Return sentences on what the numbers of a run without folds are worth.

    They are its standing, its cautions, and every number that a headline could have, with its controls.
    """
    task = run_task(run_parameters(run))
    results = read_tables([(path_to_text(run.run_id), run.task_results)], TASK_RESULTS).frame
    sentences = list(run_headline(run).sentences)
    for begins, metric, _ in TASKS[task].headline:
        rows = results.filter(pl.col("subject").str.starts_with(begins), pl.col("metric").str.starts_with(metric))
        for of_subject in rows.partition_by("subject", maintain_order=True):
            measured = task_scores(of_subject, task)
            scores = [f"{source_name(s.source)} {interval_text(s.value, s.low, s.high)}" for s in measured.scores]
            samples = count_text(measured.num_samples or 0, measured.measure.one)
            verdict = run_verdict(run, measured).sentence
            sentences.append(f"{measured.measure.name} on {samples} of the test part: {'; '.join(scores)}. {verdict}")
    return tuple(dict.fromkeys(sentences))


def write_predictions_page(
    path: Path,
    title: str,
    answer: str,
    worth: Sequence[str],
    cards: Sequence[Card],
    num_read: int,
    failures: Sequence[tuple[str, str]],
    *,
    is_shown: bool,
) -> None:
    """Write the page, whole or not at all.

    Args:
        path: of the page.
        title: plain text.
        answer: the number of files, in one sentence.
        worth: ``worth_of`` and further limits.
        cards: of the first ``MOST_CARDS`` files that were read.
        num_read: number of files that were read.
        failures: path and reason of the others; the first ``MOST_CARDS`` are shown.
        is_shown: whether the run is shown to be above its controls; else an alarm says so.

    Raises:
        OSError: it cannot be written.
    """
    body = render(
        "predictions.html", title=title, answer=answer, worth=worth, cards=[Markup(card_html(card)) for card in cards],
        more=num_read - len(cards), failures=failures[:MOST_CARDS], more_failures=max(0, len(failures) - MOST_CARDS),
        is_shown=is_shown,
    )  # fmt: skip
    write_page(path, title, body)
