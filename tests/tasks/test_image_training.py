"""Task image from tables to results, on pictures of patterns whose brightness is the number."""

import json
import sys
from pathlib import Path

import polars as pl
import pytest
import torch

from fvc_lib.corpus.images import index_images
from fvc_lib.detectors.own.small_resnet import SmallResnet
from fvc_lib.services.checkpoint_files import BEST
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, StoppedError, UsageError
from fvc_lib.services.parameters import read_params_file
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import IMAGE_PREDICTIONS, TARGET_PREDICTIONS, read_table
from fvc_lib.tasks.image.results import image_results
from fvc_lib.tasks.image.training import (
    LABELS,
    STAGE,
    image_split_training,
    read_image_parts,
    require_backbone,
    train_images,
)
from tests.kits.engine_kit import stop_after
from tests.kits.image_kit import image_results_of, image_tables, write_image_tables
from tests.kits.training import ListLog

SETTINGS = {
    "task": "image", "image_size": 16, "epochs": 2, "effective_batch_size": 12, "batch_size": 12, "device": "cpu",
    "learning_rate": 2e-3, "memory_preflight": False, "early_stopping_epochs": 0, "bootstrap_replicates": 100,
}  # fmt: skip
FIRST = next(iter(SmallResnet().state_dict()))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    return root, *image_tables(root, (36, 12, 18))


