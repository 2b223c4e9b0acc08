"""``run_notebooks.py predict`` of a run whose answers are no verdicts: classes, numbers, captions, nearest texts."""

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import polars as pl

from fvc_lib.services.atomic_files import atomic_output, path_to_text
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.run_paths import RunPaths

CSV, LINES, PAGE = FILES = ("predictions.csv", "predictions.jsonl", "predictions.html")
_SHOWN = 20


def predict_files(paths: RunPaths, asked: Sequence[str], folder: Path, workers: int) -> None:
    """Write two tables and the page (``FILES``) into ``folder``, and say the answers.

    Raises:
        UsageError: nothing to predict is named, the run is not finished, or the folder has tables of such names.
        DataError: no file could be read; everything is written.
        FvcError: as ``tasks.predicting.Predictor`` has it.
        OSError: something cannot be written.
    """
    from fvc_lib.analysis.figures.gallery import Card, strip, thumbnail  # torch and plotly take seconds to load
    from fvc_lib.analysis.pages.predictions_page import MOST_CARDS, worth_of, write_predictions_page
    from fvc_lib.analysis.read.headline import run_headline
    from fvc_lib.analysis.wording import clean_text, count_text
    from fvc_lib.tasks.predicting import PART_SENTENCES, predictor_of
    from fvc_lib.tasks.video.verdicts.judging import files_of

    if there := [name for name in FILES if (folder / name).exists()]:
        raise UsageError(f"--out {str(folder)!r}: has {there[0]!r} already. Give a new folder.")
    predictor = predictor_of(paths)
    files = files_of(asked, predictor.kind)
    worth, is_shown = worth_of(paths), run_headline(paths).verdict.standing == "above control"
    one = "picture" if predictor.kind == "image" else "video"
    click.echo(f"model {paths.root}\n{count_text(len(files), one)}")
    for sentence in worth:
        click.echo(f"  {clean_text(sentence)}")

    rows: list[dict[str, Any]] = [{} for _ in files]
    answers, cards = dict[int, str](), dict[int, Card]()
    with (
        click.progressbar(length=len(files), label=one + "s", hidden=not sys.stdout.isatty()) as bar,
        closing(predictor.predictions(files, workers=workers)) as found,
    ):
        for each in found:
            bar.update(1)
            path = path_to_text(files[each.position])
            part = predictor.contents.get(each.content_sha256)
            remarks = [each.failure] if each.failure else [PART_SENTENCES[part]] if part else []
            rows[each.position] = {
                "path": path, "sha256": each.content_sha256 or None, "part": part, **each.values,
                "remarks": " ".join(remarks), "failure": each.failure or None,
            }  # fmt: skip
            said = "; ".join((each.title, *each.lines)) if not each.failure else "-"
            if each.position < _SHOWN:
                answers[each.position] = f"{path}: {clean_text(said)}  {clean_text(' '.join(remarks))}".rstrip()
            if each.seen is not None and len(cards) < MOST_CARDS:
                is_clip = each.seen.ndim == 4
                picture = strip(each.seen) if is_clip else thumbnail(each.seen.transpose(1, 2, 0))
                lines = (files[each.position].name, *each.lines, *remarks)
                cards[each.position] = Card(picture, f"{one} {path}", each.title, lines)

    folder.mkdir(parents=True, exist_ok=True)
    texts = {"path": pl.String(), "sha256": pl.String(), "part": pl.String()}
    schema = texts | dict(predictor.columns) | {"remarks": pl.String(), "failure": pl.String()}
    table = pl.DataFrame(rows, schema=schema, orient="row")
    with atomic_output(folder / CSV) as csv, atomic_output(folder / LINES) as lines_file:
        table.write_csv(csv)
        table.write_ndjson(lines_file)
    failures = [(row["path"], row["failure"]) for row in rows if row["failure"]]
    num_read = len(files) - len(failures)
    known = sum(row["part"] is not None for row in rows)
    told = f"{count_text(len(files), one)}: {num_read:,} read, {len(failures):,} not; {known:,} of them are the run's."
    write_predictions_page(
        folder / PAGE, f"Predictions by {paths.run_id}", told, (*worth, *predictor.notes),
        [cards[place] for place in sorted(cards)], num_read, failures, is_shown=is_shown,
    )  # fmt: skip
    for place in sorted(answers):
        click.echo(f"  {answers[place]}")
    if len(files) > _SHOWN:
        click.echo(f"  and {len(files) - _SHOWN:,} more")
    for sentence in predictor.notes:
        click.echo(f"  {clean_text(sentence)}")
    click.echo(f"  page          {folder / PAGE}\n  tables        {folder}")
    if not num_read:
        raise DataError(f"of {count_text(len(files), one)} none could be read; the reasons: {folder / PAGE}")
