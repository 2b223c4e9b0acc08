"""Task image from tables to results, on pictures of patterns whose brightness is the number."""

import json
import sys
from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from fvc_lib.corpus.images import index_images
from fvc_lib.detectors.own.small_resnet import SmallResnet
from fvc_lib.services.checkpoint_files import BEST
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, StoppedError, UsageError
from fvc_lib.services.parameters import read_params_file
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import IMAGE_PREDICTIONS, TARGET_PREDICTIONS, TASK_RESULTS, read_table, write_table
from fvc_lib.tasks.image.results import image_results
from fvc_lib.tasks.image.training import (
    LABELS,
    STAGE,
    image_split_training,
    read_image_parts,
    require_backbone,
    train_images,
)
from tests.kits.image_kit import image_tables, write_image_tables
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


class Run:
    """A run folder with the corpus' tables."""

    def __init__(self, folder, corpus, **changes):
        root, images, targets = corpus
        self.paths = RunPaths(folder)
        self.config = RunConfig(**{**SETTINGS, "corpus": str(root), **changes})
        self.log = ListLog()
        write_image_tables(self.paths, images, targets)

    def train(self, **options):
        return train_images(self.paths, self.config, metric_log=self.log, **options)

    def weights(self):
        return load_file(self.paths.training_checkpoints(STAGE) / BEST)


@pytest.fixture
def run(tmp_path, corpus):
    return lambda name="run", **changes: Run(tmp_path / "runs" / "images" / name, corpus, **changes)


def stop_after(steps):
    asked = iter(range(1_000_000))
    return lambda: next(asked) >= steps


def equal(a, b):
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus):
    finished = Run(tmp_path_factory.mktemp("runs") / "images" / "run_0", corpus)
    return finished, finished.train()


def test_every_test_picture_is_predicted_once_and_nothing_else(trained, corpus):
    run, outcome = trained
    _, images, targets = corpus
    test = images.filter(pl.col("part") == "test")
    classes = read_table(run.paths.image_predictions, IMAGE_PREDICTIONS)
    numbers = read_table(run.paths.target_predictions, TARGET_PREDICTIONS)
    named = test.filter(pl.col("class_label").is_not_null()).sort("image_id")
    columns = ["image_id", "group_id", "path", "class_label"]
    assert classes.select(columns).equals(named.select(columns))
    known = targets.join(test, on="image_id", how="semi").sort("target", "image_id")
    assert (
        numbers.sort("target", "image_id")
        .select("image_id", "target", "unit", "value")
        .equals(known.select("image_id", "target", "unit", "value"))
    )
    for name in ("top1", "top5", "macro_f1", "mae_calories", "r2_mass"):
        assert [len(run.log.values(phase, name)) for phase in ("validation", "test")] == [2, 1]
    assert (outcome.num_train, outcome.num_validation, outcome.num_test) == (35, 12, 18)  # of one nothing is known
    labels = json.loads((run.paths.training_checkpoints(STAGE) / LABELS).read_bytes())
    assert labels["classes"] == ["dots", "stripes", "waves"]
    assert (labels["targets"], labels["units"]) == (["calories", "mass"], ["kcal", "g"])
    assert (labels["calibration"]["num_validation"], labels["calibration"]["num_test"]) == (11, classes.height)


def test_results_stand_beside_controls_with_intervals(trained, corpus):
    run, _ = trained
    results = image_results(run.paths, run.config)
    assert results.equals(read_table(run.paths.task_results, TASK_RESULTS))
    rows = {(r["source"], r["subject"], r["metric"]): r for r in results.iter_rows(named=True)}
    predictions = read_table(run.paths.image_predictions, IMAGE_PREDICTIONS)
    top1 = rows["model", "all", "top1"]
    assert top1["value"] == (predictions["rank_of_class"] == 1).mean()
    assert top1["low"] <= top1["value"] <= top1["high"]
    assert (top1["num_samples"], top1["num_groups"]) == (predictions.height, predictions["group_id"].n_unique())
    assert rows["majority_class", "all", "top1"]["value"] == pytest.approx(1 / 3, abs=0.1)
    assert rows["majority_class", "all", "top5"]["value"] == 1
    assert all(rows["model", "class:dots", metric]["value"] is not None for metric in ("precision", "recall", "f1"))
    numbers = read_table(run.paths.target_predictions, TARGET_PREDICTIONS).filter(pl.col("target") == "mass")
    mean = corpus[2].filter((pl.col("target") == "mass") & pl.col("image_id").str.starts_with("train"))["value"].mean()
    control = rows["mean_predictor", "target:mass", "mae"]
    assert control["value"] == pytest.approx((numbers["value"] - mean).abs().mean())
    assert control["unit"] == "g"
    assert rows["mean_predictor", "target:mass", "r2"]["value"] <= 0
    assert rows["model", "target:calories", "rmse"]["unit"] == "kcal"
    assert rows["model", "target:calories", "r2"]["unit"] == ""


