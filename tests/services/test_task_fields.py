"""Of every field it is known which task reads it, and one that would change nothing is refused."""

import ast
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from fvc_lib.execution.run.which_run import ask
from fvc_lib.services.config import DECLARED, MAY_CHANGE_ON_RESUME, STARTS_ANEW, RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import refuse_fields_of_another_task, resolve_config
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


OF_RECIPE = {"canonical", "rescale", "rescale_rate"}
OF_CLIPS = {"num_frames", "fixed_size", "frame_sampling", "frame_fit", "crop", "crop_margin"}


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


@pytest.mark.parametrize("task", TASKS)
def test_a_field_that_a_notebook_offers_is_one_that_its_task_takes(task):
    for stage in (stage for stage in STAGES if stage.tasks == (task,)):
        offered, _ = parameters_and_code(ROOT / "notebooks" / f"{stage.name}.ipynb")
        assert {name for name in offered & set(RunConfig.model_fields) if task not in DECLARED[name].tasks} == set()


@pytest.mark.parametrize(
    ("task", "given", "words"),
    [
        ("video", {"image_size": 64}, r"image_size: read by task image alone, .* is video\. .*fixed_size\. Leave it"),
        ("video", {"split_test_share": 0.3}, "read by task image and video_text alone"),
        ("image", {"num_folds": 3}, r"num_folds: read by task video alone.*split_test_share.*-p task video"),
        ("image", {"num_frames": 4}, "num_frames: read by task video and video_text alone"),
        ("image", {"model": "r2plus1d", "backbone": "small_resnet"}, "is backbone"),
        ("video_text", {"crop": "face"}, "crop: read by task video alone.*one clip of each video"),
        (
            "image",
            {"shuffle_buffer": 9},
            "shuffle_buffer: read by task video and video_text alone.*Images are read",
        ),
        (
            "image",
            {"clip_source": "shards"},
            "clip_source: read by task video and video_text alone.*Images are read",
        ),
        ("video", {"clip_source": "stream"}, "both or neither.*-p clip_source stream -p shuffle_buffer 1000"),
        ("video_text", {"shuffle_buffer": 9}, "clip_source store with shuffle_buffer 9: wanted both or neither"),
        ("video_text", {"shuffled_label_control": False}, "shuffled_label_control: read by task video alone"),
        (
            "image",
            {"num_folds": 3, "beam_width": 2, "epochs": 1},
            "beam_width: read by task video_text alone.*num_folds: read by task video alone.*Leave them out",
        ),
    ],
)
def test_what_would_change_nothing_is_refused_with_whose_it_is_and_what_to_give_instead(task, given, words):
    config = resolve_config({"task": task, **given}, environ={})
    with pytest.raises(UsageError, match=words):
        refuse_fields_of_another_task(config, [*given, "task"])


def test_the_network_and_its_weights_are_known_by_either_name_where_the_task_is_given(tmp_path):
    params = tmp_path / "p.yaml"
    params.write_text("task: image\nmodel: efficientnet_lite0\n")
    asked = ask([params], [], [("model_weights", "w.pt")], {})
    weights = str(Path("w.pt").absolute())
    assert (asked.config.backbone, asked.config.backbone_weights) == ("efficientnet_lite0", weights)
    refuse_fields_of_another_task(asked.config, asked.written)
    assert {"backbone", "backbone_weights"} <= asked.written
    other = ask([], [], [("backbone", "timm:resnet18"), ("backbone_weights", "w.pt")], {"task": "video_text"})
    assert (other.config.model, other.config.model_weights) == ("timm:resnet18", weights)
    resumed = ask([], [], [("backbone", "efficientnet_lite0")], {})  # of a run whose task is not said again
    assert "backbone" in resumed.written


@pytest.mark.parametrize("task", TASKS)
def test_what_says_no_more_than_the_default_passes_and_so_does_what_the_task_reads(task):
    config = resolve_config({"task": task}, environ={})
    refuse_fields_of_another_task(config, RunConfig.model_fields)
    refuse_fields_of_another_task(resolve_config({"task": task, "epochs": 3}, environ={}), ["epochs", "task"])


def test_what_only_other_tasks_read_is_neither_written_nor_hashed():
    image = resolve_config({"task": "image"}, environ={})
    assert "num_folds" not in image.relevant()
    assert image.model_copy(update={"num_folds": 3}).config_hash == image.config_hash
    assert image.model_copy(update={"split_test_share": 0.3}).config_hash != image.config_hash


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
    assert set(declared.tasks) <= set(TASKS) >= set(declared.meaning)
    for task in TASKS:
        config = resolve_config({"task": task}, environ={})
        other = config.model_copy(update={name: another_value(name)})
        assert getattr(other, name) != getattr(config, name), "the test needs another value"
        bound = other.training_values() != config.training_values()
        assert bound == (task in declared.tasks and declared.changes == "weights")
        assert (other.config_hash != config.config_hash) == (task in declared.tasks and declared.hashed)
    assert (name in STARTS_ANEW) == (declared.changes in {"data", "weights"})
    if declared.changes in {"weights", "data", "results"}:
        assert name not in MAY_CHANGE_ON_RESUME
        # Of what these list each stage's fingerprint has the content.
        assert declared.hashed or name in ("corpus", "more_corpora")
    if declared.changes in {"nothing", "folder"}:
        assert not declared.hashed or name == "retrieval_memory_mb"  # it always was


def test_a_field_that_a_task_reads_since_later_leaves_its_older_hashes_alone():
    """Task image has had these fields from the beginning."""
    for name, value in (("label_smoothing", 0.2), ("focal_gamma", 1.0)):
        video, image = (resolve_config({"task": task}, environ={}) for task in ("video", "image"))
        assert getattr(video, name) == 0
        assert name not in video.training_values()
        assert name in image.training_values()
        changed = resolve_config({name: value}, environ={})
        assert changed.training_values()[name] == value
        assert changed.config_hash != video.config_hash
    assert resolve_config({"task": "image"}, environ={}).label_smoothing == 0.1
