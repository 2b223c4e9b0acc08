"""Detectors: heads, trained parts, weights from files, and networks in a user's file."""

import argparse

import pytest
import safetensors.torch
import torch
from torch import nn

from fvc_lib.detectors.network import (
    HEADS,
    Detector,
    PictureTrunk,
    batch_norms_to_group_norms,
    build_detector,
    path_statistics,
    trunk_stages,
    tune,
)
from fvc_lib.detectors.weights import read_weights
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.registry import DETECTORS
from fvc_lib.tasks.shared_training import functions_of

MY_NET = """
import torch
from torch import nn

class MyNet(nn.Module):
    num_frames, side, micro_batch, paper = 5, 32, 3, "mine"
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 1)
    def forward(self, frames):
        return self.line(frames.float().mean((1, 3, 4)) / 255).squeeze(1)

class MyEncoder(nn.Module):
    num_features = 3
    def forward(self, frames):
        return frames.float().mean((3, 4)) / 255
"""


CLIPS = torch.randint(0, 256, (2, 5, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def config_of(**values):
    return resolve_config(values, environ={})


@pytest.fixture
def my_net(tmp_path):
    path = tmp_path / "my_net.py"
    path.write_text(MY_NET)
    return path


@pytest.mark.parametrize("name", HEADS)
def test_a_head_gives_one_logit_per_clip_and_each_clip_its_own(name):
    torch.manual_seed(0)
    head = HEADS[name](6)
    features = torch.randn(3, 5, 6)
    logits = head(features)
    assert logits.shape == (3,)
    torch.testing.assert_close(torch.cat([head(one) for one in features.split(1)]), logits)
    logits.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in head.parameters())


def test_a_still_clip_has_a_path_without_length_and_finite_gradients():
    features = torch.ones(1, 4, 6, requires_grad=True)
    head = HEADS["path"](6)
    head(features).sum().backward()
    assert features.grad.isfinite().all()
    assert path_statistics(features.detach())[0, 0] < 1e-3


def test_path_statistics_are_lengths_and_angles():
    features = torch.tensor([[[1.0, 0.0], [2.0, 1.0], [2.0, 3.0]]])
    scale = features.norm(dim=2).mean()
    found = path_statistics(features)[0]
    assert found[0].item() == pytest.approx((2**0.5 + 2) / 2 / scale.item(), rel=1e-4)
    assert found[4].item() == pytest.approx(torch.pi / 4, rel=1e-4)


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)) for _ in range(3)))

    def forward(self, images):
        return self.blocks(self.stem(images)).mean((2, 3))


def detector():
    return Detector(PictureTrunk(Pictures(), 8), HEADS["mean"](8))


@pytest.mark.parametrize(
    ("what", "trained"),
    [
        ("head", {"head"}),
        ("norms", {"head", "stem.1", "blocks.0.1", "blocks.1.1", "blocks.2.1"}),
        ("last:1", {"head", "blocks.2.0", "blocks.2.1"}),
        ("last:2", {"head", "blocks.1.0", "blocks.1.1", "blocks.2.0", "blocks.2.1"}),
    ],
)
def test_only_what_is_asked_for_is_trained(what, trained):
    network = detector()
    tune(network, what)
    names = [name.rpartition(".")[0] for name, parameter in network.named_parameters() if parameter.requires_grad]
    assert {"head" if name.startswith("head") else name.removeprefix("trunk.network.") for name in names} == trained


def test_all_is_trained_and_more_stages_than_there_are_is_refused():
    network = detector()
    tune(network, "all")
    assert all(parameter.requires_grad for parameter in network.parameters())
    with pytest.raises(UsageError, match=rf"the network has {len(trunk_stages(network))} stages"):
        tune(network, "last:9")
    with pytest.raises(UsageError, match=r"(?i)wanted head, norms, last:N"):
        config_of(tune="some")


def test_from_scratch_batch_norms_become_group_norms_and_the_network_says_so():
    trunk = PictureTrunk(Pictures(), 8)
    assert not [part for part in trunk.modules() if isinstance(part, nn.BatchNorm2d)]
    assert "4 group norms in place of batch norms: not the published network" in trunk.notes[0]
    assert batch_norms_to_group_norms(trunk) == 0


