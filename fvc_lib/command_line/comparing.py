"""The command that compares runs pair by pair, on the same videos and folds or not at all."""

from __future__ import annotations

from pathlib import Path

import click

from fvc_lib.services.config import resolve_config
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.run_paths import find_run


@click.command(short_help="Compare runs pair by pair, with intervals.")
@click.argument("runs", nargs=-1, required=True)
@click.option("--metric", default="roc_auc", show_default=True, help="The metric that is compared.")
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Runs folder, where it is not the default.")
def compare(runs: tuple[str, ...], metric: str, runs_dir: Path | None) -> None:
    """Compare RUNS (two or more: run ids, parts of them, run folders, or 'latest') on the same videos.

    Shown is each pair's difference with a bootstrap interval over groups, both runs judged on the same draws; the
    corrected t-test over folds (Nadeau and Bengio 2003), because folds share training videos; and p-values corrected
    for the number of pairs (Holm 1979). Runs on other videos, labels, groups or folds are refused with what differs: a
    difference between them would say nothing about the models.

    Exit codes: 0 some pair was compared, 2 usage, 3 none could be.
    """
    from fvc_lib.analysis.comparison import compare as compared  # sklearn and polars take a second to load
    from fvc_lib.analysis.comparison import lines

    config = resolve_config()
    found = [find_run(runs_dir or Path(config.runs_dir), name) for name in runs]
    if len({run.root for run in found}) < 2:
        raise UsageError(f"compare: got {len({run.root for run in found})} run, wanted two or more different ones.")
    comparison = compared(
        found, metric=metric, replicates=config.bootstrap_replicates, seed=config.seed, confidence=config.confidence
    )
    for line in lines(comparison):
        click.echo(line)
    if not comparison.pairs:
        raise DataError("no two of these runs can be compared; the lines above say why.")
