"""Task image: samples, loss, mixtures, scores, and a training from tables to results."""

import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch.nn import functional as F

from fvc_lib.corpus.images import index_images
from fvc_lib.detectors.frames.backbone import ImageModel
from fvc_lib.detectors.own.small_resnet import SmallResnet
from fvc_lib.engine.loading import load_batches
from fvc_lib.engine.task import Batch, stack_samples
from fvc_lib.metrics.recognition import ranks_of_class
from fvc_lib.services.checkpoint_files import BEST
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, StoppedError, UsageError
from fvc_lib.services.parameters import read_params_file
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import IMAGE_PREDICTIONS, TARGET_PREDICTIONS, read_table
from fvc_lib.tasks.image.training import (
    LABELS,
    STAGE,
    ImageDataset,
    ImageLabels,
    ImageRecords,
    ImageScores,
    balancing_weights,
    class_predictions,
    image_parts,
    image_training,
    middle_view,
    require_backbone,
    train_images,
    training_view,
    value_losses,
)
from fvc_lib.tasks.mixing import Mix, MixSettings, class_losses, draw_mix, mixed_pixels, mixed_target
from fvc_lib.tasks.split_results import image_results
from tests.kits.engine_kit import stop_after
from tests.kits.split_runs import image_results_of, image_tables, image_task, write_image_tables
from tests.kits.training import ListLog


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    return root, *image_tables(root)


# Samples


ALONE = MixSettings()


def dataset(corpus, mixing=ALONE, seed=0, part="train", **changes):
    root, images, targets = corpus
    parts = image_parts(images, targets)
    return ImageDataset(root, getattr(parts, part), parts.labels, 16, mixing=mixing, seed=seed, **changes)


def whole(data):
    return stack_samples([data[index] for index in range(len(data))])


def test_a_sample_is_a_picture_with_what_is_known_of_it(corpus):
    data = dataset(corpus)
    tensors, records = whole(data).tensors, data.records
    assert (tensors["image"].dtype, tensors["image"].shape) == (torch.uint8, (24, 3, 16, 16))
    assert tensors["class_index"].tolist() == records.class_indices.tolist()
    has_class = records.class_indices >= 0
    assert not has_class.all()
    assert tensors["class_target"].sum(1).tolist() == has_class.astype(float).tolist()
    assert tensors["class_target"].argmax(1)[has_class].tolist() == records.class_indices[has_class].tolist()
    there = np.isfinite(records.values)
    assert torch.equal(tensors["known"] > 0, torch.from_numpy(there))
    assert (tensors["values"][tensors["known"] == 0] == 0).all()
    # Numbers are scaled by the training part and come back.
    values = tensors["values"].double().numpy()
    for place in range(2):
        own = values[there[:, place], place]
        assert (own.mean(), own.std()) == pytest.approx((0, 1), abs=1e-6)
    np.testing.assert_allclose(data.labels.in_units(values)[there], records.values[there], rtol=1e-6)
    assert dataset(corpus, None, part="validation").labels == data.labels


def test_neither_order_nor_batch_nor_process_changes_a_sample(corpus):
    data = dataset(corpus, MixSettings(0.7, 0.3, 1.0)).at_epoch(3)
    together = whole(data)
    order = np.random.default_rng(0).permutation(24)
    for batches, workers in (([[int(i)] for i in order[:5]], 0), ([order[:7].tolist(), order[7:9].tolist()], 1)):
        for wanted, got in zip(batches, load_batches(data, batches, num_workers=workers), strict=True):
            for name, tensor in got.tensors.items():
                assert torch.equal(tensor, together.tensors[name][wanted]), name


def test_an_epoch_is_the_same_again_wherever_the_corpus_and_its_rows_stand(corpus, tmp_path):
    root, images, targets = corpus
    (tmp_path / "elsewhere").symlink_to(root)
    mixing = MixSettings(0.5, 0.3, 1.0)
    shuffled = images.sample(fraction=1, shuffle=True, seed=1), targets.sample(fraction=1, shuffle=True, seed=2)
    epoch = whole(dataset(corpus, mixing).at_epoch(2))
    again = whole(dataset((tmp_path / "elsewhere", *shuffled), mixing).at_epoch(1).at_epoch(2))
    assert again.sample_ids == epoch.sample_ids
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in epoch.tensors.items())
    for other in (dataset(corpus, mixing).at_epoch(3), dataset(corpus, mixing, seed=1).at_epoch(2)):
        assert not torch.equal(whole(other).tensors["image"], epoch.tensors["image"])
    assert image_parts(*shuffled).fingerprint == image_parts(images, targets).fingerprint


