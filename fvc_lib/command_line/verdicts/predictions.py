"""``predict`` for models that give classes, numbers, captions or nearest texts instead of verdicts."""

import base64
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import polars as pl

from fvc_lib.services.atomic_files import path_to_text, write_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.tasks import PREDICTIONS

if TYPE_CHECKING:
    from fvc_lib.tasks.predicting import Finding, OneNetwork
    from fvc_lib.video.clips.store import Pixels

CSV, LINES, PAGE = FILES = ("predictions.csv", "predictions.jsonl", "predictions.html")
_SHOWN = 20


def predict_files(
    predictor: "OneNetwork",
    files: Sequence[Path],
    folder: Path,
    find: "Callable[[list[Path]], Generator[Finding]]",
) -> None:
    """Predict for ``files``, write two tables and a page (``FILES``) into ``folder``, and print the first answers.

    A journal in ``folder`` stores the findings on a file at once, so that a later call can continue a killed one. The
    journals of shards (shares of the files that other processes handled) are merged into this journal.

    Args:
        predictor: the model.
        files: absolute paths of the files, without duplicates.
        folder: the folder for everything that is written.
        find: the function that ``finder`` returns.

    Raises:
        DataError: no file could be read; the tables and the page are written nevertheless.
        FvcError: as in ``Predictor.findings``.
        OSError: the folder cannot be written.
    """
    from fvc_lib.analysis.figures.gallery import Card  # torch and plotly take seconds to load
    from fvc_lib.analysis.pages.answers import MOST_CARDS, write_predictions_page
    from fvc_lib.analysis.wording import clean_text, count_text
    from fvc_lib.services.tables import csv_for_people
    from fvc_lib.tasks.journal import Journal, found_in_blocks, take_in
    from fvc_lib.tasks.predicting import Finding

    word, worth, notes = predictor.file_word, predictor.standing.sentences, (*predictor.cautions, *predictor.notes)
    rows, lines, cards, num_resumed = list[dict[str, Any]](), [*worth], list[Card](), 0
    take_in(folder, PREDICTIONS)
    hidden = not sys.stdout.isatty()
    with (
        closing(Journal(folder, predictor.identity, Finding)) as journal,
        click.progressbar(length=len(files), label=f"{word}s", hidden=hidden) as bar,
    ):
        for findings, resumed in found_in_blocks(journal, files, find, lambda done, _: bar.update(done - bar.pos)):
            num_resumed += resumed
            for finding in findings:
                row = _row(finding, predictor)
                rows.append(row)
                if len(rows) <= _SHOWN:
                    answer = "; ".join((finding.title, *finding.lines)) or "-"
                    lines.append(f"{finding.path}: {answer} {row['remarks']}")
                if not finding.failure and len(rows) <= MOST_CARDS:
                    picture = base64.b64decode(finding.picture) if finding.picture else None
                    below = (Path(finding.path).name, *finding.lines, row["remarks"])
                    cards.append(Card(picture, f"{word} {finding.path}", finding.title, tuple(filter(None, below))))
    texts = dict.fromkeys(("path", "sha256", "part"), pl.String())
    schema = texts | dict(predictor.columns) | dict.fromkeys(("remarks", "failure"), pl.String())
    table = pl.DataFrame(rows, schema=schema, orient="row")
    write_text(folder / CSV, csv_for_people(table))
    write_text(folder / LINES, table.write_ndjson())
    failures = table.drop_nulls("failure").select("path", "failure").rows()
    num_read, num_known = len(files) - len(failures), table["part"].count()
    counts = f"{num_read:,} read, {len(failures):,} not; {num_known:,} of them are the run's"
    summary = f"{count_text(len(files), word)}: {counts}."
    write_predictions_page(
        folder / PAGE, f"Predictions by {predictor.name}", summary, (*worth, *notes), cards, num_read, failures,
        is_shown=predictor.standing.standing == "above control",
    )  # fmt: skip
    if len(files) > _SHOWN:
        lines.append(f"and {len(files) - _SHOWN:,} more")
    if num_resumed:
        lines.append(f"{count_text(num_resumed, word)} answered by an earlier call")
    for line in (*lines, *notes):
        click.echo(f"  {clean_text(line)}")
    click.echo(f"  page          {folder / PAGE}\n  tables        {folder}")
    if not num_read:
        raise DataError(f"of {count_text(len(files), word)} none could be read; the reasons: {folder / PAGE}")


def finder(
    predictor: "OneNetwork", files: Sequence[Path], workers: int
) -> "Callable[[list[Path]], Generator[Finding]]":
    """Return a function that takes a list of paths, and yields the finding (the answer) on each file.

    Args:
        predictor: the model.
        files: all files of the call. The page shows the first ``MOST_CARDS``, so findings on these have a picture.
        workers: number of processes that decode; 0: one per core.
    """
    from fvc_lib.analysis.figures.gallery import strip, thumbnail
    from fvc_lib.analysis.pages.answers import MOST_CARDS

    shown = {path_to_text(path) for path in files[:MOST_CARDS]}

    def picture(path: str, seen: "Pixels") -> str:
        if path not in shown:
            return ""
        made = strip(seen) if seen.ndim == 4 else thumbnail(seen.transpose(1, 2, 0))
        return base64.b64encode(made).decode()

    return lambda some: predictor.findings(some, workers=workers, picture=picture)


def _row(finding: "Finding", predictor: "OneNetwork") -> dict[str, Any]:
    """Return the table row of a finding.

    Its columns are ``path sha256 part``, then the predictor's columns, then ``remarks failure``. ``part`` is ``train``,
    ``validation`` or ``test`` for a file of the run, else None.
    """
    from fvc_lib.tasks.predicting import PART_SENTENCES

    part = predictor.known.get(finding.sha256)
    remarks = finding.failure or PART_SENTENCES.get(part or "", "")
    row = {"path": finding.path, "sha256": finding.sha256 or None, "part": part}
    return row | dict(finding.values) | {"remarks": remarks, "failure": finding.failure or None}
