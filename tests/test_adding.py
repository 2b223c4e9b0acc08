"""What docs/architecture.md tells to add is all that there is to add: its examples are put into the real modules."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def example(heading: str) -> str:
    """The first block of code below a heading."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    match = re.search(rf"^## {heading}$.*?^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert match, heading
    return match[1]


@pytest.fixture
def edited(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Loads a module of ours with texts in its source replaced; whatever imports it after that gets this one."""

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
    plain = config.resolve_config({}, environ={})
    other = config.resolve_config({"head_dropout": "0.3"}, environ={})
    assert plain.head_dropout == 0.0
    assert (other.config_hash == plain.config_hash, other.training_values() == plain.training_values()) == (False,) * 2
    assert "head_dropout" in config.STARTS_ANEW - config.MAY_CHANGE_ON_RESUME
    assert "head_dropout: 0.3  # share of the head's inputs" in other.to_yaml()
    image = config.resolve_config({"task": "image", "head_dropout": 0.3}, environ={})
    with pytest.raises(config.UsageError, match="head_dropout: read by task video and video_text alone"):
        config.refuse_fields_of_another_task(image, ["head_dropout"])
    assert "head_dropout" not in image.relevant()


def test_a_task_has_its_stages_defaults_and_place_by_its_declaration_alone(edited):
    tasks = edited(
        "fvc_lib.services.tasks",
        ("TASKS: Mapping[str, TaskSpec] = {", f"{example('Adding a task')}\nTASKS: Mapping[str, TaskSpec] = {{"),
        ("(_VIDEO, _IMAGE, _VIDEO_TEXT)", "(_VIDEO, _IMAGE, _VIDEO_TEXT, _SOUND)"),
    )
    config = edited("fvc_lib.services.config")
    stages = edited("fvc_lib.execution.plan.stages")
    sound = config.resolve_config({"task": "sound"}, environ={})
    assert (sound.learning_rate, "num_folds" in sound.relevant()) == (1e-3, False)
    assert [task.key for task in stages.tasks_in_order(sound)] == ["30_sound", "07_memory_report"]
    assert tasks.TASKS["sound"].training_stage.training_module == "fvc_lib.tasks.sound.training"
    assert "30_sound" in tasks.TRAINING_STAGES
    assert "30_sound" in config.DECLARED["batch_size"].memory
