"""Every protocol: nothing crosses, nothing is lost, nothing depends on the order of the rows."""

from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, reject, settings, strategies as st

from fvc_lib.corpus.protocols import (
    CELLS_PER_OCTAVE,
    HELD_OUT,
    LENGTH,
    OTHER,
    SHARES,
    UNKNOWN,
    check_protocol,
    folds_tested,
    held_out,
    left_out_table,
    make_protocol,
    matched_videos,
    official_leaks,
    parts_table,
    training_rows,
)
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, LeakageError
from fvc_lib.services.tasks import PROTOCOLS
from fvc_lib.tasks.video import controls

GENERATORS = ("mora", "sora", "pika")
NEVER_TELLS = lambda *_: (0.5, 0.4)  # noqa: E731 - for tests of what crosses: the first cells are narrow enough
SPLIT = {"inner_validation_share": 0.25, "seed": 0}


def corpus(num_groups: int, seed: int, *, mixed: float = 0.2, unknown: float = 0.05) -> pl.DataFrame:
    """An index of groups of 1 to 4 videos: reals, fakes of one generator, or (``mixed``) anything together."""
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(num_groups):
        kind = "any" if draw.random() < mixed else str(draw.choice(["real", "fake"]))
        generator = str(draw.choice(GENERATORS))
        split = str(draw.choice(["train", "validation", "test"], p=[0.6, 0.1, 0.3]))
        for _ in range(draw.integers(1, 5)):
            label = kind if kind != "any" else str(draw.choice(["real", "fake"]))
            made = None if label == "real" or draw.random() < unknown else generator
            generator = str(draw.choice(GENERATORS)) if kind == "any" else generator
            split = str(draw.choice(["train", "test"])) if draw.random() < 0.03 else split
            frames = int(draw.integers(20, 60) if label == "real" else draw.integers(40, 90))
            rows.append((f"g{number:03d}", label, made, split, str(draw.choice(["a", "b", "c"])), frames))
    order = draw.permutation(len(rows))
    columns = ("group_id", "label", "generator", "official_split", "corpus", "num_frames")
    index = pl.DataFrame(
        [rows[place] for place in order],
        schema=dict.fromkeys(columns, pl.String) | {"num_frames": pl.Int64},
        orient="row",
    )
    return index.with_columns(
        video_id=pl.Series([f"{7919 * place % 104729:08x}" for place in range(len(rows))]),
        path=pl.format("clip_{}.mp4", pl.int_range(pl.len())),
        duration_seconds=pl.col("num_frames") / 25,
        manipulation=pl.lit(None, pl.String),
        attributes=pl.lit(None, pl.String),
        content_sha256=pl.int_range(pl.len()).cast(pl.String),
        codec=pl.lit("h264"),
        width=pl.lit(640),
        height=pl.lit(360),
    )


def config_of(protocol: str, **more: Any) -> RunConfig:
    needed = {"cross_corpus": {"target_corpora": ("b", "c")}, "leave_one_source_out": {"source_column": "group_id"}}
    settings = {"num_folds": 3, "bootstrap_replicates": 100, **needed.get(protocol, {}), **more}
    return RunConfig(protocol=protocol, **settings)


def made(index: pl.DataFrame, config: RunConfig) -> pl.DataFrame:
    return make_protocol(index, config, controls.tells_labels(config))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@settings(max_examples=2)
@given(st.integers(30, 45), st.integers(0, 10_000))
def test_nothing_crosses_and_no_video_is_lost_or_tested_twice(protocol: str, num_groups: int, seed: int) -> None:
    index, config = corpus(num_groups, seed), config_of(protocol)
    try:
        table = make_protocol(index, config, NEVER_TELLS)
    except LeakageError:
        raise
    except DataError:  # too few of something, said before anything trains
        reject()
    assert table.height == index.height * config.num_trainings
    assert not folds_tested(table)["video_id"].is_duplicated().any()
    assert make_protocol(index.sample(fraction=1, shuffle=True, seed=1), config, NEVER_TELLS).equals(table)
    leaking = set(official_leaks(index)["group_id"]) if protocol == "official" else set()
    for fold in range(config.num_trainings):
        try:
            split = training_rows(table, fold).split(fold, **SPLIT)
        except LeakageError:
            raise
        except DataError:  # too few groups for an inner validation part
            continue
        parts = [set(part["group_id"]) for part in (split.train, split.validation, split.test)]
        assert (parts[0] & parts[1]) | (parts[0] & parts[2]) | (parts[1] & parts[2]) <= leaking


