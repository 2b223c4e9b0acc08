"""A network in a notebook's cell: known to other processes by the cell's code, and never an older version of it."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from fvc_lib.analysis.pages.report import provenance_html
from fvc_lib.detectors.network import build_detector
from fvc_lib.execution.run.record import begin_run
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import resolve_config, run_config
from fvc_lib.services.registry import DETECTORS
from fvc_lib.tasks.recipe import note_of_own_file
from fvc_lib.tasks.video.task import VideoTask

CELL = """
from torch import nn
from fvc_lib.services.registry import DETECTORS

@DETECTORS.register("mine")
class Mine(nn.Module):
    num_frames, micro_batch = 5, 3
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 1)
    def forward(self, frames):
        return self.line(frames.float().mean((1, 3, 4)) / 255).squeeze(1)
"""


@pytest.fixture
def run_cell(tmp_path, monkeypatch):
    """Runs code as a notebook's cell does."""
    monkeypatch.setenv("FVC_CACHE_DIR", str(tmp_path / "cache"))
    shell = InteractiveShell()
    yield lambda code: shell.run_cell(code).raise_error()
    for known in (DETECTORS._items, DETECTORS._sources, DETECTORS._of_cells):
        for name in ("mine",):
            known.pop(name, None)


def config_of(**values):
    return resolve_config(values, environ={})


def test_a_class_in_a_cell_is_a_file_with_the_cell_s_code(run_cell, tmp_path):
    run_cell(CELL)
    config = config_of(model="mine", num_frames=0)
    path, _, item = config.model.rpartition(":")
    assert (item, config.clips.num_frames) == ("mine", 5)
    assert Path(path).read_text().strip() == CELL.strip()
    assert path.startswith(str(tmp_path / "cache" / "cells" / "mine_"))
    assert type(build_detector(config)).__name__ == "Mine"
    assert DETECTORS.get(config.model).micro_batch == 3


def test_another_process_builds_it_from_the_run_s_parameters_alone(run_cell, tmp_path):
    """As a rank does, from the configuration, and the preflight's child, from the pickled task."""
    run_cell(CELL)
    config = config_of(model="mine")
    (tmp_path / "config.json").write_text(config.model_dump_json())
    (tmp_path / "task.pickle").write_bytes(pickle.dumps(VideoTask(None, None, config=config, weights=(1.0, 1.0))))
    program = (
        "import pickle, sys; from pathlib import Path; from fvc_lib.services.config import RunConfig\n"
        "from fvc_lib.detectors.network import build_detector; folder = Path(sys.argv[1])\n"
        "built = build_detector(RunConfig.model_validate_json((folder / 'config.json').read_text()))\n"
        "also = pickle.loads((folder / 'task.pickle').read_bytes()).build_model()\n"
        "print(type(built).__name__, type(also).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["Mine", "Mine"]


def test_an_edited_cell_is_another_network_without_a_restart(run_cell):
    run_cell(CELL)
    first = config_of(model="mine")
    run_cell(CELL)
    assert config_of(model="mine") == first
    run_cell(CELL.replace("/ 255).squeeze", "/ 128).squeeze"))
    second = config_of(model="mine")
    assert second.config_hash != first.config_hash
    assert second.training_values()["model"] != first.training_values()["model"]
    torch.manual_seed(0)
    light = torch.full((1, 2, 3, 4, 4), 255, dtype=torch.uint8)
    networks = [build_detector(config) for config in (first, second)]
    networks[1].load_state_dict(networks[0].state_dict())
    bias = networks[0].line.bias
    torch.testing.assert_close(networks[1](light) - bias, (networks[0](light) - bias) * 255 / 128)


def test_the_run_keeps_the_cell_s_code_and_its_hash_follows_it(run_cell, tmp_path):
    run_cell(CELL)
    config = config_of(model="mine", runs_dir=str(tmp_path / "runs"))
    run = begin_run(config, command="test")
    (kept,) = run.networks.iterdir()
    assert kept.read_text().strip() == CELL.strip()
    assert run_config(run).config_hash == config.config_hash
    record = json.loads(run.run_json.read_text())
    assert ":mine" in record["params"]["model"]
    assert record["contents"] == {"model": DETECTORS.identity(config.model)}
    assert f"{kept.name}:mine: " in provenance_html(run)
    digest = record["contents"]["model"].partition("@")[2]
    said = f"the network is mine of {kept.name} (SHA-256 {digest[:12]}, licence: not stated)"
    assert note_of_own_file(config.model) == (said,)


@pytest.mark.parametrize("name", ["frame_cnn", "r2plus1d_small", "my-net"])
def test_a_cell_cannot_take_a_built_in_network_s_name_or_one_that_is_no_word(run_cell, name):
    """Runs on record with that name would else be read as having the cell's network."""
    for _ in range(2):
        with pytest.raises(UsageError, match=name):
            run_cell(CELL.replace('"mine"', f'"{name}"'))
    assert name == "my-net" or config_of(model=name).model == name
