"""``run_notebooks.py audit``: check what a table of scores, of any detectors, shows about these detectors."""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from fvc_lib.analysis.wording import count_text
from fvc_lib.command_line.records import execute_record
from fvc_lib.services.atomic_files import sha256_of_file, sha256_of_json
from fvc_lib.services.config_fields import split_names, split_pairs
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.tar_patterns import is_pattern
from fvc_lib.services.tasks import SCORE_AUDIT

_SHOWN_DETECTORS = 8


@click.command(short_help="Audit anyone's scores: numbers with intervals, controls, floors, slices, thresholds.")
@click.argument("table", type=click.Path(path_type=Path))
@click.option(
    "--corpus", type=click.Path(path_type=Path),
    help="The videos, as -p corpus of a run: gives groups, near-duplicates, and the metadata and clip length controls.",
)  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), help="Folder for all of it; else runs/audits/NAME_TIME_HASH.")
@click.option("--label-map", metavar="PAIRS", help="What labels other than real and fake mean: 1=fake,0=real.")
@click.option("--allow-outside", is_flag=True, help="Take files that the corpus lists outside its folder, as runs do.")
@click.option("--detectors", metavar="NAMES", help="Only these, with commas between them; else all in the table.")
@click.option("--higher-is-real", is_flag=True, help="The scores are higher for reals; their sign is changed.")
@click.option(
    "--operating-point", "decide_at", default="best", show_default=True,
    metavar="best|fpr=0.01|cost=5:1|threshold=0.5",
    help="Where decisions are made: the highest balanced accuracy, a share of false alarms, what a false alarm and a "
    "miss cost (these three are chosen on one half of the groups for the other), or a threshold that comes with the "
    "scores.",
)  # fmt: skip
@click.option(
    "--replicates", type=click.IntRange(min=100), default=1000, show_default=True, help="Half-samples of the groups."
)
@click.option("--confidence", type=click.FloatRange(0.5, 1, min_open=True, max_open=True), default=0.95,
              show_default=True, help="Coverage of every interval.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Of replicates, halves and shuffled labels.")
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Runs folder, where it is not the default.")
@click.pass_context
def audit(
    context: click.Context,
    table: Path,
    corpus: Path | None,
    out: Path | None,
    label_map: str | None,
    allow_outside: bool,
    detectors: str | None,
    higher_is_real: bool,
    decide_at: str,
    replicates: int,
    confidence: float,
    seed: int,
    runs_dir: Path | None,
) -> None:
    """Audit TABLE, scores of any detectors: CSV, TSV or Parquet with a row per video.

    \b
    video,label,group,generator,score              one detector
    video,label,group,generator,det_a,det_b        a column per detector; a cell may be empty
    video,label,detector,score                     a row per video and detector

    'video' is an id or a path; labels are real and fake; group (of videos that belong together), generator,
    real_source and corpus may be missing; the audit then names what it cannot show. Higher scores mean fake.

    \b
    python run_notebooks.py audit scores.csv
    python run_notebooks.py audit scores.csv --corpus ~/videos --operating-point fpr=0.01
    python run_notebooks.py audit vendor.tsv --label-map 1=fake,0=real --out audit_of_vendor

    Written: audit.html (opens offline), tables as CSV and LaTeX, and notebook 40_score_audit as executed.
    """  # noqa: D301 - click wants the backspace character itself before lines it shall not re-wrap
    from fvc_lib.analysis.audit.findings import ANSWER, FILES
    from fvc_lib.analysis.audit.numbers import settings

    settings(decide_at)
    meaning = split_pairs(label_map or {})
    if not isinstance(meaning, dict) or not set(meaning.values()) <= {"real", "fake"}:
        raise UsageError(f"--label-map: got {label_map!r}, wanted such as 1=fake,0=real.")
    names = list(split_names(detectors or ""))
    click.echo(_what_was_read(table, meaning, names, higher_is_real, has_corpus=corpus is not None))
    if corpus is not None and not corpus.exists() and not is_pattern(corpus):
        raise UsageError(f"--corpus {str(corpus)!r}: no such file or folder.")
    folder_of_runs = runs_dir or Path(resolve_config().runs_dir)
    parameters: dict[str, Any] = {
        "score_table": str(table.absolute()),
        "corpus": "" if corpus is None else str(corpus.expanduser().absolute()),
        "which_detectors": names,
        "label_map": dict(meaning),
        "allow_outside": allow_outside,
        "higher_is_real": higher_is_real,
        "decide_at": decide_at,
        "bootstrap_replicates": replicates,
        "confidence": confidence,
        "seed": seed,
    }
    stem = re.sub(r"[^\w.-]+", "_", table.stem)[:60] or "scores"
    digest = sha256_of_json([sha256_of_file(table), {**parameters, "score_table": ""}])[:8]
    name = f"{stem}_{time.strftime('%Y%m%d_%H%M%S')}_{digest}"
    folder = (out or folder_of_runs / "audits" / name).expanduser().absolute()
    page, answer = folder / "audit.html", folder / ANSWER
    if table.absolute().parent == folder and table.name in FILES:
        raise UsageError(f"--out {str(folder)!r}: the table lies there and would be written over. Give a new folder.")
    others = [other for other in (page.name, *FILES) if os.path.lexists(folder / other)]
    if others and not (folder / f"{SCORE_AUDIT}.ipynb").is_file():
        raise UsageError(f"--out {str(folder)!r}: has {others[0]!r}, which no audit wrote. Give a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for old in FILES:  # a failed audit must not show earlier tables as its own
        (folder / old).unlink(missing_ok=True)
    code = execute_record(
        SCORE_AUDIT, folder, {**parameters, "output_folder": str(folder)}, page=page, title=f"Audit of {table.name}",
        runs_dir=str(folder_of_runs), what="the audit", answer=answer,
    )  # fmt: skip
    if code:
        context.exit(code)
    click.echo(answer.read_text(encoding="utf-8", errors="replace"))
    click.echo(f"  audit         {page}\n  tables        {folder}")


def _what_was_read(
    table: Path, meaning: Mapping[str, str], names: list[str], higher_is_real: bool, *, has_corpus: bool
) -> str:
    """Return a line that counts the videos and detectors in ``table``; raise if the notebook would refuse the table."""
    from fvc_lib.corpus.score_table import read_score_table

    read = read_score_table(
        table, label_map=meaning, detectors=names, higher_is_real=higher_is_real, unused_labels=has_corpus
    )
    shown = ", ".join(read.scores.columns[:_SHOWN_DETECTORS])
    more = f" and {read.scores.width - _SHOWN_DETECTORS} more" if read.scores.width > _SHOWN_DETECTORS else ""
    fakes = int((read.videos["label"] == "fake").sum())
    return (
        f"{table.name}: {read.videos.height:,} videos ({read.videos.height - fakes:,} real, {fakes:,} fake), "
        f"{count_text(read.scores.width, 'detector')}: {shown}{more}"
    )