def test_a_generator_is_tested_by_trainings_that_have_seen_none_of_it() -> None:
    index, config = corpus(60, 3, mixed=0.5), config_of("leave_one_generator_out", num_folds=4)
    targets = held_out(index, 4)
    assert set(targets) == set(GENERATORS)  # three of them in four folds
    assert len(targets) == 4
    table = made(index, config).join(index.select("video_id", "generator"), on="video_id")
    for fold, target in enumerate(targets):
        rows = table.filter(fold=fold)
        trained, tested = rows.filter(part="train"), rows.filter(part="test")
        assert target not in trained["generator"].to_list()
        assert set(tested.filter(label="fake")["generator"]) == {target}
        assert set(rows["target"]) == {target}
    reals = table.filter(pl.col("label") == "real", pl.col("part") == "test")
    assert sorted(reals["video_id"]) == sorted(index.filter(label="real")["video_id"])  # all of them, once
    assert set(table["reason"].drop_nulls()) == {UNKNOWN, HELD_OUT, OTHER}
    assert set(table.filter(pl.col("label") == "fake", pl.col("generator").is_null())["part"]) == {"left_out"}


def test_a_generator_spelled_otherwise_or_joined_with_another_is_held_out_too() -> None:
    index = corpus(80, 5, mixed=0, unknown=0).with_columns(number=pl.col("group_id").str.slice(1).cast(pl.Int64))
    third, name = pl.col("number") % 3 == 0, pl.col("generator")
    other = (
        pl.when(third & (name == "pika")).then(pl.lit("Pi-ka"))
        .when(third & (name == "sora")).then(pl.lit("Sora+mora"))
        .otherwise("generator")
    )  # fmt: skip
    index = index.with_columns(generator=other)
    targets = held_out(index, 4)
    assert sorted(targets) == ["Sora+mora", "mora", "pika", "sora"]
    table = made(index, config_of("leave_one_generator_out", num_folds=4)).join(
        index.select("video_id", "generator"), on="video_id"
    )
    for fold, target in enumerate(targets):
        trained = {
            part.lower().replace("-", "")
            for name in table.filter(fold=fold, part="train")["generator"].drop_nulls()
            for part in name.split("+")
        }
        assert not trained & set(target.lower().split("+")), target
        assert trained
    assert SHARES in table["reason"].to_list()


LEAKING = corpus(20, 0).head(10).with_columns(
    group_id=pl.Series([*"aabcddefgh"]),
    label=pl.Series(["real", "fake", "real", *["fake"] * 3, "real", "fake", "real", "fake"]),
    official_split=pl.Series([
        "train", "test", "train", "train", "train", "validation", "validation", "validation", "test", "test",
    ]),
)  # fmt: skip


def test_an_official_split_keeps_its_leaks_and_names_them() -> None:
    table = made(LEAKING, config_of("official"))
    leaks = official_leaks(LEAKING)
    assert leaks["group_id"].to_list() == ["a", "d"]
    assert all(name in leaks["paths"][1] for name in (" (train)", " (validation)"))
    assert training_rows(table, 0).leaking == {"a", "d"}
    assert parts_table(table, config_of("official")).row(0) == (0, "official test", 4, 3, 3, 0)
    split = training_rows(table, 0).split(0, **SPLIT)
    assert split.validation.height == 3  # the corpus's own chooses
    assert "its group is in several official parts: test, train" in left_out_table(table)["reason"].to_list()


def test_the_strict_split_drops_what_leaks_from_the_side_that_learns() -> None:
    table = made(LEAKING, config_of("official_strict"))
    assert parts_table(table, config_of("official_strict")).row(0) == (0, "official test", 2, 3, 3, 2)
    assert training_rows(table, 0).leaking == frozenset()
    left = table.filter(part="left_out")
    assert sorted(left["group_id"]) == ["a", "d"]


def test_the_gate_lets_the_named_leaks_of_official_through_and_no_other() -> None:
    table = made(LEAKING, config_of("official"))
    check_protocol(table, LEAKING)
    unnamed = table.with_columns(reason=pl.when(pl.col("group_id") != "a").then("reason"))
    with pytest.raises(LeakageError, match="1 groups are in more than one"):
        check_protocol(unnamed, LEAKING)
    renamed = table.with_columns(protocol=pl.lit("cross_corpus"))  # another protocol has no leaks of its own
    with pytest.raises(LeakageError, match="2 groups are in more than one"):
        check_protocol(renamed, LEAKING)


