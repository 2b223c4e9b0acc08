"""A frozen trunk's features are computed once, and training on them gives the scores of training on the clips."""

import shutil

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

from fvc_lib.detectors.network import PictureTrunk
from fvc_lib.detectors.weights import load_weights
from fvc_lib.execution.run.shards import Shard
from fvc_lib.services.errors import StoppedError, UsageError
from fvc_lib.services.registry import DETECTORS, DetectorSpec, TrunkOptions
from fvc_lib.services.tables import AUGMENTED, FOLDS, PREDICTIONS, read_table
from fvc_lib.tasks.video import features
from fvc_lib.tasks.video.data import made_clips
from fvc_lib.tasks.video.features import FeatureSource, with_features
from fvc_lib.tasks.video.predicting import networks_of_run
from fvc_lib.tasks.video.training import fold_training, read_fold, train_fold
from tests.faults.conftest import elsewhere

CPU = torch.device("cpu")


class Pooled(nn.Module):
    """A convolution, its mean and its spread."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, 2)

    def forward(self, images: Tensor) -> Tensor:
        found = self.convolution(images).abs()
        return torch.cat([found.mean((2, 3)), found.std((2, 3))], 1)


def build(options: TrunkOptions) -> PictureTrunk:
    network = Pooled()
    weights = None if options.weights is None else load_weights(network, options.weights, licence="public domain")
    return PictureTrunk(network, 16, weights=weights)


@pytest.fixture
def frozen(tiny_training, tmp_path, monkeypatch):
    """A tiny run whose network is a trunk with weights from a file."""
    spec = DetectorSpec(
        "tiny_frozen", "test", "none", "none", 4, 24, "none", micro_batch=5, build_trunk=build, tune="head"
    )
    DETECTORS.names()
    monkeypatch.setitem(DETECTORS._items, "tiny_frozen", spec)
    torch.manual_seed(0)
    torch.save(Pooled().state_dict(), tmp_path / "weights.pt")
    return tiny_training.with_config(
        model="tiny_frozen", model_weights=str(tmp_path / "weights.pt"), shuffled_label_control=False
    )


def source_of(tiny, chosen=lambda clip: True, **options):
    """The features of the run's ``chosen`` clips."""
    made = [clip for clip in made_clips(read_table(tiny.paths.augmented_metadata, AUGMENTED)) if chosen(clip)]
    given = {"begin": 0.0, "stop": lambda: False, **options}
    return with_features(read_fold(tiny.paths, tiny.config, 0)[0], made, tiny.config, CPU, **given)


def test_scores_are_those_of_training_on_the_clips_and_of_the_network_asked_again(
    frozen, list_log, monkeypatch, tmp_path
):
    outcome = train_fold(frozen.paths, frozen.config, 0, metric_log=list_log())
    by_features = read_table(frozen.paths.predictions(0), PREDICTIONS)
    network = outcome.network
    assert network.weights.startswith(f"{frozen.config.model_weights} (SHA-256 ")
    assert network.weights_licence == "public domain"
    assert network.num_frozen == 3 * 8 * 9 + 8
    frozen.paths.params_yaml.write_text(yaml.safe_dump(frozen.config.model_dump(mode="json")))
    clips = np.stack([frozen.store.read(video_id, 0)[None] for video_id in by_features["video_id"]])
    logits = networks_of_run(frozen.paths, [0]).logits((0,), clips)[:, 0]
    np.testing.assert_allclose(logits, by_features["logit"].to_numpy(), atol=1e-5)
    other = elsewhere(frozen, tmp_path / "other" / "run_1")
    monkeypatch.setattr("fvc_lib.tasks.video.training.with_features", lambda source, *_, **__: source)
    train_fold(other, frozen.config, 0, metric_log=list_log())
    by_clips = read_table(other.predictions(0), PREDICTIONS)
    np.testing.assert_allclose(by_features["logit"].to_numpy(), by_clips["logit"].to_numpy(), atol=1e-4)
    assert by_features["logit"].n_unique() > 5


