"""What may be added to the training of task video: what it does, and that it keeps the engine's promises."""

import pytest
import torch
from torch.nn import functional as F

from fvc_lib.detectors.network import trunk_stages
from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.task import Batch
from fvc_lib.services.errors import StoppedError
from fvc_lib.services.parameters import resolve_config
from fvc_lib.tasks.mixing import MixSettings
from fvc_lib.tasks.video.data import ClipDataset, ClipRow
from fvc_lib.tasks.video.training import VideoTask
from tests.kits.engine_kit import latest_weights, same_end, stop_after
from tests.kits.task_kit import DrawnClips

CPU = resolve_device("cpu")
LOGITS = torch.tensor([-3.0, 0.4, 0.0, 6.0])
LABELS = torch.tensor([0.0, 0.0, 1.0, 1.0])


def loss_of(target=None, **settings):
    task = VideoTask(None, None, config=resolve_config(settings, environ={}), weights=(0.7, 1.6))
    mixed = {} if target is None else {"target": target}
    return task.loss({"logits": LOGITS}, Batch(tuple("abcd"), {"label": LABELS, **mixed}))


@pytest.mark.parametrize("kind", ["recipe"], indirect=True)
@pytest.mark.parametrize("stops", [[2, 0, 3]], ids=str)
def test_a_training_with_all_of_it_that_is_stopped_goes_on_to_the_same_bits(make_engine, tmp_path, stops):
    whole = make_engine("whole")
    whole.fit()
    for after in stops:
        with pytest.raises(StoppedError):
            make_engine("parts", stop=stop_after(after)).fit()
    assert same_end(make_engine("parts").fit(), whole.state)
    wanted = latest_weights(tmp_path, "whole")
    assert all(tensor.equal(wanted[name]) for name, tensor in latest_weights(tmp_path, "parts").items())


def test_the_loss_is_torch_s_to_the_bit_and_smoothing_moves_half_of_its_share_to_the_other_class():
    weights = torch.tensor([0.7, 0.7, 1.6, 1.6])
    wanted = F.binary_cross_entropy_with_logits(LOGITS, LABELS, weights, reduction="sum")
    found = loss_of()
    assert found.total.equal(wanted)
    assert found.weight.equal(weights.sum())
    smoothed = F.binary_cross_entropy_with_logits(LOGITS, 0.8 * LABELS + 0.1, weights, reduction="sum")
    torch.testing.assert_close(loss_of(label_smoothing=0.2).total, smoothed)


def asked(**settings):
    return resolve_config({"model": "r2plus1d_small", **settings}, environ={})


@pytest.mark.parametrize("tune", ["all", "norms", "last:2"])
def test_stages_are_freed_from_the_top_and_no_more_than_is_to_be_trained(tune):
    config = asked(tune=tune, freeze_backbone_epochs=1, unfreeze_stage_epochs=2)
    task = VideoTask(None, None, config=config, weights=(1.0, 1.0))
    model = task.build_model()
    wanted = {parameter for parameter in model.parameters() if parameter.requires_grad}
    stages = [wanted.intersection(stage) for stage in trunk_stages(model)]
    stages = [stage for stage in stages if stage]
    assert len(stages) > 1
    for epoch, number in ((0, 0), (1, 1), (2, 1), (3, 2), (50, len(stages)), (0, 0)):
        task.begin_epoch(model, epoch)
        trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
        assert trained - set(model.head.parameters()) == set().union(*stages[len(stages) - number :])
        assert set(model.head.parameters()) <= trained <= wanted


def mixed_clips(**settings):
    rows = [ClipRow(str(number), 0, number % 2) for number in range(12)]
    return ClipDataset(DrawnClips(), rows, mixing=MixSettings(**settings), seed=5)


def test_a_mixed_clip_is_mixed_alike_in_all_frames_and_so_is_its_target():
    own = ClipDataset(DrawnClips(), mixed_clips().rows)
    data = mixed_clips(share=1.0, cutmix_alpha=1.0).at_epoch(2)
    seen = set()
    for index in range(len(data)):
        sample, alone = data[index].tensors, own[index].tensors
        kept = (sample["frames"] == alone["frames"]).all(1)  # (T, S, S): pixels that equal the partner's are few
        assert sample["label"] == alone["label"]
        share = kept[0].float().mean().item()
        assert (kept[0] == kept[1]).float().mean() > 0.98
        partner = sample["target"] if alone["label"] == 0 else 1 - sample["target"]  # the other class's share
        assert partner.item() == 0 or partner.item() == pytest.approx(1 - share, abs=0.03)
        seen.add(round(partner.item(), 3))
    assert len(seen) > 3
    assert "target" not in own[0].tensors


def test_what_a_clip_is_mixed_with_depends_on_epoch_and_seed_alone():
    data = mixed_clips(share=0.5, mixup_alpha=0.4)
    alone, together = data.at_epoch(1)[4].tensors, data.at_epoch(1).__getitems__([3, 4])
    assert all(tensor.equal(together.tensors[name][1]) for name, tensor in alone.items())
    targets = [tuple(data.at_epoch(epoch).__getitems__(range(12)).tensors["target"].tolist()) for epoch in (1, 1, 2)]
    assert targets[0] == targets[1] != targets[2]
    other = ClipDataset(DrawnClips(), data.rows, mixing=MixSettings(0.5, 0.4), seed=6).at_epoch(1)
    assert tuple(other.__getitems__(range(12)).tensors["target"].tolist()) != targets[0]


def test_the_loss_of_a_mixture_is_that_of_both_clips_by_their_shares():
    target = torch.tensor([0.0, 0.25, 1.0, 0.5])
    found = loss_of(target)
    as_real, as_fake = (F.binary_cross_entropy_with_logits(LOGITS, LABELS * 0 + k, reduction="none") for k in (0, 1))
    torch.testing.assert_close(found.total, (0.7 * (1 - target) * as_real + 1.6 * target * as_fake).sum())
    torch.testing.assert_close(found.weight, (0.7 * (1 - target) + 1.6 * target).sum())
