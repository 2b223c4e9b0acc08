"""``run_notebooks.py detectors`` lists all networks and the needs of a single one."""

import json

import pytest
from click.testing import CliRunner

from fvc_lib.command_line.main import main
from fvc_lib.detectors.facts import SIZES, facts_of
from fvc_lib.services.registry import DETECTORS


def test_every_detector_has_a_line_and_none_is_dropped(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", _without("transformers"))
    result = CliRunner().invoke(main, ["detectors"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == DETECTORS.names()
    assert any(line.startswith("frame_cnn") and line.endswith("yes") for line in lines)


def _without(package):
    import importlib.util

    found = importlib.util.find_spec
    return lambda name, *rest: None if name == package else found(name, *rest)


def test_one_that_lacks_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", _without("torchvision"))
    text = facts_of("r3d_18").text()
    assert [
        words for words in ("not installed: torchvision", "make setup-detectors", "KINETICS400_V1") if words not in text
    ] == []


def sizes_of(facts):
    return {"num_parameters": facts.num_parameters, "gflops": None if facts.gflops is None else round(facts.gflops, 4)}


@pytest.mark.detectors
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of fvcore, when pytorchvideo imports it
def test_the_stored_sizes_are_those_of_the_networks():
    """To write the file again: json.dumps of what is measured here."""
    measured = {facts.spec.name: facts for facts in map(facts_of, DETECTORS.names())}
    wanted = {name: sizes_of(facts) for name, facts in measured.items() if facts.num_parameters is not None}
    assert json.loads(SIZES.read_text()) == wanted


def test_the_kind_of_features_is_known_before_a_file_is_imported():
    for name, spec in DETECTORS.items():
        assert DETECTORS.of_features(name) == spec.of_features, name


def test_the_numbers_of_a_network_are_measured():
    facts = facts_of("frame_cnn")
    assert json.loads(SIZES.read_text())["frame_cnn"] == sizes_of(facts)
    assert facts.gflops > 0
    assert "11,937 parameters" in facts.text()


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["detectors", "nets.py"], 2, "Give nets.py:CLASS."),
        (["detectors", "nets.py:Net"], 0, "4 parameters"),
        (["detectors", "nets.py:Wide"], 0, "missing 1 required positional argument: 'width'"),
        (["doctor", "-p", "model", "nets.py:Wide"], 1, "missing 1 required positional argument: 'width'"),
        (["doctor", "-p", "model", "nowhere.py:Net"], 1, "there is no such file"),
    ],
)
def test_a_network_of_the_user_is_described_or_says_why_it_cannot_be_trained(
    tmp_path, monkeypatch, command, code, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(_NETS)
    done = CliRunner().invoke(main, command)
    assert (done.exit_code, words in done.output) == (code, True), done.output


_NETS = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, clips):
        return self.layer(clips.float().mean((1, 3, 4))).squeeze(1)

class Wide(Net):
    def __init__(self, width):
        super().__init__()
"""