def test_a_users_file_is_a_network(my_net):
    config = config_of(model=f"{my_net}:MyNet")
    network = build_detector(config)
    assert network(CLIPS).shape == (2,)
    spec = DETECTORS.get(config.model)
    assert (spec.num_frames, spec.side, spec.micro_batch, spec.paper, spec.family) == (5, 32, 3, "mine", "user")
    assert type(network).__qualname__ == "MyNet"


@pytest.mark.parametrize("head", ["", "gru", "path"])
def test_a_users_encoder_gets_a_head(my_net, head):
    network = build_detector(config_of(model=f"{my_net}:MyEncoder", head=head))
    assert isinstance(network, Detector)
    assert network(CLIPS).shape == (2,)


def test_a_users_file_counts_by_what_it_holds_and_not_by_where_it_lies(my_net, tmp_path):
    first = config_of(model=f"{my_net}:MyNet")
    (tmp_path / "b").mkdir()
    again = tmp_path / "b" / "my_net.py"
    again.write_text(MY_NET)
    assert config_of(model=f"{again}:MyNet").config_hash == first.config_hash
    again.write_text(MY_NET.replace("/ 255).squeeze", "/ 256).squeeze"))
    changed = config_of(model=f"{again}:MyNet")
    assert changed.config_hash != first.config_hash
    assert changed.training_values()["model"] != first.training_values()["model"]


TWO_WITH_HELPERS = """
import helpful, pieces.deep as deep
from pieces import deep as again
from torch import nn

class Net(nn.Module):
    num_frames = helpful.NUMBER

    def __init__(self):
        super().__init__()
        from pieces.deep import Block
        from later import WIDTH
        assert again is deep and Block is deep.Block
        self.head = Block(helpful.NUMBER, WIDTH)

    def forward(self, frames):
        return self.head(frames.float().mean((2, 3, 4))).mean(1)
"""


def test_modules_next_to_a_users_file_are_imported_and_an_equal_name_elsewhere_is_refused(tmp_path):
    networks, codes = [], []
    for number in (3, 5, 3):
        folder = tmp_path / f"of_{len(networks)}"
        (folder / "pieces").mkdir(parents=True)
        (folder / "net.py").write_text(TWO_WITH_HELPERS)
        (folder / "helpful.py").write_text(f"NUMBER = {number}\n")
        (folder / "later.py").write_text(f"WIDTH = {number * 2}\n")
        (folder / "pieces" / "deep.py").write_text("from torch import nn\nfrom .wide import Wide as Block\n")
        wide = f"from torch import nn\nclass Wide(nn.Linear):\n    def number(self):\n        return {number}\n"
        (folder / "pieces" / "wide.py").write_text(wide)
        networks.append(f"{folder}/net.py:Net")
    for name in (networks[0], networks[2]):  # a copy elsewhere is the same code
        network = DETECTORS.get(name).build()
        assert (network.head.in_features, network.head.out_features, network.head.number()) == (3, 6, 3)
        codes.append(functions_of(network))
    assert codes[0] == codes[1]
    with pytest.raises(UsageError, match=r"another module '\w+' is imported already, from .*Rename one of them"):
        DETECTORS.get(networks[1])
    before = DETECTORS.identity(networks[0])
    (tmp_path / "of_0" / "other.py").write_text("a file that nobody imports")
    assert DETECTORS.identity(networks[0]) == DETECTORS.identity(networks[2]) == before
    (tmp_path / "of_0" / "helpful.py").write_text("NUMBER = 40\n")
    assert DETECTORS.identity(networks[0]) != before
    assert DETECTORS.get(networks[0]).build().head.in_features == 40


@pytest.mark.parametrize(
    ("item", "text", "says"),
    [
        ("MyNett", MY_NET, "gives no class MyNett: AttributeError"),
        ("MyNet", "import no_such_package", "gives no class MyNet: ModuleNotFoundError"),
        ("MyNet", "def f(:", "gives no class MyNet: SyntaxError"),
    ],
)
def test_a_users_file_that_does_not_do_is_named_with_the_reason(my_net, item, text, says):
    my_net.write_text(text)
    with pytest.raises(UsageError, match=r"my_net\.py") as caught:
        DETECTORS.get(f"{my_net}:{item}")
    assert says in str(caught.value)


