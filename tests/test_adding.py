"""The examples of docs/architecture.md, and three smaller ones, are put into the real library and used."""

import contextlib
import io
import json
import re
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fvc_lib.detectors.network import build_detector
from fvc_lib.services.parameters import resolve_config
from tests.faults import forked

ROOT = Path(__file__).parents[1]
# Examples that the page has no room for, by heading.
SMALLER = {
    "Adding an augmentation": '''
@AUGMENTATIONS.register
@dataclass(frozen=True)
class Invert(Operation, name="invert", probability=0.2):
    """Light and dark change places."""

    def apply(self, pixels: Float) -> Float:
        """Return grey levels counted from the other end."""
        return 255 - pixels
''',
    "Adding a figure": '''
"""How many videos each fold has."""

import plotly.graph_objects as go

from fvc_lib.analysis.dashboard.panels import PANELS
from fvc_lib.analysis.read.queries import Selection
from fvc_lib.services.tables import FOLDS, read_table


@PANELS.register_panel("videos per fold", at=45, tasks=("video",))
def _videos_per_fold(selection: Selection) -> go.Figure:
    counts = read_table(selection.detailed.folds, FOLDS).group_by("fold").len().sort("fold")
    figure = go.Figure(go.Bar(x=counts["fold"].to_list(), y=counts["len"].to_list()))
    return figure.update_layout(xaxis_title="fold", yaxis_title="videos")
''',
    "Adding an encoder": """
from torch import nn


class MyEncoder(nn.Module):
    num_features, num_frames, side = 3, 8, 64

    def forward(self, frames):  # uint8 (B, T, 3, H, W)
        return frames.float().mean((3, 4)) / 255  # (B, T, F): the mean colour of each frame
""",
}
# By heading of the page: the file that the example is added to, a program that uses it, and what it prints.
ADDED = {
    "Adding a detector": ("detectors/own/brightness.py", """
import torch
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.registry import DETECTORS
config = resolve_config({"model": "brightness"}, environ={})
network = DETECTORS.get(config.model).build()
logits = network(torch.randint(0, 256, (3, 4, 3, 16, 16), dtype=torch.uint8))
logits.sum().backward()
print(tuple(logits.shape), sum(p.numel() for p in network.parameters()), "brightness" in DETECTORS.names())
""", "(3,) 2 True\n"),
    "Adding a corpus": ("corpus/sources/two_lists.py", """
from fvc_lib.corpus.listing import read_corpus
corpus = folder / "corpus"
corpus.mkdir()
for name, text in (("a.mp4", ""), ("real.txt", "a.mp4\\n../b.mp4\\n"), ("fake.txt", "gone.mp4\\n")):
    (corpus / name).write_text(text)
listing = read_corpus(corpus)
print(listing.kind, [entry.path for entry in listing.entries], sorted(listing.rejected["reason"]))
""", "two_lists ['a.mp4'] ['missing_video', 'outside_corpus']\n"),
    "Adding a feature family": ("video/features/contrast.py", """
import numpy as np
from fvc_lib.services.parameters import resolve_config
from fvc_lib.video.features.family import Run, Sample, Stream, families_named
from fvc_lib.video.features.worker import code_of, measured
config = resolve_config({"feature_families": "contrast"}, environ={})
(family,) = families_named(config.feature_families)
luma = np.zeros((1, 2, 64, 64), np.float32)
luma[0, 0, :32, :32] = 4
run = Run(luma, luma[:, 0])
found = measured(Sample((run,), Stream("h264", np.ones(1, int), np.ones(1, bool), np.zeros(1))), family)
default = resolve_config({}, environ={}).feature_families
print(round(found["contrast_luma_mean"], 3), len(found), len(code_of(family)), "contrast" in default)
""", "0.866 6 64 False\n"),
    "Adding an augmentation": ("video/augmentations.py", """
import numpy as np
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.registry import AUGMENTATIONS
config = resolve_config({"augmentations": "flip,invert"}, environ={})
operation = AUGMENTATIONS.get("invert").draw(np.random.default_rng(0), 4)
print(config.augmentations, operation.apply(np.full((1, 3, 2, 2), 5, np.float32)).max())
""", "('flip', 'invert') 250.0\n"),
    "Adding a metric": ("metrics/youden.py", """
from fvc_lib.metrics.cross_validation import METRICS
from fvc_lib.metrics.declaration import declaration
print(METRICS["youden"]([1, 1, 0, 0], [1, 0, 0, 0]), declaration("youden").better, declaration("youden").title)
""", "0.5 higher Youden's J\n"),
    "Adding a figure": ("analysis/figures/videos_per_fold.py", """
import polars as pl
from fvc_lib.analysis.dashboard.panels import panels
from fvc_lib.analysis.read.queries import Selection
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import FOLDS, write_table
run = RunPaths(folder / "runs" / "demo" / "run_20250304_101500_abcdef01")
run.folds.parent.mkdir(parents=True)
columns = {"video_id": ["a", "b", "c"], "group_id": ["a", "b", "c"], "label": ["real", "fake", "real"]}
write_table(pl.DataFrame({**columns, "fold": [0, 0, 1]}), FOLDS, run.folds)
(panel,) = [panel for panel in panels() if panel.name == "videos per fold"]
print(panel.tasks, panel.draw(Selection((run,))).data[0].y)
""", "('video',) (2, 1)\n"),
}  # fmt: skip