def run_in(folder, corpus, **changes):
    """The paths and the configuration of a run with the corpus' tables."""
    paths = RunPaths(folder / "runs" / "images" / "run_0")
    write_image_tables(paths, *corpus[1:])
    return paths, RunConfig(**{**SETTINGS, "corpus": str(corpus[0]), **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus):
    paths, config = run_in(tmp_path_factory.mktemp("trained"), corpus)
    log = ListLog()
    return paths, config, train_images(paths, config, metric_log=log), log


def test_every_test_picture_is_predicted_once_and_nothing_else(trained, corpus):
    paths, _, outcome, log = trained
    _, images, targets = corpus
    test = images.filter(part="test")
    classes = read_table(paths.image_predictions, IMAGE_PREDICTIONS)
    numbers = read_table(paths.target_predictions, TARGET_PREDICTIONS)
    columns = ["image_id", "group_id", "path", "class_label"]
    assert classes.select(columns).equals(test.drop_nulls("class_label").sort("image_id").select(columns))
    columns = ["target", "image_id", "unit", "value"]
    known = targets.join(test, on="image_id", how="semi")
    assert numbers.select(columns).sort(columns).equals(known.select(columns).sort(columns))
    for name in ("top1", "top5", "macro_f1", "mae_calories", "r2_mass"):
        assert [len(log.values(phase, name)) for phase in ("validation", "test")] == [2, 1]
    assert (outcome.num_train, outcome.num_validation, outcome.num_test) == (35, 12, 18)  # of one nothing is known
    labels = json.loads((paths.training_checkpoints(STAGE) / LABELS).read_bytes())
    assert labels["classes"] == ["dots", "stripes", "waves"]
    assert (labels["targets"], labels["units"]) == (["calories", "mass"], ["kcal", "g"])
    assert (labels["calibration"]["num_validation"], labels["calibration"]["num_test"]) == (11, classes.height)


def test_results_stand_beside_controls_with_intervals(trained, corpus):
    paths, config, _, _ = trained
    predictions = read_table(paths.image_predictions, IMAGE_PREDICTIONS)
    numbers = read_table(paths.target_predictions, TARGET_PREDICTIONS)
    results = image_results(*corpus[1:], predictions, numbers, config)
    rows = {(r["source"], r["subject"], r["metric"]): r for r in results.iter_rows(named=True)}
    top1 = rows["model", "all", "top1"]
    assert top1["value"] == (predictions["rank_of_class"] == 1).mean()
    assert top1["low"] <= top1["value"] <= top1["high"]
    assert (top1["num_samples"], top1["num_groups"]) == (predictions.height, predictions["group_id"].n_unique())
    assert rows["majority_class", "all", "top1"]["value"] == pytest.approx(1 / 3, abs=0.1)
    assert rows["majority_class", "all", "top5"]["value"] == 1
    assert all(rows["model", "class:dots", metric]["value"] is not None for metric in ("precision", "recall", "f1"))
    mean = corpus[2].filter(pl.col("image_id").str.starts_with("train"), target="mass")["value"].mean()
    control = rows["mean_predictor", "target:mass", "mae"]
    assert control["value"] == pytest.approx((numbers.filter(target="mass")["value"] - mean).abs().mean())
    assert rows["mean_predictor", "target:mass", "r2"]["value"] <= 0
    units = {("mass", "mae"): "g", ("calories", "rmse"): "kcal", ("calories", "r2"): ""}
    assert {key: rows["model", f"target:{key[0]}", key[1]]["unit"] for key in units} == units
    with pytest.raises(DataError, match="image_predictions: not the rows of the test part"):
        image_results(*corpus[1:], predictions[1:], numbers, config)


def test_a_stopped_training_goes_on_to_the_same_bits(tmp_path, corpus, trained):
    paths, config = run_in(tmp_path, corpus)
    with pytest.raises(StoppedError):
        train_images(paths, config, metric_log=ListLog(), stop=stop_after(3))
    train_images(paths, config, metric_log=ListLog())
    best, whole = ((each.training_checkpoints(STAGE) / BEST).read_bytes() for each in (paths, trained[0]))
    assert best == whole
    tables = (read_table(each.image_predictions, IMAGE_PREDICTIONS) for each in (paths, trained[0]))
    assert next(tables).equals(next(tables))


def test_a_checkpoint_is_bound_to_what_weights_depend_on(trained, tmp_path):
    paths, config, outcome, _ = trained
    root, parts = read_image_parts(paths, config)
    assert image_split_training(root, parts, config).fingerprint == outcome.fingerprint
    for change, binds in (
        ({"mixup_alpha": 0.9}, True), ({"cutmix_alpha": 0.9}, True), ({"image_size": 17}, True), ({"seed": 1}, True),
        ({"label_smoothing": 0.2}, True), ({"class_balance": "none"}, True), ({"epochs": 3}, True),
        ({"freeze_backbone_epochs": 1}, True), ({"backbone": "timm:x"}, True), ({"effective_batch_size": 6}, True),
        ({"batch_size": 4}, False), ({"num_workers": 1}, False), ({"device": "cuda"}, False),
    ):  # fmt: skip
        other = image_split_training(root, parts, config.model_copy(update=change))
        assert (other.fingerprint != outcome.fingerprint) == binds, change
    parameters = []
    for name, content in (("a", b"same"), ("b", b"same"), ("c", b"other")):  # weights count by content
        (tmp_path / name).write_bytes(content)
        with_weights = config.model_copy(update={"backbone_weights": str(tmp_path / name)})
        parameters.append(image_split_training(root, parts, with_weights).parameters)
    assert parameters[0] == parameters[1] != parameters[2]
    with pytest.raises(UsageError, match="class_balance sampler"):  # a picture has no class
        image_split_training(root, parts, config.model_copy(update={"class_balance": "sampler"}))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"backbone": "small_resnt"}, "Did you mean 'small_resnet'"),
        ({"backbone": "torchvision:resnet50"}, "needs torchvision, which is not installed"),
        ({"backbone_weights": "nowhere.pt"}, "nowhere.pt.*No such file"),
        ({"backbone_weights": "other.pt"}, rf"{FIRST} \(1, 1\) instead of"),
    ],
)
def test_what_no_training_could_begin_with_is_refused_before_the_index(tmp_path, monkeypatch, asked, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    shapes = SmallResnet().state_dict()
    torch.save({**shapes, FIRST: torch.zeros(1, 1)}, "other.pt")
    torch.save(shapes, "w.pt")
    before = torch.get_rng_state()
    with pytest.raises(UsageError, match=said):
        require_backbone(RunConfig(task="image", **asked))
    require_backbone(RunConfig(task="image", backbone_weights="w.pt", gradient_checkpointing=True))
    assert torch.get_rng_state().equal(before)


@pytest.mark.long
def test_the_sample_dishes_are_learned(tmp_path):
    """As `make demo-image` does: top-1 of at least 0.95, and calories far above the mean predictor."""
    demo = read_params_file(Path(__file__).parents[2] / "params" / "image.yaml")
    config = RunConfig(**{**demo, "data_dir": str(tmp_path / "data"), "cache_dir": str(tmp_path / "cache")})
    index, paths = index_images(config), RunPaths(tmp_path / "runs" / "images" / "dishes")
    write_image_tables(paths, index.images, index.targets)
    train_images(paths, config, metric_log=ListLog())
    results = image_results_of(paths, config)
    value = {(r["source"], r["subject"], r["metric"]): r["value"] for r in results.iter_rows(named=True)}
    assert value["model", "all", "top1"] >= 0.95
    assert value["model", "target:calories", "r2"] >= 0.8
    assert value["mean_predictor", "target:calories", "r2"] <= 0
    assert value["model", "target:calories", "mae"] < 0.5 * value["mean_predictor", "target:calories", "mae"]
