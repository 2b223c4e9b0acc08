import numpy as np
import polars as pl
import pytest

from fvc_lib.analysis.read.headline import judge, overall_scores
from fvc_lib.corpus.folds import TrainingRows
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import FOLDS, INDEX, PREDICTIONS, check_table, read_table, write_table
from fvc_lib.tasks.video import controls
from fvc_lib.tasks.video.controls import auc_within_folds
from fvc_lib.tasks.video.results import kfold_results
from fvc_lib.tasks.video.training import train_fold
from tests.kits.training import ListLog, TinyTraining

pytestmark = pytest.mark.usefixtures("few_rounds")
CONFIG = RunConfig(bootstrap_replicates=100, num_folds=4)


def two_sources(folds: pl.DataFrame) -> list[str | None]:
    """Of every second real group of each fold one source, of the others another, which is the larger one."""
    number = folds["group_id"].str.extract(r"(\d+)").cast(pl.Int64).to_numpy()
    reals = (folds["label"] == "real").to_numpy()
    return [("web" if n // 8 % 2 and n else "studio") if real else None for n, real in zip(number, reals, strict=True)]


def scored(folds: pl.DataFrame, tables, index: pl.DataFrame, told: float) -> pl.DataFrame:
    """Predictions of a good model; the control's follow the source by ``told``."""
    noise = np.random.default_rng(3).uniform(0, 0.4, folds.height)
    fake = (folds["label"] == "fake").to_numpy()
    predictions = tables.predictions(folds, 0.05 + noise / 2 + 0.6 * fake)
    due, _ = controls.possible_floor(index, folds, CONFIG)
    label = due.select("video_id", source_label=(pl.col("label") == "fake").cast(pl.Int64))
    values = pl.DataFrame({"video_id": folds["video_id"], "noise": noise})
    source = label.join(values, on="video_id").select(
        "video_id", "source_label", source_score=pl.col("noise") + told * pl.col("source_label")
    )
    joined = predictions.drop("source_score", "source_label").join(source, on="video_id", how="left")
    return check_table(joined.select(predictions.columns), PREDICTIONS, "test")


def test_the_trained_floor_is_an_auc_within_folds_beside_its_margin_on_the_same_groups(tables) -> None:
    folds = tables.folds(num_groups=80, per_group=1)
    index = tables.index(folds, real_source=two_sources(folds))
    predictions = scored(folds, tables, index, told=0.5)
    results = kfold_results(index, folds, predictions, CONFIG)
    rows = {row["metric"]: row for row in results.filter(source="real_source_control", scope="all").to_dicts()}
    assert (rows["roc_auc"]["value"], rows["roc_auc"]["num_videos"]) == (1.0, 40)
    model = results.filter(source="model", scope="all", metric="roc_auc")["value"][0]
    assert rows["margin_over_floor"]["value"] == pytest.approx(model - 1.0, abs=1e-12)
    blind = kfold_results(index, folds, scored(folds, tables, index, told=0.0), CONFIG)
    (low, high) = blind.filter(source="real_source_control", scope="all", metric="roc_auc").select("low", "high").row(0)
    assert low < 0.5 < high
    assert judge(overall_scores(blind)).best_control.source != "real_source_control"
    assert blind.filter(metric="margin_over_floor")["low"][0] > 0
    moved = predictions.with_columns(source_label=1 - pl.col("source_label"))
    assert controls.control_scores(controls.possible_floor(index, folds, CONFIG)[0], moved) is None


def test_a_floor_that_is_possible_and_was_not_trained_has_a_row_without_a_value(tables) -> None:
    folds = tables.folds(num_groups=80, per_group=1)
    index = tables.index(folds, real_source=two_sources(folds))
    some = scored(folds, tables, index, told=0.5).with_columns(
        source_score=pl.when(pl.col("fold") != 0).then("source_score")  # one fold without it is enough
    )
    results = kfold_results(index, folds, some, CONFIG)
    assert results.filter(source="real_source_control").select("metric", "value").rows() == [("roc_auc", None)]
    one = index.with_columns(real_source=pl.when(pl.col("label") == "real").then(pl.lit("web")))
    assert kfold_results(one, folds, some, CONFIG).filter(source="real_source_control").is_empty()
    assert "fewer than two sources" in controls.possible_floor(one, folds, CONFIG)[1]
    assert "shuffled on purpose" in controls.possible_floor(index, folds, RunConfig(shuffle_labels=True))[1]


def test_sources_are_split_by_the_folds_groups_and_not_at_all_where_a_part_lacks_one(tables) -> None:
    folds = tables.folds(num_groups=80, per_group=2)
    index = tables.index(folds, real_source=two_sources(folds))
    larger = index.filter(pl.col("real_source") == "studio")
    rows = controls.of_two_sources(TrainingRows(folds), index, CONFIG, 1)
    by_id = dict(index.select("video_id", "real_source").iter_rows())
    names = {label: {by_id[each] for each in rows.folds.filter(label=label)["video_id"]} for label in ("real", "fake")}
    assert names == {"real": {"studio"}, "fake": {"web"}}
    assert rows.folds.filter(label="real").height == larger.height
    assert rows.folds.drop("label").join(folds, on=["video_id", "group_id", "fold"], how="anti").is_empty()
    gone = larger.join(folds.filter(fold=1), on="video_id")["video_id"].to_list()
    with pytest.raises(DataError, match="fold 1 does not test reals of both sources"):
        controls.of_two_sources(TrainingRows(folds), index, CONFIG, 1, gone)


def test_a_detector_that_learns_where_reals_come_from_is_not_above_control(tables, tmp_path) -> None:
    config = RunConfig(
        cache_dir=str(tmp_path / "cache"), num_folds=2, num_frames=4, fixed_size=24, augmentations_per_video=0,
        model="frame_cnn", epochs=4, batch_size=8, effective_batch_size=8, learning_rate=0.01, device="cpu",
        memory_preflight=False, shuffled_label_control=False, bootstrap_replicates=200, inner_validation_share=0.25,
    )  # fmt: skip
    tiny = TinyTraining(RunPaths(tmp_path / "runs" / "tiny" / "run_0"), config)
    folds = tables.folds(num_groups=64, per_group=1, num_folds=2)
    index = tables.index(folds, real_source=two_sources(folds))
    write_table(folds, FOLDS, tiny.paths.folds)
    write_table(index, INDEX, tiny.paths.index)
    draw = np.random.default_rng(1)
    for video_id, label, source in index.select("video_id", "label", "real_source").iter_rows():
        clip = draw.integers(90, 130, (4, 3, 24, 24))
        clip[:, 0] += 60 * (source == "web")
        clip[:, 2] += 60 * (label == "fake")
        tiny.store.write(video_id, 0, clip.astype(np.uint8))
    tiny.note_clips()
    log = ListLog()
    outcomes = [train_fold(tiny.paths, config, fold, metric_log=log) for fold in (0, 1)]
    assert all(outcome.control is None and outcome.sources.steps > 0 for outcome in outcomes)
    assert tiny.paths.fold_checkpoints(0).joinpath("sources").is_dir()
    predictions = pl.concat([read_table(tiny.paths.predictions(fold), PREDICTIONS) for fold in (0, 1)])
    assert set(predictions.drop_nulls("source_score")["label"]) == {"real"}
    results = kfold_results(index, folds, predictions, config)
    assert results.filter(source="real_source_control", scope="all", metric="roc_auc")["value"][0] > 0.95
    assert judge(overall_scores(results)).standing == "not above control"


def test_folds_that_lean_different_ways_do_not_cancel_and_chance_is_no_lean(tables) -> None:
    folds = tables.folds(num_groups=80, per_group=1, num_folds=5)
    is_fake, fold = (folds["label"] == "fake").to_numpy(), folds["fold"].to_numpy()
    web = np.arange(folds.height) // 10 % 2 == 0  # four groups of each source in every fold
    sources = [None if fake else "web" if here else "studio" for fake, here in zip(is_fake, web, strict=True)]
    index, config = tables.index(folds, real_source=sources), RunConfig(bootstrap_replicates=100)
    reals = pl.Series(~is_fake)
    by_source = pl.Series("label", np.where(web, "fake", "real")).filter(reals)

    def both(scores):
        """The floor, and the AUC in one direction for all folds."""
        predictions = tables.predictions(folds, scores)
        one_way = auc_within_folds(predictions.filter(reals).with_columns(by_source), config)
        return controls.real_source_floor(index, predictions, config), one_way

    noise = np.random.default_rng(8).uniform(0, 0.4, folds.height)
    floor, one_way = both(noise + 0.5 * (web ^ (fold % 2 == 0)) * (fold < 4))  # two folds each way, and one of chance
    assert one_way.value < 0.65
    assert floor.value > 0.85
    assert floor.low > 0.6
    blind = [both(np.random.default_rng(seed).uniform(0.1, 0.9, folds.height)) for seed in range(20)]
    shown = [sum(each.low > 0.5 or each.high < 0.5 for each in of) for of in zip(*blind, strict=True)]
    assert shown[0] <= shown[1] + 2  # hardly oftener than in one direction for all folds
    assert np.mean([floor.value for floor, _ in blind]) < 0.62  # with what chance gives anyhow it would be 0.67