def test_the_fingerprint_sees_every_change(corpus):
    _, images, targets = corpus
    first = pl.int_range(pl.len()) == 0
    others = (
        (images, targets.with_columns(value=pl.when(first).then(1.0).otherwise("value"))),
        (images.with_columns(class_label=pl.when(first).then(pl.lit("waves")).otherwise("class_label")), targets),
        (images.with_columns(part=pl.when(first).then(pl.lit("test")).otherwise("part")), targets),
    )
    assert len({image_parts(*tables).fingerprint for tables in (corpus[1:], *others)}) == 4


def test_a_mixed_number_is_known_where_both_pictures_have_it(corpus):
    mixed, alone = (whole(dataset(corpus, mixing)).tensors for mixing in (MixSettings(1.0, 0.3), ALONE))
    known = mixed["known"] > 0
    assert (known <= (alone["known"] > 0)).all()
    assert known.sum() < (alone["known"] > 0).sum()
    assert (mixed["values"][~known] == 0).all()
    assert not torch.equal(mixed["values"][known], alone["values"][known])


def test_balancing_weights_give_classes_equal_influence(corpus):
    records = dataset(corpus).records
    weights = balancing_weights(records, 3)
    counts = np.bincount(records.class_indices[records.class_indices >= 0])
    np.testing.assert_allclose(weights * counts, (weights * counts)[0])
    assert (weights * counts).sum() == pytest.approx(counts.sum())
    weighted = whole(dataset(corpus, class_weights=weights)).tensors["class_target"].sum(1)
    expected = [weights[k] if k >= 0 else 0.0 for k in records.class_indices]
    np.testing.assert_allclose(weighted.numpy(), expected, rtol=1e-6)


def test_what_was_never_learned_is_refused(corpus):
    _, images, targets = corpus
    trained = pl.col("part") == "train"
    only_tested = images.with_columns(class_label=pl.when(trained).then(pl.lit("dots")).otherwise("class_label"))
    untrained = targets.filter(~pl.col("image_id").str.starts_with("train"))
    for tables, why in (
        ((only_tested, targets), r"2 classes have no picture in the training part.*'stripes', 'waves'"),
        ((images, untrained), "targets calories, mass: no picture of the training part"),
    ):
        with pytest.raises(DataError, match=why):
            image_parts(*tables)


def test_views_are_the_largest_centred_square_or_have_most_of_it():
    pixels = torch.zeros(3, 10, 20, dtype=torch.uint8)
    pixels[:, :, 5:15] = 200
    assert (middle_view(pixels, 8) == 200).all()
    assert torch.equal(middle_view(pixels[:, :, 5:15], 10), pixels[:, :, 5:15])
    for shape in ((1, 1), (1, 50), (50, 1), (30, 31), (16, 16)):
        pixels = torch.full((3, *shape), 100, dtype=torch.uint8)
        for seed in range(20):
            view = training_view(pixels, 16, np.random.default_rng(seed))
            assert view.shape == (3, 16, 16)
            assert 80 <= view.float().mean() <= 120


# The loss


SEVEN = ImageLabels(tuple("abcdefg"), ("calories", "mass"), ("kcal", "g"), (500.0, 80.0), (100.0, 7.0))


def learned(task, rows, change=lambda tensors: None):
    """A small model with the gradients of some training pictures, whose tensors ``change`` may alter."""
    torch.manual_seed(0)
    labels, batch = task.training_data.labels, stack_samples([task.training_data[row] for row in range(rows)])
    model = ImageModel(SmallResnet((8, 8)), len(labels.classes), len(labels.targets))
    change(batch.tensors)
    task.loss(task.forward(model, batch), batch).total.backward()
    return model


def test_unknown_labels_give_no_gradient_at_all(corpus):
    def first_unknown(tensors):
        tensors["known"][:, 0] = 0
        tensors["values"][:, 0] = 1e30

    gradient = learned(image_task(*corpus), 8, first_unknown).target_head.weight.grad
    assert (gradient[0] == 0).all()
    assert (gradient[1] != 0).any()
    nothing = learned(image_task(*corpus), 8, lambda tensors: [tensors[n].zero_() for n in ("known", "class_target")])
    assert all((parameter.grad == 0).all() for parameter in nothing.parameters())