def example(heading: str) -> str:
    """Return the first block of code below a heading of the page, or a smaller example."""
    if heading in SMALLER:
        return SMALLER[heading]
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section, heading
    return re.findall(r"^```python\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL)[0]


@pytest.fixture
def edited(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Load a module of ours with texts in its source replaced; later imports get this one."""

    def load(name: str, *changes: tuple[str, str]) -> Any:
        source = (ROOT / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")
        for old, new in changes:
            assert source.count(old) == 1
            source = source.replace(old, new)
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(source, name, "exec"), module.__dict__)
        return module

    return load


def test_a_field_is_hashed_bound_and_refused_elsewhere_by_its_declaration_alone(edited):
    config = edited(
        "fvc_lib.services.config", ("    # Images\n", f"{example('Adding a configuration field')}\n    # Images\n")
    )
    parameters = edited("fvc_lib.services.parameters")
    plain = parameters.resolve_config({}, environ={})
    other = parameters.resolve_config({"head_dropout": "0.3"}, environ={})
    assert plain.head_dropout == 0.0
    assert (other.config_hash == plain.config_hash, other.training_values() == plain.training_values()) == (False,) * 2
    assert "head_dropout" in config.STARTS_ANEW - config.MAY_CHANGE_ON_RESUME
    assert "head_dropout: 0.3  # share of the head's inputs" in other.to_yaml()
    image = parameters.resolve_config({"task": "image", "head_dropout": 0.3}, environ={})
    with pytest.raises(config.UsageError, match="head_dropout"):
        parameters.refuse_contradictions(image, ["head_dropout"])
    assert "head_dropout" not in image.relevant()


def test_a_task_has_its_stages_defaults_and_place_by_its_declaration_alone(edited):
    tasks = edited(
        "fvc_lib.services.tasks",
        ("TASKS: Mapping[str, TaskSpec] = {", f"{example('Adding a task')}\nTASKS: Mapping[str, TaskSpec] = {{"),
        ("(_VIDEO, _IMAGE, _VIDEO_TEXT)", "(_VIDEO, _IMAGE, _VIDEO_TEXT, _SOUND)"),
    )
    edited("fvc_lib.services.config_fields")
    edited("fvc_lib.services.config")
    parameters = edited("fvc_lib.services.parameters")
    stages = edited("fvc_lib.execution.stages")
    sound = parameters.resolve_config({"task": "sound"}, environ={})
    assert (sound.learning_rate, "num_folds" in sound.relevant()) == (1e-3, False)
    assert [task.key for task in stages.tasks_in_order(sound)] == ["30_sound", "07_memory_report"]
    assert tasks.TASKS["sound"].training_stage.training_module == "fvc_lib.tasks.sound.training"
    assert "30_sound" in tasks.TRAINING_STAGES


def run_programs(folder: Path) -> None:
    """Write what each program of ``ADDED`` prints with the library in ``folder``, or how it fails."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "fvc_lib"]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    warnings.simplefilter("error")
    printed = {}
    for heading, (_, program, _) in ADDED.items():
        with contextlib.redirect_stdout(io.StringIO()) as stream:
            try:
                exec(program, {"folder": folder})
            except Exception:  # noqa: BLE001 - any failure of one example leaves the others
                traceback.print_exc(file=stream)
        printed[heading] = stream.getvalue()
    (folder / "printed.json").write_text(json.dumps(printed))


@pytest.mark.slow
def test_what_is_added_is_found_and_used_by_its_file_alone(tmp_path):
    """In a process that has loaded all but ours."""
    # With compiled modules, which save half a second, but not those that are being written.
    shutil.copytree(ROOT / "fvc_lib", tmp_path / "fvc_lib", ignore=shutil.ignore_patterns("*.pyc.*"))
    for heading, (path, _, _) in ADDED.items():
        with (tmp_path / "fvc_lib" / path).open("a", encoding="utf-8") as file:
            file.write(f"\n\n{example(heading)}")
    assert forked.run(run_programs, tmp_path) == (0, "")
    printed = json.loads((tmp_path / "printed.json").read_text())
    assert printed == {heading: wanted for heading, (_, _, wanted) in ADDED.items()}


def test_an_encoder_in_a_file_of_its_own_gets_a_head(tmp_path):
    (tmp_path / "my_net.py").write_text(example("Adding an encoder"))
    config = resolve_config({"model": f"{tmp_path / 'my_net.py'}:MyEncoder", "head": "gru"}, environ={})
    logits = build_detector(config)(torch.zeros(2, 8, 3, 16, 16, dtype=torch.uint8))
    assert (tuple(logits.shape), config.clips.num_frames, config.clips.side) == ((2,), 8, 64)
