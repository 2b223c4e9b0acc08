"""What a run says of new files on one offline page: what its numbers are worth first, then file by file."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl
from markupsafe import Markup

from fvc_lib.analysis.figures.gallery import Card, card_html
from fvc_lib.analysis.pages.page import page, render
from fvc_lib.analysis.read.headline import run_headline, run_verdict, task_scores
from fvc_lib.analysis.read.naming import run_parameters, run_task
from fvc_lib.analysis.read.records import read_tables
from fvc_lib.analysis.wording import count_text, interval_text, source_name
from fvc_lib.services.atomic_files import path_to_text, write_text
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import TASK_RESULTS
from fvc_lib.services.tasks import TASKS

MOST_CARDS = 300  # some 5 kB each


def worth_of(run: RunPaths) -> tuple[str, ...]:
    """What the numbers of a run without folds are worth, in sentences: its standing, what to know beside it, and every
    number that a headline could have, with its controls.
    """
    task = run_task(run_parameters(run))
    results = read_tables([(path_to_text(run.run_id), run.task_results)], TASK_RESULTS).frame
    told = list(run_headline(run).sentences)
    for begins, metric, _ in TASKS[task].headline:
        of_metric = results.filter(pl.col("subject").str.starts_with(begins), pl.col("metric").str.starts_with(metric))
        for subject in of_metric["subject"].unique(maintain_order=True):
            found = task_scores(of_metric.filter(pl.col("subject") == subject), task)
            scores = "; ".join(
                f"{source_name(each.source)} {interval_text(each.value, each.low, each.high)}" for each in found.scores
            )
            samples = count_text(found.num_samples or 0, found.measure.one)
            verdict = run_verdict(run, found).sentence
            told.append(f"{found.measure.name} on {samples} of the test part: {scores}. {verdict}")
    return tuple(dict.fromkeys(told))


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
        title: what it is of.
        answer: how many files, in one sentence.
        worth: ``worth_of`` and what else the answers can be held to.
        cards: of the first ``MOST_CARDS`` files that were read.
        num_read: how many that were in all.
        failures: path and reason of those that were not; the first ``MOST_CARDS`` are shown.
        is_shown: whether the run is shown to be above its controls; else that stands out.

    Raises:
        OSError: it cannot be written.
    """
    body = render(
        "predictions.html", title=title, answer=answer, worth=worth, cards=[Markup(card_html(card)) for card in cards],
        more=num_read - len(cards), failures=failures[:MOST_CARDS], more_failures=max(0, len(failures) - MOST_CARDS),
        is_shown=is_shown,
    )  # fmt: skip
    write_text(path, page(title, body))
