"""Leaks between folds, or between parts of a split, are counted from the facts of files, whatever the groups say."""

import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest

from fvc_lib.corpus.copies.perceptual_hash import perceptual_hash
from fvc_lib.corpus.probing import ProbeResult
from fvc_lib.services.atomic_files import sha256_of_file
from fvc_lib.services.config import RunConfig
from fvc_lib.services.parameters import resolve_config
from fvc_lib.tasks.leakage_audit import leakage_audit, split_audit
from fvc_lib.tasks.video import controls
from fvc_lib.video.decode.probe import VideoProbe
from tests.corpus.edited_pictures import drawn, put_picture, saved_anew
from tests.kits.training import recorded_selection

CONFIG = RunConfig(bootstrap_replicates=100)
FIRST = pl.col("video_id") == "video00000"


class Clips:
    fingerprint = "f"


@pytest.fixture(scope="module")
def folds(tables: Any) -> pl.DataFrame:
    return tables.folds()


@pytest.fixture(scope="module")
def predictions(tables: Any, folds: pl.DataFrame) -> pl.DataFrame:
    noise = np.random.default_rng(2).normal(size=folds.height)
    return tables.predictions(folds, 1 / (1 + np.exp(-(controls.fake_labels(folds) - 0.5 + noise))))


@pytest.fixture(autouse=True)
def no_metadata(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fit no metadata control where the test is about something else."""
    if "metadata" not in request.node.name:
        monkeypatch.setattr(controls, "metadata_only", lambda _, folds, *__, **___: controls.constant(folds))


@pytest.fixture(scope="module")
def hashes(folds: pl.DataFrame) -> list[str | None]:
    """Of the first three videos of groups 0 and 1, whose folds are the same, and of groups 2 and 3: all different."""
    pictures = [np.random.default_rng(row).integers(20, 235, (3, 3, 8, 8)).astype(np.float64) for row in range(12)]
    found = [perceptual_hash(np.kron(coarse, np.ones((8, 8))).astype(np.uint8)) for coarse in pictures]
    return [*found, *[None] * (folds.height - 12)]


def failed(audit: pl.DataFrame) -> dict[str, int]:
    return dict(audit.filter(~pl.col("passed")).select("check", "count").iter_rows())


def of(audit: pl.DataFrame, check: str) -> dict[str, Any]:
    return audit.filter(check=check).row(0, named=True)


def test_clean_tables_pass_every_check(tables, folds, predictions, hashes) -> None:
    index = tables.index(folds, perceptual_hash=hashes)
    audit = leakage_audit(index, folds, predictions, CONFIG, selections=[recorded_selection(Clips)] * 4)
    assert failed(audit) == {}
    assert audit["passed"].sum() == 7
    assert audit["check"].is_unique().all()
    assert "48 files without a hash" in of(audit, "near_duplicates_in_two_folds")["finding"]


def test_a_group_that_the_grouping_failed_to_join_is_found_by_what_the_files_are(
    tables, folds, predictions, hashes
) -> None:
    """Group ids alone would see nothing here: the video that strayed into the next fold has one of its own."""
    strayed = folds.with_columns(
        fold=pl.when(FIRST).then((pl.col("fold") + 1) % 4).otherwise("fold"),
        group_id=pl.when(FIRST).then(pl.lit("alone")).otherwise("group_id"),
    )
    moved = predictions.drop("fold", "group_id").join(strayed.drop("label"), on="video_id").select(predictions.columns)

    def audit(**columns: list[object]) -> dict[str, int]:
        return failed(leakage_audit(tables.index(strayed, **columns), strayed, moved, CONFIG))

    assert audit() == {}
    assert audit(perceptual_hash=[hashes[1], *hashes[1:]]) == {"near_duplicates_in_two_folds": 1}
    others = range(2, folds.height)
    contents = ["b" * 64, "b" * 64, *(f"{row:064d}" for row in others)]
    stated, sources = ["cascade", "cascade", *[None for _ in others]], ["s", "s", *map(str, others)]
    assert audit(content_sha256=contents, stated_group=stated, source_id=sources) == {
        "contents_in_two_folds": 1, "stated_groups_in_two_folds": 1, "sources_in_two_folds": 1,
    }  # fmt: skip


def test_torn_groups_and_late_choices_fail_their_checks_and_earlier_openings_are_not_judged(
    tables, folds, predictions
) -> None:
    index, record = tables.index(folds), recorded_selection(Clips)

    def audit(folds: pl.DataFrame = folds, **more: Any) -> dict[str, int]:
        return failed(leakage_audit(index, folds, predictions, CONFIG, **more))

    other_fold = folds.with_columns(fold=pl.when(FIRST).then(3).otherwise("fold").cast(pl.Int64))
    assert audit(other_fold) == {"groups_in_two_folds": 1}
    assert audit(selections=[record, replace(record, openings=2, earlier=1)]) == {"chosen_after_opening": 1}
    assert audit(selections=[record, None]) == {"chosen_after_opening": 0}
    assert audit(selections=[replace(record, openings=3)]) == {}
    config = CONFIG.model_copy(update={"near_duplicate_bits": 0})
    found = leakage_audit(index, folds, predictions, config, before=(3, "run_<b>"))
    row = of(found, "opened_before")
    assert (row["count"], row["passed"], "run_<b>" in row["finding"]) == (3, None, True)
    assert "near_duplicates_in_two_folds" not in found["check"]


def test_what_a_split_by_row_would_have_claimed_is_computed_from_these_predictions(tables, folds, predictions) -> None:
    claimed = of(leakage_audit(tables.index(folds), folds, predictions, CONFIG), "auc_claimed_by_row")
    honest = controls.auc_within_folds(predictions, CONFIG).value
    assert f"{honest:.3f}" in claimed["finding"]
    assert claimed["number"] > 0.95 > honest
    dealt = controls.split_by_row(folds, seed=0).to_dicts()
    assert claimed["count"] == sum(
        any(other["group_id"] == row["group_id"] and other["fold"] != row["fold"] for other in dealt) for row in dealt
    )
    alone = tables.folds(num_groups=60, per_group=1)
    scored = tables.predictions(alone, predictions["score"].to_numpy())
    assert of(leakage_audit(tables.index(alone), alone, scored, CONFIG), "auc_claimed_by_row")["count"] == 0


def test_where_metadata_tells_the_labels_the_columns_that_carry_it_are_named(tables: Any, folds, predictions) -> None:
    index = tables.index(folds, width=[640 if label == "fake" else 320 for label in folds["label"]])
    audit = leakage_audit(index, folds, predictions, CONFIG)
    row = of(audit, "metadata_carriers")
    assert "width (1.00)" in row["finding"]
    assert (row["number"], row["passed"]) == (1.0, None)
    size = of(audit, "size_and_rate")
    assert size["number"] == 1.0
    assert "-p rescale ROWS" in size["finding"]


CHECKS = (
    "groups_in_two_parts", "files_in_two_parts", "contents_in_two_parts", "files_unlike_the_index",
    "near_copies_in_two_parts",
)  # fmt: skip
PROBE = VideoProbe("h264", "mov", "yuv420p", 64, 64, 8.0, 12, 1.5, 0, False, 1000, None)


@pytest.fixture(scope="module")
def dishes():
    return drawn(3)


@pytest.fixture
def corpus(tmp_path, dishes):
    for name, picture in zip(("train", "validation", "test"), dishes, strict=True):
        put_picture(tmp_path / f"corpus/{name}.jpg", picture)
    return tmp_path / "corpus"


def table(root, **parts):
    """Files with the part each is in, by the first word of its name; every file a group of its own."""
    paths = sorted(path.name for path in root.iterdir())
    stems = [path.partition(".")[0] for path in paths]
    part = [parts.get(stem, stem.partition("_")[0]) for stem in stems]
    hashes = [sha256_of_file(root / path) for path in paths]
    return pl.DataFrame({"path": paths, "part": part, "group_id": paths, "content_sha256": hashes})


def leaks(rows, root, task="image"):
    """The failed checks by name: the finding's number and text."""
    config = resolve_config({"task": task, "cache_dir": str(root.parent / "cache")}, environ={})
    found = split_audit(rows, root, config)
    assert tuple(found["check"]) == CHECKS
    wrong = found.filter(pl.col("passed").ne_missing(True)).to_dicts()
    return {row["check"]: (row["count"], row["finding"]) for row in wrong}


def test_each_kind_of_leak_is_found_by_its_own_check_though_the_groups_know_nothing(corpus, dishes):
    assert not leaks(table(corpus), corpus)
    shutil.copy(corpus / "train.jpg", corpus / "test_same.jpg")
    assert leaks(table(corpus), corpus).keys() == {"contents_in_two_parts", "near_copies_in_two_parts"}
    (corpus / "test_same.jpg").unlink()

    put_picture(corpus / "test_alike.jpg", saved_anew(dishes[0].resize((200, 200)), 60))
    ((check, (count, finding)),) = leaks(table(corpus), corpus).items()
    assert (check, count) == ("near_copies_in_two_parts", 1)
    assert "The first: test_alike.jpg and train.jpg." in finding
    assert not leaks(table(corpus, test_alike="train"), corpus)
    divided = table(corpus, test_alike="train").with_columns(group_id=pl.lit("one"))
    assert leaks(divided, corpus).keys() == {"groups_in_two_parts"}

    images = table(corpus, test_alike="train")  # files that are others by now, or gone
    put_picture(corpus / "test.jpg", dishes[0])
    (corpus / "validation.jpg").unlink()
    found = leaks(images, corpus)
    assert found.keys() == {"contents_in_two_parts", "near_copies_in_two_parts", "files_unlike_the_index"}
    assert found["files_unlike_the_index"][0] == 2


def test_a_video_with_several_texts_counts_once_and_its_copies_are_found(tmp_path, monkeypatch):
    contents = {"a": "1", "b": "2", "c": "1", "d": "4"}
    probes = {path: ProbeResult(path, PROBE, 64 * content) for path, content in contents.items()}
    monkeypatch.setattr("fvc_lib.tasks.leakage_audit.probe_files", lambda *_, **__: (probes, 0))
    pairs = pl.DataFrame(
        {
            "path": list("aabcd"), "text": list("vwxyz"), "part": ["train", "train", "test", "train", "test"],
            "group_id": list("gghgi"), "content_sha256": [64 * contents[path] for path in "aabcd"],
        }
    )  # fmt: skip
    assert not leaks(pairs, tmp_path, "video_text")
    moved = pairs.with_columns(part=pl.when(pl.col("path") == "c").then(pl.lit("test")).otherwise("part"))
    found = leaks(moved.sample(fraction=1, shuffle=True, seed=1), tmp_path, "video_text")
    assert found.keys() == {"groups_in_two_parts", "contents_in_two_parts"}
    assert found["contents_in_two_parts"][1] == "1 of 3 contents in more than one part."