def test_a_target_is_tested_on_its_list_or_whole_and_what_crosses_is_left_out_of_training() -> None:
    index, config = corpus(50, 2), config_of("cross_corpus")
    known = index.select("video_id", "corpus", "official_split")
    table = made(index, config).join(known, on="video_id")
    assert set(table.filter(part="test")["official_split"]) == {"test"}
    assert set(table.filter(pl.col("corpus") != "a", pl.col("official_split") != "test")["part"]) == {"left_out"}
    index = index.with_columns(official_split=pl.lit(None, pl.String))
    table = made(index, config).join(known, on="video_id")
    tested, left = table.filter(part="test"), table.filter(part="left_out")
    assert sorted(tested["video_id"]) == sorted(index.filter(pl.col("corpus") != "a")["video_id"])
    assert tested["target"].equals(tested["corpus"])
    assert set(left["corpus"]) == {"a"}
    assert set(left["group_id"]) == set(tested["group_id"]) & set(index.filter(corpus="a")["group_id"])


def test_no_source_is_in_training_and_test_and_videos_without_a_source_are_left_out() -> None:
    place = (pl.col("group_id").rank("dense") % 12).cast(pl.String)
    stated = pl.concat_str(pl.lit('{"found in": "'), place, pl.lit('"}'))
    index = corpus(90, 3).with_columns(attributes=pl.when(pl.int_range(pl.len()) % 10 > 0).then(stated))
    table = made(index, config_of("leave_one_source_out", source_column="found in"))
    places = index.select("video_id", place=pl.col("attributes").str.json_path_match("$['found in']"))
    rows = table.join(places, on="video_id")
    assert set(rows.filter(pl.col("place").is_null())["part"]) == {"left_out"}
    used = rows.filter(pl.col("part") != "left_out")
    assert used.height > 200
    assert used.group_by("fold", "place").agg(parts=pl.col("part").n_unique())["parts"].max() == 1
    assert set(used.filter(part="test")["video_id"]) == set(places.drop_nulls("place")["video_id"])


@pytest.mark.parametrize(
    ("protocol", "more", "message"),
    [
        ("leave_one_source_out", {"source_column": "nowhere"}, "got the sources none in column 'nowhere'"),
        (
            "leave_one_source_out",
            {"source_column": "corpus", "num_folds": 9},
            r"got 9, .* separate sources \(column 'corpus'",
        ),
        ("leave_one_generator_out", {}, r"got 0 generators \(none\)"),
        ("official", {}, "got the parts none"),
        ("cross_corpus", {"target_corpora": ("d",)}, "'d' is none of this run's corpora"),
        ("cross_corpus", {"target_corpora": ("a", "b", "c")}, "nothing is left to train on"),
        ("kfold", {"num_folds": 40}, "num_folds: got 40"),
    ],
)
def test_a_corpus_that_lacks_what_the_protocol_needs_is_refused(protocol: str, more: dict, message: str) -> None:
    nothing = pl.lit(None, pl.String)
    index = corpus(30, 0).with_columns(generator=nothing, official_split=nothing)
    with pytest.raises(DataError, match=message):
        made(index, config_of(protocol, **more))


def test_a_detector_of_length_alone_scores_high_until_lengths_are_matched() -> None:
    index = corpus(200, 5)
    for config in (config_of("kfold"), config_of("length_matched")):
        table = made(index, config)
        folds = folds_tested(table)
        auc = controls.auc_within_folds(controls.metadata_only(index, folds, controls.LENGTH), config)
        assert auc.low > 0.75 if config.protocol == "kfold" else auc.low <= 0.5 <= auc.high + 0.05
    assert (folds["label"] == "fake").mean() == 0.5
    assert left_out_table(table)["videos"].sum() == index.height - folds.height > 30


def test_a_real_and_the_fake_like_it_lie_in_one_fold_where_groups_allow() -> None:
    index = corpus(120, 5)
    alone = index.with_columns(group_id=pl.col("video_id"))
    for videos, is_together in (
        (alone, True),
        (index.with_columns(group_id="g" + pl.col("video_id").str.slice(7)), False),
    ):
        folds = folds_tested(make_protocol(videos, config_of("length_matched"), NEVER_TELLS))
        pairs = matched_videos(videos, LENGTH, CELLS_PER_OCTAVE[0], 0).join(folds, on="video_id")
        assert set(pairs.group_by("pair").agg(pl.col("label").n_unique())["label"]) == {2}
        assert (pairs.group_by("pair").agg(pl.col("fold").n_unique())["fold"].max() == 1) is is_together
