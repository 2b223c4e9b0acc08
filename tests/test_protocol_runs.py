"""Whole runs of other protocols than folds, through real kernels: two corpora, one with a leaking split of its own."""

import json
import shutil
from pathlib import Path

import polars as pl
import pytest

from fvc_lib.analysis.read.headline import run_headline
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tables import LEAKAGE_AUDIT, PREDICTIONS, PROTOCOL, RESULTS, read_table
from tests.faults.small_runs import Place, small_corpus

pytestmark = [pytest.mark.slow, pytest.mark.long]
QUICK = {"epochs": 1, "effective_batch_size": 8, "memory_preflight": False}
CONTROLS = {"constant", "metadata_only", "length_only", "group_lookup_by_group", "shuffled_labels"}


def write_corpus(folder: Path, source: Path, rows: pl.DataFrame) -> Path:
    shutil.copytree(source, folder)
    rows.write_csv(folder / "manifest.csv")
    return folder / "manifest.csv"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two corpora with near-duplicates across them.

    The first has all twelve events, two generators and a split that one real group is on both sides of. The second
    has four of these events.
    """
    folder = tmp_path_factory.mktemp("corpora")
    source = small_corpus("video", folder / "drawn").parent
    place = pl.col("group").rank("dense").over("label") - 1
    generator = pl.when(place % 2 == 0).then(pl.lit("mora")).otherwise(pl.lit("sora"))
    rows = pl.read_csv(source / "manifest.csv", infer_schema=False).select(
        "path", "label", "group",
        generator=pl.when(pl.col("label") == "fake").then(generator).otherwise(pl.lit("")),
        split=pl.when(place >= 4).then(pl.lit("test")).otherwise(pl.lit("train")),
    )  # fmt: skip
    several = pl.col("group").is_duplicated() & (pl.col("label") == "real")
    leaking = pl.col("group") == rows.filter(several)["group"].min()
    leaked = pl.when(pl.col("path") == rows.filter(leaking)["path"][0]).then(pl.lit("test")).otherwise(pl.lit("train"))
    own = rows.with_columns(split=pl.when(leaking).then(leaked).otherwise("split"))
    other = rows.filter(place < 2).with_columns(split=pl.lit(""))
    return write_corpus(folder / "own", source, own), write_corpus(folder / "other", source, other)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, corpora: tuple[Path, Path]) -> Place:
    return Place(tmp_path_factory.mktemp("here"), corpora[0])


@pytest.fixture(scope="module")
def generators(place: Place) -> tuple[RunPaths, str]:
    return place.run("--jobs", "1", protocol="leave_one_generator_out", **QUICK)


def results_of(run: RunPaths) -> pl.DataFrame:
    return read_table(run.results, RESULTS).filter(metric="roc_auc")


def failed(run: RunPaths) -> list[str]:
    audit = read_table(run.leakage_audit, LEAKAGE_AUDIT)
    return audit.filter(~pl.col("passed").fill_null(value=True))["finding"].to_list()


def test_every_generator_is_tested_by_a_training_without_it(generators: tuple[RunPaths, str]) -> None:
    run, shown = generators
    assert "the plain mean over 2 targets, the worst first" in shown
    protocol = read_table(run.protocol, PROTOCOL)
    tested = pl.concat(read_table(run.predictions(fold), PREDICTIONS) for fold in range(2))
    due = protocol.filter(part="test").select("video_id", "fold").sort("video_id")
    assert tested.select("video_id", "fold").sort("video_id").equals(due)
    scopes = results_of(run).filter(pl.col("scope").str.starts_with("target:"))
    assert set(scopes["scope"]) == {"target:mora", "target:sora"}
    for scope in ("target:mora", "target:sora"):
        assert set(scopes.filter(scope=scope)["source"]) >= CONTROLS
    assert failed(run) == []
    assert "leave_one_generator_out" in run.report_html.read_text()
    assert "leave_one_generator_out" in (run.root.parents[1] / "index.html").read_text()


def test_a_fork_under_the_official_split_trains_once_names_its_leak_and_claims_nothing(
    generators: tuple[RunPaths, str], place: Place
) -> None:
    process = place.start("--resume", str(generators[0].root), "--fork", "-p", "protocol", "official", "--jobs", "1")
    shown, _ = process.communicate(timeout=600)
    assert process.returncode == 0, shown
    run = list_runs(place.runs)[-1]
    assert not run.predictions(1).exists()
    assert failed(run) == []  # the named leak is known, and nothing else leaks
    leaks = read_table(run.leakage_audit, LEAKAGE_AUDIT).filter(check="official_split_leaks")
    assert leaks["count"].to_list() == [1]
    headline = run_headline(run)
    assert headline.verdict.standing != "above control"
    assert leaks["finding"][0] in headline.measure.circumstances(1, 1)
    recognised = results_of(run).filter(source="group_lookup_by_group", scope="all")["value"][0]
    assert recognised > 0.5  # who knows the groups knows the leaking one


def test_another_corpus_is_tested_without_what_both_have(place: Place, corpora: tuple[Path, Path]) -> None:
    run, shown = place.run(
        "--jobs", "1", more_corpora=corpora[1], protocol="cross_corpus", target_corpora="other", **QUICK
    )
    assert "Protocol cross_corpus, tested on other: " in shown
    assert json.loads(run.run_json.read_text())
    protocol = read_table(run.protocol, PROTOCOL)
    tested, trained, left = (protocol.filter(part=part) for part in ("test", "train", "left_out"))
    assert set(tested["target"]) == {"other"}
    assert tested["group_id"].n_unique() == 4
    assert set(left["group_id"]) == set(tested["group_id"])  # the same events in the corpus that trains
    assert not set(trained["group_id"]) & set(tested["group_id"])
    assert set(results_of(run).filter(scope="target:other")["source"]) >= CONTROLS
    assert failed(run) == []