def test_a_mixed_target_costs_its_parts_shares_and_numbers_are_averaged_over_those_known():
    logits = torch.randn(1, 3, generator=torch.Generator().manual_seed(1))
    alone = [class_losses(logits, F.one_hot(torch.tensor([k]), 3).float(), label_smoothing=0.1) for k in (0, 2)]
    for share, wanted in ((0.7, 0.3 * alone[0] + 0.7 * alone[1]), (0.0, 0.3 * alone[0])):
        torch.testing.assert_close(class_losses(logits, torch.tensor([[0.3, 0.0, share]]), label_smoothing=0.1), wanted)
    predicted, values = torch.tensor([[0.5, 3.0], [0.5, 9.0]]), torch.zeros(2, 2)
    known = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    assert value_losses(predicted, values, known).tolist() == pytest.approx([(0.125 + 2.5) / 2, 0.125])


def test_a_task_of_numbers_only_and_one_of_classes_only_can_learn(corpus):
    root, images, targets = corpus
    numbers = learned(image_task(root, images.with_columns(class_label=None), targets), 4)
    classes = learned(image_task(root, images, targets.clear()), 4)
    assert numbers.target_head.weight.grad.abs().max() > 0
    assert classes.class_head.weight.grad.abs().max() > 0


# Mixtures


def drawn(settings, count=300):
    return [draw_mix(settings, 50, 32, np.random.default_rng(seed)) for seed in range(count)]


def test_the_share_and_both_kinds_are_as_asked():
    mixes = drawn(MixSettings(0.3, 0.2, 1.0), 2000)
    mixed = [mix for mix in mixes if mix is not None]
    assert 0.25 < len(mixed) / len(mixes) < 0.35
    assert 0.4 < sum(mix.box is None for mix in mixed) / len(mixed) < 0.6
    assert {mix.partner for mix in mixed} == set(range(50))
    assert all(mix.box is None for mix in drawn(MixSettings(1.0, 1.0, 0.0)))
    black, white = torch.zeros(3, 32, 32, dtype=torch.uint8), torch.ones(3, 32, 32, dtype=torch.uint8)
    for mix in drawn(MixSettings(1.0, 0.0, 1.0)):  # a cut shows exactly its share of the first picture
        assert mix.box is not None
        assert 1 - mixed_pixels(black, white, mix).float().mean().item() == pytest.approx(mix.share, abs=1e-6)
        assert 0 <= mix.share <= 1


def test_mixup_blends_pictures_and_classes_by_share():
    dark, light = torch.zeros(3, 2, 2, dtype=torch.uint8), torch.full((3, 2, 2), 200, dtype=torch.uint8)
    assert [mixed_pixels(dark, light, Mix(0, None, share)).unique().tolist() for share in (0.25, 1.0)] == [[150], [0]]
    cat, dog, none = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]), torch.zeros(2)
    mixed = [mixed_target(cat, other, Mix(0, None, 0.75)).tolist() for other in (dog, none)]
    assert mixed == [[0.75, 0.5], [0.75, 0.0]]


# Scores


def outputs_and_batch(count=20):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "class_index": torch.randint(-1, 7, (count,), generator=generator),
        "values": torch.randn(count, 2, generator=generator),
        "known": (torch.rand(count, 2, generator=generator) < 0.7).float(),
    }
    logits = torch.randint(0, 4, (count, 7), generator=generator).float()  # few distinct scores, so that there are ties
    outputs = {"class_logits": logits, "values": torch.randn(count, 2, generator=generator)}
    return outputs, Batch(tuple(f"i{n}" for n in range(count)), tensors)


def scores_of(outputs, batch):
    scores = ImageScores(SEVEN)
    scores.update(outputs, batch)
    return scores


