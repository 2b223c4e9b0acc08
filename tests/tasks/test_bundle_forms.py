"""A bundle's networks in a form that needs no code of ours: they say what the run's say, or nothing is written."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fvc_lib import CHECKOUT, load_detector
from fvc_lib.detectors.network import build_detector
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import INDEX, read_table
from fvc_lib.tasks.bundle_folder import Standing
from fvc_lib.tasks.forms import (
    ONNX,
    TORCH_EXPORT,
    ClipsToCompare,
    check_packages,
    clips_to_compare,
    write_form,
)
from fvc_lib.tasks.video.verdicts.bundle import write_bundle
from fvc_lib.video.clips.store import ClipStore
from tests.kits.scored_run import trained_run

STANDING = Standing(standing="not shown", sentences=["Nothing is shown of the model."], scores=[])
pytestmark = pytest.mark.verdicts  # torch.export takes half a minute, too
FORMS = [TORCH_EXPORT, ONNX]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunPaths:
    made = trained_run(tmp_path_factory.mktemp("forms"))
    made.run_json.write_text("{}")
    return made


def answer_of(path: Path):
    """The file as a stranger reads it: from uint8 (B, T, 3, S, S) to (B,)."""
    if path.suffix == ".pt2":
        program = torch.export.load(path).module()
        return lambda pixels: program(torch.from_numpy(pixels)).detach().numpy()
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda pixels: session.run(None, {"frames": pixels})[0]


@pytest.mark.parametrize("form", FORMS)
def test_a_bundle_in_another_form_gives_the_scores_of_the_run(run, tmp_path, form):
    record, told = write_bundle(run, tmp_path / "bundle", STANDING, "card\n", form=form)
    detector, config = load_detector(tmp_path / "bundle"), ClipStore.of(load_detector(run.root).networks.config)
    assert "5 clips of the run" in told
    assert told in (tmp_path / "bundle" / "README.md").read_text()
    video = read_table(run.index, INDEX).row(0, named=True)
    clips = np.stack([config.read(video["video_id"], 0)] * 7)
    for number, fold in enumerate(record.folds):
        name = f"model/fold_{number}{'.onnx' if form == ONNX else '.pt2'}"
        assert name in json.loads((tmp_path / "bundle" / "digests.json").read_text())["files"]
        logits = answer_of(tmp_path / "bundle" / name)(clips)
        scores = 1 / (1 + np.exp(-(logits + fold.prior_logit) / fold.temperature))
        expected = detector.networks.score(number, detector.networks.logits(number, clips[:1, None])[0])
        assert np.abs(scores - expected).max() < 1e-4
        content = (tmp_path / "bundle" / name).read_bytes()
        assert str(CHECKOUT).encode() not in content
        assert str(run.root.parents[2]).encode() not in content
        (tmp_path / "bundle" / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(UsageError, match=f"{name}' is damaged"):
            load_detector(tmp_path / "bundle")
        (tmp_path / "bundle" / name).write_bytes(content)


@pytest.mark.parametrize("form", [TORCH_EXPORT, ONNX])
@pytest.mark.parametrize(("model", "side"), [("r2plus1d_small", 32), ("efficientnet_lite0", 64)])
def test_networks_of_the_project_are_the_same_in_another_form(tmp_path, model, side, form):
    config = resolve_config({"model": model, "num_frames": 2, "fixed_size": side, "device": "cpu"}, environ={})
    torch.manual_seed(0)
    network = build_detector(config).eval()
    pixels = np.random.default_rng(0).integers(0, 256, (6, 2, 3, side, side), np.uint8)
    path = tmp_path / ("network.onnx" if form == ONNX else "network.pt2")
    assert write_form(network, form, path, ClipsToCompare(pixels, are_real=False), model) < 1e-4
    with torch.no_grad():
        expected = network(torch.from_numpy(pixels)).numpy()
    assert np.abs(answer_of(path)(pixels) - expected).max() < 1e-4
    assert np.ptp(expected) > 1e-3


class Branches(nn.Module):
    """Another way for each clip: nothing that one program can say."""

    def forward(self, frames: Tensor) -> Tensor:
        return torch.stack([clip.float().mean() if clip[0, 0, 0, 0] > 99 else clip.float().amax() for clip in frames])


class Counts(nn.Module):
    """An answer that depends on how often it was asked."""

    asked = 0

    def forward(self, frames: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            self.asked += 1
        return frames.float().mean((1, 2, 3, 4)) / 255 + self.asked


@pytest.mark.parametrize(
    ("network", "why"),
    [(Branches(), "a Branches as torch_export: cannot be written"), (Counts(), "does not say what the network says")],
)
def test_a_network_that_is_not_the_same_in_another_form_is_refused_by_name(tmp_path, network, why):
    clips = ClipsToCompare(np.full((5, 2, 3, 8, 8), 100, np.uint8), are_real=False)
    name = f"a {type(network).__name__}"
    with pytest.raises(UsageError, match=f"^{name} .*") as caught:
        write_form(network, TORCH_EXPORT, tmp_path / "network.pt2", clips, name)
    assert why in str(caught.value)


def test_a_network_that_is_refused_leaves_no_bundle(run, tmp_path, monkeypatch):
    def refused(*_):
        raise RuntimeError("no such operator")

    monkeypatch.setattr("fvc_lib.tasks.forms._exported", refused)
    with pytest.raises(UsageError, match=r"network 'frame_cnn', fold 0 as torch_export: .*no such operator"):
        write_bundle(run, tmp_path / "bundle", STANDING, "card\n", form=TORCH_EXPORT)
    assert not list(tmp_path.iterdir())


def test_clips_are_drawn_where_the_runs_are_gone(run, tmp_path):
    store = ClipStore.of(load_detector(run.root).networks.config)
    of_run = clips_to_compare(run, store)
    assert (of_run.pixels.shape, of_run.are_real) == ((5, 4, 3, 24, 24), True)
    elsewhere = ClipStore(tmp_path, store.num_frames, store.fixed_size, store.augmentation, store.view)
    drawn = clips_to_compare(run, elsewhere)
    assert (drawn.pixels.shape, drawn.pixels.dtype, drawn.are_real) == (of_run.pixels.shape, np.uint8, False)


def test_without_its_packages_the_error_says_how_to_get_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    check_packages(TORCH_EXPORT)
    with pytest.raises(UsageError, match=r"--format onnx needs the package 'onnx'.*make setup-verdicts"):
        check_packages(ONNX)
