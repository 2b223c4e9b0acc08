"""An ensemble's folder: tables as a run has them, an audit of what it was put together from, and last its record."""

import os
from collections.abc import Sequence
from typing import get_args

import polars as pl

from fvc_lib import __version__
from fvc_lib.metrics.declaration import UNCALIBRATED
from fvc_lib.services.atomic_files import path_to_text, sha256_of_file, write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import run_config
from fvc_lib.services.records.digests import write_document
from fvc_lib.services.records.ensembles import FORMAT, RECORD, EnsembleRecord, FoldRule, MemberRecord, Method
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import (
    FOLDS,
    INDEX,
    LEAKAGE_AUDIT,
    PREDICTIONS,
    PROTOCOL,
    RESULTS,
    check_table,
    frame_of,
    read_table,
    write_table,
)
from fvc_lib.services.tasks import KFOLD
from fvc_lib.tasks.video.ensembles.combine import Member, folds_of, mean_rules
from fvc_lib.tasks.video.ensembles.stacking import stacked_rules
from fvc_lib.tasks.video.results import kfold_results, made_samples, undecoded

_OF_DATA = ("metadata_carriers", "official_split_leaks")  # checks of the members that are of their common data


def rules_of(members: Sequence[Member], method: Method) -> list[FoldRule]:
    """How the detectors count in each fold; raises as ``stacked_rules``, ``UsageError`` for another method."""
    if method not in get_args(Method):
        raise UsageError(f"method: got {method!r}, wanted {' or '.join(get_args(Method))}.")
    return stacked_rules(members) if method == "stacking" else mean_rules(members)


def write_predictions(
    folder: RunPaths, members: Sequence[Member], predictions: pl.DataFrame, config: RunConfig
) -> None:
    """Write what the ensemble says, and the tables of its first member that say of which videos.

    A record that is there goes first: the folder is not whole until ``write_record``.
    """
    folder.tables.mkdir(parents=True, exist_ok=True)
    (folder.root / RECORD).unlink(missing_ok=True)
    first = members[0].run
    tables = [("index", INDEX), ("folds", FOLDS), *([("protocol", PROTOCOL)] if first.protocol.is_file() else [])]
    for name, schema in tables:
        write_table(read_table(getattr(first, name), schema), schema, getattr(folder, name))
    for fold in folds_of(members):
        write_table(predictions.filter(fold=fold), PREDICTIONS, folder.predictions(fold))
    write_text(folder.params_yaml, config.to_yaml())


def write_results(
    folder: RunPaths, members: Sequence[Member], predictions: pl.DataFrame, config: RunConfig
) -> pl.DataFrame:
    """Write the ensemble's numbers next to its controls, as ``results.kfold_results`` computes a run's."""
    first = members[0].run
    index, folds = read_table(folder.index, INDEX), read_table(folder.folds, FOLDS)
    parts = None if config.protocol == KFOLD else read_table(folder.protocol, PROTOCOL)
    left_out = undecoded(folds, made_samples(first, run_config(first)), parts)
    results = kfold_results(index, folds, predictions, config, left_out=left_out, protocol=parts)
    results = results.filter(~pl.col("metric").str.ends_with(UNCALIBRATED))  # an ensemble has no temperature
    write_table(results, RESULTS, folder.results)
    return results


def write_audit(folder: RunPaths, members: Sequence[Member], rules: Sequence[FoldRule], method: Method) -> pl.DataFrame:
    """Write the leakage audit of the ensemble, in addition to those of its members."""
    shared = members[0].predictions
    told = (
        f"All {len(members)} runs predicted the same {shared.height:,} videos of {shared['group_id'].n_unique():,} "
        "groups, with the same labels and folds."
    )
    rows: list[tuple[object, ...]] = [("members_alike", len(members), None, told, True)]
    if method == "stacking":
        videos = sum(rule.num_videos for rule in rules)
        fitted = (
            "Weights were fitted on inner validation videos alone, which trained no network of their fold and are not "
            f"tested by it: {videos:,} in all folds."
        )
        rows.append(("weights_fitted_inside", videos, None, fitted, True))
    for number, member in enumerate(members):
        audit = read_table(member.run.leakage_audit, LEAKAGE_AUDIT)
        judged = audit.filter(pl.col("passed").is_not_null())
        sentence = (
            f"{member.run.run_id}: {int(judged['passed'].sum())} of {judged.height} checks of its own audit passed."
        )
        rows.append(("member_audit", judged.height, None, sentence, bool(judged["passed"].all())))
        if not number:
            rows += audit.filter(pl.col("check").is_in(_OF_DATA)).rows()
    audit = check_table(frame_of(rows, LEAKAGE_AUDIT), LEAKAGE_AUDIT, "the ensemble's audit")
    write_table(audit, LEAKAGE_AUDIT, folder.leakage_audit)
    return audit


def write_record(
    folder: RunPaths,
    members: Sequence[Member],
    configs: Sequence[RunConfig],
    names: Sequence[str],
    rules: Sequence[FoldRule],
    method: Method,
) -> EnsembleRecord:
    """Write who its members are, by which digests they are known again, and how they count: then it is whole."""
    folds = folds_of(members)
    found = []
    for member, config in zip(members, configs, strict=True):
        outcomes = [member.outcome(fold) for fold in folds]
        found.append(
            MemberRecord(
                run_id=path_to_text(member.run.run_id),
                path=path_to_text(os.path.relpath(member.run.root, folder.root)),
                detector=member.detector,
                model=config.identity("model"),
                seed=config.seed,
                run_hash=config.config_hash,
                weights=[outcome.training.best_weights if outcome else "" for outcome in outcomes],
                predictions=[sha256_of_file(member.run.predictions(fold)) for fold in folds],
            )
        )
    files = [folder.params_yaml, folder.results, *sorted(folder.tables.glob("*.parquet"))]
    record = EnsembleRecord(
        format=FORMAT,
        name=path_to_text(folder.run_id),
        method=method,
        made_with={"fvc": __version__},
        detectors=list(names),
        members=found,
        folds=list(rules),
        files={str(path.relative_to(folder.root)): sha256_of_file(path) for path in files if path.is_file()},
    )
    write_document(folder.root / RECORD, record.model_dump(mode="json"))
    return record