def test_mixed_clips_are_refused_where_training_sees_features(frozen, list_log):
    with pytest.raises(UsageError, match=r"mixup_alpha, cutmix_alpha, .*frozen trunk.*tune norms"):
        train_fold(frozen.paths, frozen.with_config(mixup_alpha=0.2).config, 0, metric_log=list_log())


@pytest.mark.parametrize("is_gpu", [False, True])
def test_any_number_of_shards_computes_the_same_features_to_the_bit(frozen, monkeypatch, is_gpu):
    if is_gpu:  # passes of several clips, filled up; on a CPU they show what they would there
        monkeypatch.setattr(features, "clips_in_a_pass", lambda _device, batch_size: batch_size)
    found = []
    for of in (1, 3):
        for number in reversed(range(of)):
            shard = Shard(number, of)
            there = source_of(frozen, lambda clip, shard=shard: shard.has(clip[0]), begin=0.3)
        found.append({path.name: path.read_bytes() for path in there.folder.rglob("*.npy")})
        shutil.rmtree(there.folder)
    assert len(found[0]) == 72
    assert found[0] == found[1]


def test_a_stop_leaves_the_computed_features_and_the_next_attempt_goes_on(frozen):
    asked = iter(range(100))
    with pytest.raises(StoppedError, match=r"features of 2 of 72 clips computed"):
        source_of(frozen, stop=lambda: next(asked) >= 2)
    assert len(list(frozen.store.decode_folder.rglob("features_*/*/*.npy"))) == 2
    assert len(list(source_of(frozen).folder.rglob("*.npy"))) == 72


def test_other_weights_pixels_code_or_devices_have_features_of_their_own(frozen, tmp_path, monkeypatch):
    before = source_of(frozen)
    torch.manual_seed(1)
    torch.save(Pooled().state_dict(), tmp_path / "weights.pt")
    after, clip = source_of(frozen), (read_table(frozen.paths.folds, FOLDS)["video_id"][0], 0, 0)
    assert before.folder != after.folder
    assert not torch.equal(before.features([clip]), after.features([clip]))
    config, cuda = frozen.with_config(model="frame_cnn").config, torch.device("cuda")
    trunk, other = (
        PictureTrunk(Pooled(), 16, colours=(mean, (0.2, 0.2, 0.2))) for mean in ((0.5, 0.5, 0.5), (0.4, 0.5, 0.5))
    )
    names = [
        features._identity(of, frozen.store, config, device)
        for of, device in ((trunk, CPU), (other, CPU), (trunk, cuda))
    ]
    monkeypatch.setattr(features, "code_hash", lambda module, within: f"{module} was mended")
    names.append(features._identity(trunk, frozen.store, config, CPU))
    assert len(set(names)) == 4


@pytest.mark.parametrize(
    "change", [{"tune": "all"}, {"model_weights": ""}, {"model": "frame_cnn", "model_weights": ""}]
)
def test_a_trunk_that_is_trained_or_random_or_none_sees_the_clips(frozen, change):
    assert not isinstance(source_of(frozen.with_config(**change)), FeatureSource)
    batch = fold_training(frozen.paths, frozen.config, 0).task.training_data[0]
    assert set(batch.tensors) == {"frames", "label"}  # nothing is computed unless asked


def test_out_of_memory_halves_the_batch_and_loses_nothing(frozen, monkeypatch):
    computed, sizes = features._computed, []

    def short(trunk, source, clips, *rest):
        sizes.append(len(clips))
        if len(clips) > 2:
            raise MemoryError("of the test")
        return computed(trunk, source, clips, *rest)

    monkeypatch.setattr(features, "_computed", short)
    monkeypatch.setattr(features, "clips_in_a_pass", lambda _device, batch_size: batch_size)  # as on a GPU
    assert len(list(source_of(frozen).folder.rglob("*.npy"))) == 72
    assert sizes[:3] == [1, 4, 2]