def test_a_network_with_a_head_of_its_own_refuses_another():
    with pytest.raises(UsageError, match="frame_cnn' has a head of its own"):
        build_detector(config_of(model="frame_cnn", head="gru"))


def test_what_stays_random_is_not_frozen_and_the_network_says_that_it_is_not_the_published_one():
    with pytest.raises(UsageError, match=r"tune: got 'head' for model 'dinov2_small' without weights"):
        build_detector(config_of(model="dinov2_small", tune="head", fixed_size=28))
    network = build_detector(config_of(model="dinov2_small", fixed_size=28))
    assert all(parameter.requires_grad for parameter in network.parameters())
    assert "trained from scratch, without its published weights (hub: facebook/dinov2-small)" in network.trunk.notes[-1]


def test_weights_that_are_named_are_loaded_or_refused_and_never_passed_over(my_net, tmp_path):
    torch.save({"nothing.weight": torch.zeros(1)}, tmp_path / "w.pth")
    with pytest.raises(UsageError, match=r"w\.pth' does not fit the network \(MyEncoder\)"):
        build_detector(config_of(model=f"{my_net}:MyEncoder", model_weights=str(tmp_path / "w.pth")))


class Malicious:
    def __reduce__(self):
        return exec, ("raise SystemExit('ran')",)


def test_weights_that_are_refused_say_why_and_never_advise_to_load_them_in_another_way(tmp_path):
    good = torch.nn.Linear(2, 2).state_dict()
    held = {
        "argparse.Namespace": {"state_dict": good, "args": argparse.Namespace(a=1)},
        "exec": Malicious(),
    }
    for name, content in held.items():
        torch.save(content, tmp_path / "w.pt")
        with pytest.raises(UsageError, match=f"{name}.* can run code .*state_dict") as caught:
            read_weights(tmp_path / "w.pt")
        assert "weights_only" not in str(caught.value)
    texts = {
        "a web page": b"<!DOCTYPE html><html>",
        "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0",
        "an empty file": b"",
        "no file of torch.save, or damaged": b"\x89HDF\r\n\x1a\n" + bytes(99),
    }
    for words, content in texts.items():
        for name in ("w.pt", "w.safetensors"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(UsageError, match=rf"{name}'.*{words}") as caught:
                read_weights(tmp_path / name)
            assert "weights_only" not in str(caught.value)


def test_weights_are_read_by_what_they_are_not_by_their_ending(tmp_path):
    good = torch.nn.Linear(2, 2).state_dict()
    torch.save(good, tmp_path / "a.safetensors")
    safetensors.torch.save_file(good, tmp_path / "b.pt")
    for name in ("a.safetensors", "b.pt"):
        assert read_weights(tmp_path / name)["weight"].equal(good["weight"])


def test_a_frozen_trunk_is_saved_as_the_digest_of_its_weights_and_refuses_another_one():
    detector = build_detector(config_of(model="efficientnet_lite0"))
    saved = detector.state_dict()
    assert {name.partition(".")[0] for name in saved} == {"trunk", "head"}
    assert [name for name in saved if name.startswith("trunk.")] == ["trunk.digest"]
    again = build_detector(config_of(model="efficientnet_lite0"))
    again.load_state_dict(saved)
    frames = torch.randint(0, 256, (1, 2, 3, 64, 64), dtype=torch.uint8)
    assert again.eval()(frames).equal(detector.eval()(frames))
    with pytest.raises(UsageError, match="frozen trunk"):
        again.load_state_dict(saved | {"trunk.digest": saved["trunk.digest"].flip(0)})
    trained = build_detector(config_of(model="efficientnet_lite0", tune="all"))
    assert "trunk.digest" not in trained.state_dict()
    with pytest.raises(RuntimeError, match="trunk"):
        trained.load_state_dict(saved)