def test_the_metrics_are_those_of_the_definitions():
    outputs, batch = outputs_and_batch()
    scores = scores_of(outputs, batch)
    metrics = scores.compute()
    rows = torch.nonzero(batch.tensors["class_index"] >= 0).squeeze(1)
    logits, labels = outputs["class_logits"][rows].numpy(), batch.tensors["class_index"][rows].numpy()
    ranks = ranks_of_class(logits, labels)
    table = pl.DataFrame({name: list(map(str, range(20))) for name in ("image_id", "group_id", "path")})
    predictions = class_predictions(ImageRecords(table, np.empty(0), np.empty(0)), scores)
    assert predictions["image_id"].to_list() == list(map(str, rows.tolist()))
    assert predictions["class_label"].to_list() == [SEVEN.classes[label] for label in labels]
    assert predictions["rank_of_class"].to_list() == ranks.tolist()
    assert predictions["predicted_label"].to_list() == [SEVEN.classes[place] for place in logits.argmax(1)]
    np.testing.assert_allclose(predictions["probability"], torch.from_numpy(logits).double().softmax(1).amax(1))
    assert metrics["top1"] == (ranks == 1).mean()
    assert metrics["top5"] == (ranks <= 5).mean()
    known = batch.tensors["known"][:, 0] > 0
    errors = 100 * (outputs["values"] - batch.tensors["values"])[known, 0].abs().double()
    assert metrics["mae_calories"] == pytest.approx(errors.mean().item(), rel=1e-6)
    outputs["class_logits"].zero_()  # equal scores count against the model
    assert scores_of(outputs, batch).compute()["top1"] == 0
    assert set(metrics) == {"top1", "top5", "macro_f1", "mae_calories", "r2_calories", "mae_mass", "r2_mass"}


def test_what_several_gathered_is_what_one_gathers_to_the_bit():
    outputs, batch = outputs_and_batch()
    one, joined = scores_of(outputs, batch), ImageScores(SEVEN)
    for start, stop in itertools.pairwise((0, 1, 7, 7, 20)):
        some = {name: tensor[start:stop] for name, tensor in outputs.items()}
        joined.add_document(scores_of(some, batch.part(start, stop)).to_document())
    assert joined.sample_ids == one.sample_ids
    assert joined.compute() == one.compute()
    before, after = one.to_document()["columns"], joined.to_document()["columns"]
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_is_no_number_makes_its_metrics_undefined_and_no_others(bad):
    outputs, batch = outputs_and_batch()
    row = int(torch.nonzero((batch.tensors["class_index"] >= 0) & (batch.tensors["known"][:, 1] > 0))[0])
    outputs["class_logits"][row, 2] = bad
    outputs["values"][row, 1] = bad
    undefined = {name for name, value in scores_of(outputs, batch).compute().items() if math.isnan(value)}
    assert undefined == {"top1", "top5", "macro_f1", "mae_mass", "r2_mass"}


# Training


SETTINGS = {
    "task": "image", "image_size": 16, "epochs": 2, "effective_batch_size": 12, "batch_size": 12, "device": "cpu",
    "learning_rate": 2e-3, "memory_preflight": False, "early_stopping_epochs": 0, "bootstrap_replicates": 100,
}  # fmt: skip
FIRST = next(iter(SmallResnet().state_dict()))


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    root = tmp_path_factory.mktemp("larger")
    return root, *image_tables(root, (36, 12, 18))


