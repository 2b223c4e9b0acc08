"""The promises of the engine hold for small published networks."""

import pytest
import torch

from fvc_lib.engine.device import Precision, recompute_activations, resolve_device
from fvc_lib.engine.random_state import forked_random_state
from fvc_lib.engine.step import BatchTransaction
from fvc_lib.engine.task import stack_samples
from fvc_lib.services.errors import StoppedError
from tests.detectors.published.networks import SMALL, SmallTasks, noise, trunk_of
from tests.kits.engine_kit import EndsOnce, same_end, stop_after, tight, weight_distance

pytestmark = [pytest.mark.detectors, pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")]

COMPUTE = resolve_device("cpu")
QUIET = {"epochs": 1, "effective_batch_size": 3, "micro_batch": 3, "learning_rate": 1e-4}  # two steps
BATCH_NORMS = ("r2plus1d", "x3d", "slowfast", "timm")  # from scratch


@pytest.fixture
def published(name, tmp_path):
    """Return tasks in double precision, because Adam turns rounding errors into whole steps."""
    return SmallTasks(name, tmp_path / "weights", double=True)


def gradients(task, micro_batch, *, recompute=False):
    """Return the engine's gradients for five clips in double precision, and the model."""
    with forked_random_state(0, COMPUTE.device):
        torch.manual_seed(5)
        model = task.build_model()
        if recompute:
            recompute_activations(model)
        model.train()
        batch = stack_samples([task.training_data[index] for index in range(5)])
        BatchTransaction(task, model, Precision(COMPUTE), COMPUTE.device).gradients(batch, micro_batch)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, model


@pytest.mark.parametrize("name", SMALL)
def test_any_split_of_a_batch_gives_the_gradients_of_the_whole(published):
    """This also holds with gradient checkpointing."""
    task = published()
    wanted, model = gradients(task, 5)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert wanted.keys() <= trained
    assert any(gradient.norm() > 0 for gradient in wanted.values())
    total = torch.cat([gradient.flatten() for gradient in wanted.values()]).norm()
    for micro_batch, recompute in ((1, False), (2, False), (2, True)):
        found, _ = gradients(task, micro_batch, recompute=recompute)
        assert found.keys() == wanted.keys()
        error = torch.cat([(found[name] - gradient).flatten() for name, gradient in wanted.items()]).norm()
        assert error <= 1e-9 * total, (micro_batch, recompute)


@pytest.mark.parametrize("name", SMALL)
def test_a_clip_s_logit_in_training_does_not_depend_on_its_batch_or_a_draw(published):
    """Stochastic depth, dropout of attention and batch norms are off; a note names networks that had batch norms."""
    with forked_random_state(0, COMPUTE.device):
        model = published().build_model().train()
        frames = noise(3, 4, SMALL[published.name].side)
        with torch.no_grad():
            together, again = model(frames), model(frames)
            alone = torch.cat([model(clip[None]) for clip in frames])
    assert together.equal(again)
    torch.testing.assert_close(alone, together, rtol=1e-9, atol=1e-9)
    assert any("group norms" in note for note in model.trunk.notes) == (published.name in BATCH_NORMS)


@pytest.mark.parametrize("name", SMALL)
def test_a_stopped_training_goes_on_exactly_and_memory_that_ends_changes_nothing(published, make_engine):
    task = published()
    whole = make_engine("whole", task=task, **QUIET).fit()
    with pytest.raises(StoppedError):
        make_engine("parts", task=task, stop=stop_after(1), **QUIET).fit()
    assert same_end(make_engine("parts", task=task, **QUIET).fit(), whole)
    for where in ("forward", "backward"):
        ends = EndsOnce(where, 2)
        state = make_engine(f"ends {where}", task=tight(task, ends, draws=False), **QUIET).fit()
        assert ends.calls >= 2
        assert state.micro_batch < 3
        assert weight_distance(state.best_model, whole.best_model) < 1e-6


@pytest.mark.parametrize(
    ("name", "num_frames", "side"),
    [
        ("r3d_18", 4, 32), ("mc3_18", 4, 32), ("r2plus1d_18", 4, 32), ("s3d", 16, 64), ("swin3d_t", 4, 64),
        ("x3d_xs", 4, 64), ("slow_r50", 4, 32), ("slowfast_r50", 8, 32), ("i3d_r50", 8, 32),
        ("timm:legacy_xception", 1, 96), ("timm:efficientnet_b4", 1, 64), ("timm:inception_v3", 1, 96),
        ("timm:vit_small_patch14_dinov2", 1, 28),
    ],
)  # fmt: skip
def test_forward_and_backward_run_on_small_clips(name, num_frames, side):
    with forked_random_state(0, COMPUTE.device):
        trunk = trunk_of(name, side=side if name.startswith("timm:") else 0).train()
        trunk(noise(1, num_frames, side)).square().sum().backward()
    without = [key for key, p in trunk.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert without == []
