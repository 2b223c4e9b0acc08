"""A bundle's networks as ONNX: they give the scores of the run, or nothing is written."""

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
from fvc_lib.tasks.bundle import write_bundle
from fvc_lib.tasks.forms import check_packages, clips_to_compare, write_onnx
from fvc_lib.tasks.predicting import predictor_of
from fvc_lib.video.clips.store import ClipStore
from tests.kits.scored_run import trained_run

pytestmark = pytest.mark.verdicts  # torch.export takes half a minute, too


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunPaths:
    made = trained_run(tmp_path_factory.mktemp("forms"))
    made.run_json.write_text("{}")
    return made


def answer_of(path: Path, pixels: np.ndarray) -> np.ndarray:
    """Return the answer of the file as a stranger reads it, (B,) of uint8 (B, T, 3, S, S)."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {"frames": pixels})[0]


def test_a_bundle_in_another_form_gives_the_scores_of_the_run(run, tmp_path):
    told = write_bundle(predictor_of(run), tmp_path / "bundle", "card\n", form="onnx", paths=run)
    detector = load_detector(tmp_path / "bundle")
    assert "5 clips of the run" in told
    assert told in (tmp_path / "bundle" / "README.md").read_text()
    video = read_table(run.index, INDEX).row(0, named=True)
    clips = np.stack([ClipStore.of(load_detector(run.root).config).read(video["video_id"], 0)] * 7)
    record = json.loads((tmp_path / "bundle" / "bundle.json").read_text())
    for number, fold in enumerate(record["section"]["folds"]):
        name = f"model/fold_{number}.onnx"
        assert name in json.loads((tmp_path / "bundle" / "digests.json").read_text())["files"]
        logits = answer_of(tmp_path / "bundle" / name, clips)
        scores = 1 / (1 + np.exp(-(logits + fold["prior_logit"]) / fold["temperature"]))
        expected = detector.networks.score(number, detector.networks.logits(number, clips[:1, None])[0])
        assert np.abs(scores - expected).max() < 1e-4
        content = (tmp_path / "bundle" / name).read_bytes()
        assert str(CHECKOUT).encode() not in content
        assert str(run.root.parents[2]).encode() not in content
        (tmp_path / "bundle" / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(UsageError, match=name):
            load_detector(tmp_path / "bundle")
        (tmp_path / "bundle" / name).write_bytes(content)


@pytest.mark.parametrize(("model", "side"), [("r2plus1d_small", 32), ("efficientnet_lite0", 64)])
def test_networks_of_the_project_are_the_same_in_another_form(tmp_path, model, side):
    config = resolve_config({"model": model, "num_frames": 2, "fixed_size": side, "device": "cpu"}, environ={})
    torch.manual_seed(0)
    network = build_detector(config).eval()
    pixels = np.random.default_rng(0).integers(0, 256, (6, 2, 3, side, side), np.uint8)
    assert write_onnx(network, tmp_path / "network.onnx", pixels, "6 clips", model) < 1e-4
    with torch.no_grad():
        expected = network(torch.from_numpy(pixels)).numpy()
    assert np.abs(answer_of(tmp_path / "network.onnx", pixels) - expected).max() < 1e-4
    assert np.ptp(expected) > 1e-3


class Branches(nn.Module):
    """Another way for each clip: no program can hold it."""

    def forward(self, frames: Tensor) -> Tensor:
        return torch.stack([clip.float().mean() if clip[0, 0, 0, 0] > 99 else clip.float().amax() for clip in frames])


class Counts(nn.Module):
    """An answer that depends on how often it was asked."""

    asked = 0

    def forward(self, frames: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            self.asked += 1
        return frames.float().mean((1, 2, 3, 4)) / 255 + self.asked


@pytest.mark.parametrize(("network", "why"), [(Branches(), "cannot be written"), (Counts(), "an output differs by")])
def test_a_network_that_is_not_the_same_in_another_form_is_refused_by_name(tmp_path, network, why):
    name = f"a {type(network).__name__}"
    with pytest.raises(UsageError, match=f"^{name} .*{why}"):
        write_onnx(network, tmp_path / "network.onnx", np.full((5, 2, 3, 8, 8), 100, np.uint8), "5 clips", name)


def test_a_network_that_is_refused_leaves_no_bundle(run, tmp_path, monkeypatch):
    def refused(*_):
        raise RuntimeError("no such operator")

    monkeypatch.setattr("fvc_lib.tasks.forms._exported", refused)
    with pytest.raises(UsageError, match=r"network 'frame_cnn', fold 0 .*no such operator"):
        write_bundle(predictor_of(run), tmp_path / "bundle", "card\n", form="onnx", paths=run)
    assert not list(tmp_path.iterdir())


def test_clips_are_random_where_the_runs_are_gone(run, tmp_path):
    store = ClipStore.of(load_detector(run.root).config)
    of_run, described = clips_to_compare(run, store)
    assert (of_run.shape, described) == ((5, 4, 3, 24, 24), "5 clips of the run")
    elsewhere = ClipStore(tmp_path, store.num_frames, store.fixed_size, store.augmentation, store.view)
    drawn, described = clips_to_compare(run, elsewhere)
    assert (drawn.shape, drawn.dtype, described[:8]) == (of_run.shape, np.uint8, "5 random")


def test_without_its_packages_the_error_says_how_to_get_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UsageError, match=r"'onnx'.*make setup-verdicts"):
        check_packages()
