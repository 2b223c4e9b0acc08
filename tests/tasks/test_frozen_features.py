"""A frozen trunk's features are computed once, and training on them says what training on the clips says."""

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

from fvc_lib.detectors.network import PictureTrunk
from fvc_lib.detectors.weights import load_weights
from fvc_lib.execution.run.shards import Shard
from fvc_lib.services.errors import DataError, StoppedError, UsageError
from fvc_lib.services.registry import DETECTORS, DetectorSpec, TrunkOptions
from fvc_lib.services.tables import AUGMENTED, FOLDS, PREDICTIONS, read_table
from fvc_lib.tasks.video import features
from fvc_lib.tasks.video.data import made_clips, read_fold
from fvc_lib.tasks.video.features import FeatureSource, with_features
from fvc_lib.tasks.video.training import fold_training, train_fold
from fvc_lib.tasks.video.verdicts.scoring import networks_of_run
from fvc_lib.video.clips.store import prune_set, stored_sets

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


def source_of(tiny, stop=lambda: False, begin=0.0):
    made = made_clips(tiny.paths)
    return with_features(read_fold(tiny.paths, tiny.config, 0)[0], made, tiny.config, CPU, begin=begin, stop=stop)


def test_scores_are_those_of_training_on_the_clips_themselves(frozen, list_log, monkeypatch):
    train_fold(frozen.paths, frozen.config, 0, metric_log=list_log())
    by_features = read_table(frozen.paths.predictions(0), PREDICTIONS)
    elsewhere = frozen.paths.root.parent / "run_1"
    monkeypatch.setattr("fvc_lib.tasks.video.training.with_features", lambda source, *_, **__: source)
    (elsewhere / "tables").mkdir(parents=True)
    for path in (frozen.paths.folds, frozen.paths.augmented_metadata):
        (elsewhere / "tables" / path.name).write_bytes(path.read_bytes())
    train_fold(type(frozen.paths)(elsewhere), frozen.config, 0, metric_log=list_log())
    by_clips = read_table(type(frozen.paths)(elsewhere).predictions(0), PREDICTIONS)
    assert by_features["logit"].to_numpy() == pytest.approx(by_clips["logit"].to_numpy(), abs=1e-4)
    assert by_features["logit"].n_unique() > 5


def test_mixed_clips_are_refused_where_training_sees_features(frozen, list_log):
    with pytest.raises(UsageError, match=r"mixup_alpha, cutmix_alpha: .*frozen trunk.*tune norms"):
        train_fold(frozen.paths, frozen.with_config(mixup_alpha=0.2).config, 0, metric_log=list_log())


def test_every_clip_goes_through_the_trunk_once_whoever_asks(frozen, monkeypatch):
    seen = []
    computed = features._computed

    def noted(trunk, source, clips, *rest):
        seen.extend(clips)
        return computed(trunk, source, clips, *rest)

    monkeypatch.setattr(features, "_computed", noted)
    first, second = source_of(frozen), source_of(frozen, begin=0.5)
    made = read_table(frozen.paths.augmented_metadata, AUGMENTED)
    assert isinstance(first, FeatureSource)
    assert first == second
    assert len(set(seen)) == made.height
    assert len(seen) == made.height + 2  # and one clip each time, for the shape
    assert first.feature_shape == (4, 16)


@pytest.mark.parametrize("is_gpu", [False, True])
def test_any_number_of_shards_computes_the_same_features_to_the_bit(frozen, monkeypatch, is_gpu):
    if is_gpu:  # passes of several clips, filled up; on a CPU they show what they would there
        monkeypatch.setattr(features, "clips_in_a_pass", lambda _device, batch_size: batch_size)
    made, source = made_clips(frozen.paths), read_fold(frozen.paths, frozen.config, 0)[0]
    found = []
    for of in (1, 2, 7):
        for number in reversed(range(of)):
            mine = [each for each in made if Shard(number, of).has(each[0])]
            done: list[tuple[int, int]] = []
            there = with_features(
                source, mine, frozen.config, CPU, begin=0.3, stop=lambda: False,
                progress=lambda *each, done=done: done.append(each),
            )  # fmt: skip
            assert done[-1] == (len(mine), len(mine))
        found.append({path.name: path.read_bytes() for path in there.folder.rglob("*.npy")})
        prune_set(next(each for each in stored_sets(frozen.config.cache_dir) if each.kind == "features"))
    assert len(found[0]) == len(made) == 72
    assert found[0] == found[1] == found[2]


def test_a_stop_leaves_what_was_computed_and_the_next_attempt_goes_on(frozen):
    asked = iter(range(100))
    with pytest.raises(StoppedError, match=r"features of 2 of 72 clips computed"):
        source_of(frozen, stop=lambda: next(asked) >= 2)
    assert len(list(frozen.store.decode_folder.rglob("features_*/*/*.npy"))) == 2
    source = source_of(frozen)
    assert len(list(source.folder.rglob("*.npy"))) == 72


def test_other_weights_have_features_of_their_own(frozen, tmp_path):
    before = source_of(frozen)
    torch.manual_seed(1)
    torch.save(Pooled().state_dict(), tmp_path / "weights.pt")
    after = source_of(frozen)
    clip = (read_table(frozen.paths.folds, FOLDS)["video_id"][0], 0, 0)
    assert before.folder != after.folder
    assert not torch.equal(before.features([clip]), after.features([clip]))


