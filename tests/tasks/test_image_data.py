"""Pictures as samples: what is drawn follows from seed, picture and epoch, and what is not known stays unknown."""

import numpy as np
import polars as pl
import pytest
import torch

from fvc_lib.engine.loading import load_batches
from fvc_lib.services.errors import DataError
from fvc_lib.tasks.image.task import ImageDataset, balancing_weights, image_parts, middle_view, training_view
from fvc_lib.tasks.mixing import MixSettings
from fvc_lib.video.decode.still_image import StillImageError
from tests.kits.image_kit import image_tables

ALONE = MixSettings()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    return root, *image_tables(root)


def dataset(corpus, mixing=ALONE, seed=0, part="train", **changes):
    root, images, targets = corpus
    parts = image_parts(images, targets)
    return ImageDataset(root, getattr(parts, part), parts.labels, 16, mixing=mixing, seed=seed, **changes)


def whole(data):
    return data.__getitems__(range(len(data)))


def test_a_sample_is_a_picture_with_what_is_known_of_it(corpus):
    data = dataset(corpus)
    tensors, records = whole(data).tensors, data.records
    assert (tensors["image"].dtype, tensors["image"].shape) == (torch.uint8, (24, 3, 16, 16))
    assert tensors["class_index"].tolist() == records.class_indices.tolist()
    has_class = records.class_indices >= 0
    assert not has_class.all()
    assert data.classes is None  # balanced sampling would never draw a picture without a class
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


def test_a_picture_that_breaks_while_training_is_named(tmp_path):
    data = dataset((tmp_path, *image_tables(tmp_path, (6, 3, 3))))
    path = data.records.table["path"][2]
    (tmp_path / path).write_bytes(b"no picture")
    with pytest.raises(StillImageError, match=path):
        data[2]


def test_a_part_without_pictures_and_what_was_never_learned_are_refused(corpus):
    _, images, targets = corpus
    trained = pl.col("part") == "train"
    only_tested = images.with_columns(class_label=pl.when(trained).then(pl.lit("dots")).otherwise("class_label"))
    untrained = targets.filter(~pl.col("image_id").str.starts_with("train"))
    for tables, why in (
        ((images.filter(pl.col("part") != "validation"), targets), "in the validation part"),
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
