"""Of every field it is known which task reads it, and one that would change nothing is refused."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from fvc_lib.execution.run.which_run import given_values
from fvc_lib.services.config import DECLARED, MAY_CHANGE_ON_RESUME, STARTS_ANEW, RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import refuse_contradictions, resolve_config
from fvc_lib.services.tasks import STAGES, TASKS

ROOT = Path(__file__).parents[2]
# Read by the runner itself, whatever the run is about.
OF_THE_RUNNER = {"task", "experiment", "runs_dir", "use_mlops_pipeline", "tracker", "forensic_features", "train_final"}


def parameters_and_code(notebook: Path) -> tuple[set[str], str]:
    """What stands in a notebook's parameters cell, and all its code."""
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    parameters = next("".join(cell["source"]) for cell in cells if "parameters" in cell["metadata"].get("tags", []))
    names = {node.target.id for node in ast.parse(parameters).body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    return names, "\n".join("".join(cell["source"]) for cell in cells)


OF_RECIPE = {"canonical", "rescale"}
OF_CLIPS = {"num_frames", "fixed_size", "frame_sampling", "crop"}


def imported(tree: ast.Module) -> Iterator[Path]:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            path = ROOT / f"{name.replace('.', '/')}.py"
            if name.startswith("fvc_lib.") and path.is_file():
                yield path


def read_of_config(tree: ast.Module) -> set[str]:
    """``config.epochs`` and ``asked.config.epochs``; ``config.clips`` and ``config.recipe`` stand for several."""
    found = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (getattr(node.value, "id", None) == "config" or getattr(node.value, "attr", None) in ("config", "_config"))
    }
    return found | (OF_CLIPS if "clips" in found else set()) | (OF_RECIPE if "recipe" in found else set())


@cache
def reads_and_imports(code: str) -> tuple[set[str], set[Path]]:
    tree = ast.parse(code)
    return read_of_config(tree), set(imported(tree))


def read_by_what_it_imports(code: str) -> set[str]:
    """All that notebooks and the rooms below execution read of a configuration, from ``code`` on."""
    found, seen, codes = set[str](), set[Path](), [code]
    while codes:
        read, modules = reads_and_imports(codes.pop())
        found |= read
        # The runner and the services serve every task, so what they read says nothing about this one.
        new = {path for path in modules - seen if path.parent.name not in {"execution", "services", "analysis"}}
        seen |= new
        codes += [path.read_text() for path in new]
    return found


@pytest.mark.parametrize("task", TASKS)
def test_a_field_that_a_task_takes_is_read_by_one_of_its_stages(task):
    notebooks = [ROOT / "notebooks" / f"{stage.name}.ipynb" for stage in STAGES if task in stage.tasks]
    code = "\n".join(parameters_and_code(path)[1] for path in notebooks)
    taken = {name for name in RunConfig.model_fields if task in DECLARED[name].tasks}
    assert taken - read_by_what_it_imports(code) - OF_THE_RUNNER == set()


@pytest.mark.parametrize(
    ("task", "given", "foreign"),
    [
        ("video", {"image_size": 64}, {"image_size"}),
        ("image", {"num_folds": 3}, {"num_folds"}),
        ("image", {"num_frames": 4}, {"num_frames"}),
        ("image", {"model": "r2plus1d", "backbone": "small_resnet"}, {"model"}),
        ("image", {"clip_source": "shards"}, {"clip_source"}),
        ("video_text", {"crop": "face"}, {"crop"}),
        ("video_text", {"shuffled_label_control": False}, {"shuffled_label_control"}),
        ("image", {"num_folds": 3, "text_encoder": "x", "epochs": 1}, {"num_folds", "text_encoder"}),
        ("video", {"protocol": "cross_corpus"}, {"target_corpora"}),
        ("video", {"target_corpora": "a"}, {"target_corpora"}),
        ("video", {"num_ranks": 17}, {"num_ranks"}),
    ],
)
def test_what_would_change_nothing_is_refused_by_name(task, given, foreign):
    config = resolve_config({"task": task, **given}, environ={})
    with pytest.raises(UsageError) as caught:
        refuse_contradictions(config, [*given, "task"])
    named = set(re.findall(r"\w+", str(caught.value)))
    assert foreign <= named
    assert not {"epochs", "backbone"} & named


def test_the_network_and_its_weights_are_known_by_either_name_where_the_task_is_given(tmp_path):
    params = tmp_path / "p.yaml"
    params.write_text("task: image\nmodel: efficientnet_lite0\n")
    asked = given_values([params], [], [("model_weights", "w.pt")], {})
    weights = str(Path("w.pt").absolute())
    assert (asked.config.backbone, asked.config.backbone_weights) == ("efficientnet_lite0", weights)
    refuse_contradictions(asked.config, asked.written)
    assert {"backbone", "backbone_weights"} <= asked.written
    other = given_values([], [], [("backbone", "timm:resnet18"), ("backbone_weights", "w.pt")], {"task": "video_text"})
    assert (other.config.model, other.config.model_weights) == ("timm:resnet18", weights)
    resumed = given_values([], [], [("backbone", "efficientnet_lite0")], {})  # of a run whose task is not said again
    assert "backbone" in resumed.written


def another_value(name: str) -> Any:
    """One that differs from the field's default."""
    default, kind = RunConfig.model_fields[name].default, RunConfig.model_fields[name].annotation
    if get_origin(kind) is Literal:
        return next(each for each in get_args(kind) if each != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, dict):
        return {"1": "fake"}
    if isinstance(default, tuple):
        return default[:-1] if default else ("calories",)
    return f"{default}x" if isinstance(default, str) else (default or 0) + 0.01 if isinstance(default, float) else 17


@pytest.mark.parametrize("name", [name for name in RunConfig.model_fields if name != "task"])
def test_what_a_value_may_change_decides_hash_binding_resume_and_forks(name):
    declared = DECLARED[name]
    assert declared.tasks
    counts = declared.changes in {"data", "weights", "results"}
    assert set(declared.tasks) <= set(TASKS)
    for task in TASKS:
        config = resolve_config({"task": task}, environ={})
        other = config.model_copy(update={name: another_value(name)})
        assert getattr(other, name) != getattr(config, name), "the test needs another value"
        bound = other.training_values() != config.training_values()
        assert bound == (task in declared.tasks and declared.changes == "weights")
        reads = [s.name for s in STAGES if task in s.tasks and other.values_read_by(s) != config.values_read_by(s)]
        assert bool(reads) == (task in declared.tasks and counts and name not in ("corpus", "more_corpora")), name
        assert (other.config_hash != config.config_hash) == (task in declared.tasks and declared.hashed)
    assert (name in STARTS_ANEW) == (declared.changes in {"data", "weights"})
    if declared.changes in {"weights", "data", "results"}:
        assert name not in MAY_CHANGE_ON_RESUME
        # Of what these list each stage's fingerprint has the content.
        assert declared.hashed or name in ("corpus", "more_corpora")
    if declared.changes in {"nothing", "folder"}:
        assert not declared.hashed
