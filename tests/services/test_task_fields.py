"""Every field declares the tasks that read it; a field without effect is refused."""

import re
from typing import Any, Literal, get_args, get_origin

import pytest

from fvc_lib.services.config import DECLARED, MAY_CHANGE_ON_RESUME, STARTS_ANEW, RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import refuse_contradictions, resolve_config
from fvc_lib.services.tasks import STAGES, TASKS


@pytest.mark.parametrize(
    ("task", "given", "foreign"),
    [
        ("video", {"image_size": 64}, {"image_size"}),
        ("image", {"num_folds": 3}, {"num_folds"}),
        ("image", {"num_frames": 4}, {"num_frames"}),
        ("image", {"model": "r2plus1d_small", "backbone": "small_resnet"}, {"model"}),
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
    assert "epochs" not in named


def another_value(name: str) -> Any:
    """Return a value that differs from the field's default."""
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
        # The fingerprint of each stage has the content of the files that these fields list.
        assert declared.hashed or name in ("corpus", "more_corpora")
    if declared.changes in {"nothing", "folder"}:
        assert not declared.hashed