@pytest.mark.parametrize(
    "change", [{"tune": "all"}, {"model_weights": ""}, {"model": "frame_cnn", "model_weights": ""}]
)
def test_a_trunk_that_is_trained_or_random_or_none_sees_the_clips(frozen, change):
    assert not isinstance(source_of(frozen.with_config(**change)), FeatureSource)


def test_without_being_asked_a_fold_is_its_clips(frozen):
    batch = fold_training(frozen.paths, frozen.config, 0).task.training_data[0]
    assert set(batch.tensors) == {"frames", "label"}


def test_a_damaged_file_is_named_with_what_to_do(frozen):
    source = source_of(frozen)
    path = next(iter(source.folder.rglob("*.npy")))
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(DataError, match=rf"{path.name}.*Delete the file"):
        source.features([(path.stem[:-2], int(path.stem[-1]), 0)])


def test_out_of_memory_halves_the_batch_and_loses_nothing(frozen, monkeypatch):
    computed, sizes = features._computed, []

    def short(trunk, source, clips, *rest):
        sizes.append(len(clips))
        if len(clips) > 2:
            raise MemoryError("of the test")
        return computed(trunk, source, clips, *rest)

    monkeypatch.setattr(features, "_computed", short)
    monkeypatch.setattr(features, "clips_in_a_pass", lambda _device, batch_size: batch_size)  # as on a GPU
    source = source_of(frozen)
    assert len(list(source.folder.rglob("*.npy"))) == 72
    assert sizes[:3] == [1, 4, 2]


def test_features_are_listed_and_pruned_with_the_clips(frozen):
    source = source_of(frozen)
    (found,) = [each for each in stored_sets(frozen.config.cache_dir) if each.kind == "features"]
    assert found.folder == source.folder
    assert found.size_bytes > sum(path.stat().st_size for path in source.folder.rglob("*.npy"))
    assert found.settings["model"] == "tiny_frozen"
    prune_set(found)
    assert not source.folder.exists()


def test_the_record_says_where_the_weights_came_from(frozen, list_log):
    outcome = train_fold(frozen.paths, frozen.config, 0, metric_log=list_log())
    network = outcome.network
    assert network.weights == frozen.config.model_weights
    assert (network.weights_licence, network.num_frozen) == ("public domain", 3 * 8 * 9 + 8)
    assert "Weights from" in outcome.sentence()
    assert network.weights_sha256[:12] in outcome.sentence()


def test_how_many_clips_at_once_is_planned_once_where_some_are_missing(frozen):
    asked: list[bool] = []

    def planned(missing: bool) -> int:
        asked.append(missing)
        return 2

    made = made_clips(frozen.paths)
    source = read_fold(frozen.paths, frozen.config, 0)[0]
    for _ in range(2):
        with_features(source, made, frozen.config, CPU, begin=0.0, stop=lambda: False, batch_size=planned)
    assert asked == [True, False]


@pytest.mark.long
def test_ranks_share_the_features_and_who_starts_them_computes_none(tiny_training, list_log, monkeypatch):
    monkeypatch.setattr("fvc_lib.tasks.video.training.with_features", lambda *_, **__: pytest.fail("in the starter"))
    tiny = tiny_training.with_config(model="efficientnet_lite0", epochs=1, num_ranks=2, shuffled_label_control=False)
    tiny.paths.params_yaml.parent.mkdir(parents=True, exist_ok=True)
    tiny.paths.params_yaml.write_text(tiny.config.to_yaml())
    outcome = train_fold(tiny.paths, tiny.config, 0, metric_log=list_log())
    assert outcome.num_ranks == 2
    stored = list(tiny.store.decode_folder.rglob("features_*/*/*.npy"))
    assert len(stored) == len(made_clips(tiny.paths))


def test_other_pixels_code_or_devices_have_features_of_their_own(frozen, monkeypatch):
    source, config = read_fold(frozen.paths, frozen.config, 0)[0], frozen.with_config(model="frame_cnn").config
    trunk, other = (PictureTrunk(Pooled(), 16, mean=mean) for mean in ((0.5, 0.5, 0.5), (0.4, 0.5, 0.5)))
    found = [features._identity(trunk, source, config, CPU), features._identity(other, source, config, CPU)]
    found.append(features._identity(trunk, source, config, torch.device("cuda")))
    assert found[0] == features._identity(trunk, source, config, torch.device("cpu"))
    monkeypatch.setattr(features, "code_hash", lambda module, within: f"{module} was mended")
    found.append(features._identity(trunk, source, config, CPU))
    assert len(set(found)) == 4


def test_a_finished_run_asked_again_says_of_clips_what_it_said_by_their_features(frozen, list_log):
    train_fold(frozen.paths, frozen.config, 0, metric_log=list_log())
    frozen.paths.params_yaml.write_text(yaml.safe_dump(frozen.config.model_dump(mode="json")))
    stored = read_table(frozen.paths.predictions(0), PREDICTIONS)
    clips = np.stack([frozen.store.read(video_id, 0)[None] for video_id in stored["video_id"]])
    logits = networks_of_run(frozen.paths, [0]).logits(0, clips)
    np.testing.assert_allclose(logits, stored["logit"].to_numpy(), atol=1e-5)