def test_predictions_that_are_not_the_test_parts_are_refused(trained):
    run, _ = trained
    table = read_table(run.paths.image_predictions, IMAGE_PREDICTIONS)
    try:
        write_table(table.head(table.height - 1), IMAGE_PREDICTIONS, run.paths.image_predictions)
        with pytest.raises(DataError, match=r"image_predictions\.parquet.*not the rows of the test part"):
            image_results(run.paths, run.config)
    finally:
        write_table(table, IMAGE_PREDICTIONS, run.paths.image_predictions)


def test_a_stopped_training_goes_on_to_the_same_bits(run, trained):
    interrupted = run("stopped")
    with pytest.raises(StoppedError):
        interrupted.train(stop=stop_after(3))
    interrupted.train()
    assert equal(interrupted.weights(), trained[0].weights())
    assert read_table(interrupted.paths.image_predictions, IMAGE_PREDICTIONS).equals(
        read_table(trained[0].paths.image_predictions, IMAGE_PREDICTIONS)
    )


def test_a_checkpoint_is_bound_to_the_parameters_that_weights_depend_on(trained):
    run, outcome = trained
    root, parts = read_image_parts(run.paths, run.config)
    assert image_split_training(root, parts, run.config).fingerprint == outcome.fingerprint
    for change, binds in (
        ({"mixup_alpha": 0.9}, True), ({"cutmix_alpha": 0.9}, True), ({"image_size": 17}, True), ({"seed": 1}, True),
        ({"label_smoothing": 0.2}, True), ({"class_balance": "none"}, True), ({"epochs": 3}, True),
        ({"freeze_backbone_epochs": 1}, True), ({"backbone": "timm:x"}, True), ({"effective_batch_size": 6}, True),
        ({"batch_size": 4}, False), ({"num_workers": 1}, False), ({"device": "cuda"}, False),
    ):  # fmt: skip
        other = image_split_training(root, parts, run.config.model_copy(update=change))
        assert (other.fingerprint != outcome.fingerprint) == binds, change


def test_drawing_classes_evenly_needs_a_class_of_every_picture(run):
    with pytest.raises(UsageError, match="class_balance sampler"):
        run("sampler", class_balance="sampler").train()


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
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    shapes = SmallResnet().state_dict()
    torch.save({**shapes, FIRST: torch.zeros(1, 1)}, tmp_path / "other.pt")
    asked = {name: str(tmp_path / value) if name == "backbone_weights" else value for name, value in asked.items()}
    before = torch.get_rng_state()
    with pytest.raises(UsageError, match=said):
        require_backbone(RunConfig(task="image", **asked))
    torch.save(shapes, tmp_path / "w.pt")
    require_backbone(RunConfig(task="image", backbone_weights=str(tmp_path / "w.pt"), gradient_checkpointing=True))
    assert torch.get_rng_state().equal(before)


def test_weights_of_a_file_bind_the_checkpoint_by_content(run, tmp_path):
    parameters = []
    for name, content in (("a", b"same"), ("b", b"same"), ("c", b"other")):
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(content)
        with_weights = run("weights", backbone_weights=str(path))
        root, parts = read_image_parts(with_weights.paths, with_weights.config)
        parameters.append(image_split_training(root, parts, with_weights.config).parameters)
    assert parameters[0] == parameters[1] != parameters[2]


@pytest.mark.long
def test_the_sample_dishes_are_learned(tmp_path, list_log):
    """As `make demo-image` does: top-1 of at least 0.95, and calories far above the mean predictor."""
    demo = read_params_file(Path(__file__).parents[2] / "params" / "image.yaml")
    config = RunConfig(**{**demo, "data_dir": str(tmp_path / "data"), "cache_dir": str(tmp_path / "cache")})
    index, paths = index_images(config), RunPaths(tmp_path / "runs" / "images" / "dishes")
    write_image_tables(paths, index.images, index.targets)
    train_images(paths, config, metric_log=list_log())
    results = image_results(paths, config)
    value = {(r["source"], r["subject"], r["metric"]): r["value"] for r in results.iter_rows(named=True)}
    assert value["model", "all", "top1"] >= 0.95
    assert value["model", "target:calories", "r2"] >= 0.8
    assert value["mean_predictor", "target:calories", "r2"] <= 0
    assert value["model", "target:calories", "mae"] < 0.5 * value["mean_predictor", "target:calories", "mae"]