def run_in(folder, larger, **changes):
    """The paths and the configuration of a run with the corpus' tables."""
    paths = RunPaths(folder / "runs" / "images" / "run_0")
    write_image_tables(paths, *larger[1:])
    return paths, RunConfig(**{**SETTINGS, "corpus": str(larger[0]), **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory, larger):
    paths, config = run_in(tmp_path_factory.mktemp("trained"), larger)
    log = ListLog()
    return paths, config, train_images(paths, config, metric_log=log), log


def test_every_test_picture_is_predicted_once_and_nothing_else(trained, larger):
    paths, _, outcome, log = trained
    _, images, targets = larger
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
    assert (outcome.num_train, outcome.num_validation, outcome.num_test) == (36, 12, 18)
    labels = json.loads((paths.training_checkpoints(STAGE) / LABELS).read_bytes())
    assert labels["classes"] == ["dots", "stripes", "waves"]
    assert (labels["targets"], labels["units"]) == (["calories", "mass"], ["kcal", "g"])
    assert 0.05 <= labels["temperature"] <= 20
    assert 0 <= labels["calibration_error"] <= 1


def test_results_stand_beside_controls_with_intervals(trained, larger):
    paths, config, _, _ = trained
    predictions = read_table(paths.image_predictions, IMAGE_PREDICTIONS)
    numbers = read_table(paths.target_predictions, TARGET_PREDICTIONS)
    results = image_results(*larger[1:], predictions, numbers, config)
    rows = {(r["source"], r["subject"], r["metric"]): r for r in results.iter_rows(named=True)}
    top1 = rows["model", "all", "top1"]
    assert top1["value"] == (predictions["rank_of_class"] == 1).mean()
    assert top1["low"] <= top1["value"] <= top1["high"]
    assert (top1["num_samples"], top1["num_groups"]) == (predictions.height, predictions["group_id"].n_unique())
    assert rows["majority_class", "all", "top1"]["value"] == pytest.approx(1 / 3, abs=0.1)
    assert rows["majority_class", "all", "top5"]["value"] == 1
    assert all(rows["model", "class:dots", metric]["value"] is not None for metric in ("precision", "recall", "f1"))
    mean = larger[2].filter(pl.col("image_id").str.starts_with("train"), target="mass")["value"].mean()
    control = rows["mean_predictor", "target:mass", "mae"]
    assert control["value"] == pytest.approx((numbers.filter(target="mass")["value"] - mean).abs().mean())
    assert rows["mean_predictor", "target:mass", "r2"]["value"] <= 0
    units = {("mass", "mae"): "g", ("calories", "rmse"): "kcal", ("calories", "r2"): ""}
    assert {key: rows["model", f"target:{key[0]}", key[1]]["unit"] for key in units} == units


def test_a_stopped_training_goes_on_to_the_same_bits(tmp_path, larger, trained):
    paths, config = run_in(tmp_path, larger)
    with pytest.raises(StoppedError):
        train_images(paths, config, metric_log=ListLog(), stop=stop_after(3))
    train_images(paths, config, metric_log=ListLog())
    best, whole = ((each.training_checkpoints(STAGE) / BEST).read_bytes() for each in (paths, trained[0]))
    assert best == whole
    tables = (read_table(each.image_predictions, IMAGE_PREDICTIONS) for each in (paths, trained[0]))
    assert next(tables).equals(next(tables))


def test_a_checkpoint_is_bound_to_what_weights_depend_on(trained, tmp_path):
    paths, config, outcome, _ = trained
    assert image_training(paths, config).fingerprint == outcome.fingerprint
    for change, binds in (
        ({"mixup_alpha": 0.9}, True), ({"cutmix_alpha": 0.9}, True), ({"image_size": 17}, True), ({"seed": 1}, True),
        ({"label_smoothing": 0.2}, True), ({"class_balance": "none"}, True), ({"epochs": 3}, True),
        ({"freeze_backbone_epochs": 1}, True), ({"backbone": "timm:x"}, True), ({"effective_batch_size": 6}, True),
        ({"batch_size": 4}, False), ({"num_workers": 1}, False), ({"device": "cuda"}, False),
    ):  # fmt: skip
        other = image_training(paths, config.model_copy(update=change))
        assert (other.fingerprint != outcome.fingerprint) == binds, change
    parameters = []
    for name, content in (("a", b"same"), ("b", b"same"), ("c", b"other")):  # weights count by content
        (tmp_path / name).write_bytes(content)
        with_weights = config.model_copy(update={"backbone_weights": str(tmp_path / name)})
        parameters.append(image_training(paths, with_weights).parameters)
    assert parameters[0] == parameters[1] != parameters[2]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"backbone": "small_resnt"}, "Did you mean 'small_resnet'"),
        ({"backbone": "torchvision:resnet50"}, "needs torchvision, which is not installed"),
        ({"backbone_weights": "nowhere.pt"}, "nowhere.pt.*No such file"),
        ({"backbone_weights": "other.pt"}, rf"{FIRST}: copying a param with shape torch.Size\(\[1, 1\]\)"),
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
    write_image_tables(paths, index.rows, index.targets)
    train_images(paths, config, metric_log=ListLog())
    results = image_results_of(paths, config)
    value = {(r["source"], r["subject"], r["metric"]): r["value"] for r in results.iter_rows(named=True)}
    assert value["model", "all", "top1"] >= 0.95
    assert value["model", "target:calories", "r2"] >= 0.8
    assert value["mean_predictor", "target:calories", "r2"] <= 0
    assert value["model", "target:calories", "mae"] < 0.5 * value["mean_predictor", "target:calories", "mae"]
