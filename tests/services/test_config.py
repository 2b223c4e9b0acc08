"""Configuration: precedence, refusals with suggestions, and a hash of the experiment alone."""

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from fvc_lib.execution.run.which_run import given_values
from fvc_lib.services import parameters
from fvc_lib.services.config import DECLARED, NEUTRAL, NOT_HASHED, RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import parse_text_value, resolve_config, run_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import STAGES, TASKS


def test_defaults_give_way_to_the_file_then_the_environment_then_the_command_line():
    assert resolve_config({}, environ={}).fixed_size == 0
    assert resolve_config({"fixed_size": 64}, environ={}).fixed_size == 64
    assert resolve_config({"fixed_size": 64}, environ={"FVC_FIXED_SIZE": "80"}).fixed_size == 80
    config = resolve_config({"fixed_size": 64}, environ={"FVC_FIXED_SIZE": "80"}, command_line={"fixed_size": 96})
    assert config.fixed_size == 96


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"epoch": 3}, "unknown parameter 'epoch'. Did you mean 'epochs'?"),
        ({"epochs": 0}, "epochs: got 0"),
        ({"epochs": "many"}, "epochs: got 'many'"),
        ({"num_folds": 1}, "num_folds: got 1"),
        ({"augmentations": "flip,explode"}, "augmentation 'explode': unknown. Known: frame_drop"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"model": "quux"}, "model 'quux': unknown. Known: "),
        ({"__import__('os').system('true')": 1}, "unknown parameter"),
    ],
)
def test_bad_values_are_refused_by_name(values, words):
    with pytest.raises(UsageError) as caught:
        resolve_config(values, environ={})
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("epochs", "12", 12),
        ("learning_rate", "1e-4", 1e-4),
        ("shuffle_labels", "true", True),
        ("mem_gb", "none", None),
        ("mem_gb", "1.5", 1.5),
        ("augmentations", "flip, noise", ("flip", "noise")),
        ("augmentations", "[flip, 'noise']", ("flip", "noise")),
        ("augmentations", "[]", ()),
        ("corpus", "none", "none"),
    ],
)
def test_text_is_typed_as_its_field_says(name, text, value):
    assert parse_text_value(name, text) == value


def test_the_hash_ignores_paths_order_and_machine_but_no_number():
    base = resolve_config({"epochs": 3, "seed": 1}, environ={})
    assert resolve_config({"seed": 1, "epochs": 3}, environ={}).config_hash == base.config_hash
    for name in NOT_HASHED:
        assert name in RunConfig.model_fields
    moved = {"corpus": "/elsewhere", "runs_dir": "/x", "cache_dir": "/y", "num_workers": 2, "mem_gb": 3.0}
    assert base.model_copy(update=moved).config_hash == base.config_hash
    assert base.model_copy(update={"epochs": 4}).config_hash != base.config_hash


@settings(max_examples=25)
@given(corpus=st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=60), epochs=st.integers(1, 10**6))
def test_what_is_saved_with_a_run_reads_back_as_itself(corpus, epochs):
    config = resolve_config({"corpus": corpus, "epochs": epochs}, environ={})
    assert resolve_config(yaml.safe_load(config.to_yaml()), environ={}) == config


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("epochs: 010", 10), ("epochs: 1_000", 1000), ("learning_rate: 1e-3", 0.001), ("amp: off", "off"),
        ("train_final: yes", True), ("experiment: 007", "007"), ("experiment: 2026-01-02", "2026-01-02"),
        ("experiment: yes", "yes"), ("label_map: {yes: fake, no: real}", {"yes": "fake", "no": "real"}),
        ("label_map: {01: fake, 00: real}", {"01": "fake", "00": "real"}), ("mem_gb: null", None),
        ("mem_gb:", None), ("augmentations: [flip, noise]", ("flip", "noise")),
        ("targets: []", ()),
    ],
)  # fmt: skip
def test_a_params_file_says_what_it_would_say_on_the_command_line(tmp_path, line, value):
    path, name = tmp_path / "p.yaml", line.partition(":")[0]
    task = "image" if name == "targets" else "video"
    path.write_text(f"task: {task}\n{line}\n")
    for asked in (given_values([path], (), (), {}), given_values((), [path.read_text()], (), {})):
        assert getattr(asked.config, name) == value


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("epochs: 1:30\n", "epochs"), ("epochs: 0x10\n", "epochs"), ("epochs: yes\n", "epochs"),
        ("epochs: 3\nseed: 1\nepochs: 4\n", "epochs"), ("label_map: {a: fake, a: real}\n", "a"),
        ("label_map: {Fake: fake, fake: real}\n", "label_map"), ("corpus: null\n", "corpus"), ("corpus:\n", "corpus"),
        ("? [1]\n: 2\n", ""), ("seed: !!python/object:os.system x\n", ""), ("seed: !!map x\n", ""),
        ("seed: !!timestamp 2026-99-99\n", ""),
    ],
)  # fmt: skip
def test_what_a_params_file_cannot_mean_is_refused_with_file_and_field(tmp_path, content, field):
    path = tmp_path / "p.yaml"
    path.write_text(content)
    with pytest.raises(UsageError) as caught:
        given_values([path], (), (), {})
    assert str(path) in str(caught.value)
    assert field in str(caught.value).replace(str(path), "")
    with pytest.raises(UsageError):
        given_values((), [content], (), {})


def test_a_task_has_defaults_of_its_own_below_everything_that_was_asked_for():
    assert resolve_config(environ={}).effective_batch_size == RunConfig().effective_batch_size
    image = resolve_config({"task": "image"}, environ={})
    assert {name: getattr(image, name) for name in TASKS["image"].defaults} == TASKS["image"].defaults
    asked = resolve_config({"effective_batch_size": 7}, command_line={"task": "image"}, environ={})
    assert asked.effective_batch_size == 7


def test_names_of_networks_are_checked_and_lead_to_the_files_that_register_them():
    config = resolve_config({"model": "r2plus1d_small", "backbone": "timm:resnet50"}, environ={})
    assert config.code_chosen(["model", "epochs"]) == ["fvc_lib.detectors.own.r2plus1d_small"]
    assert config.code_chosen(["backbone"]) == ["fvc_lib.detectors.frames.timm_encoders"]
    with pytest.raises(UsageError, match=r"model 'frame_cn': unknown\. Did you mean 'frame_cnn'\?"):
        resolve_config({"model": "frame_cn"}, environ={})
    with pytest.raises(UsageError, match="'resnet50': unknown"):
        resolve_config({"backbone": "resnet50"}, environ={})


def test_a_field_newer_than_a_run_has_its_neutral_value_there_and_not_today_s_default(tmp_path, monkeypatch):
    run = RunPaths(tmp_path)
    run.params_yaml.write_text("task: video\nepochs: 3\n")
    monkeypatch.setattr(parameters, "NEUTRAL", {**NEUTRAL, "label_smoothing": 0.5})
    assert (run_config(run.params_yaml).label_smoothing, run_config(run.params_yaml).epochs) == (0.5, 3)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_value_is_in_no_hash_and_no_binding(task, name):
    """So a new field changes no earlier run or checkpoint."""
    config = RunConfig(task=task).model_copy(update={name: DECLARED[name].neutral})
    assert name not in config.training_values()
    for stage in STAGES:
        assert name not in config.values_read_by(stage)
    hashes = {config.config_hash, config.model_copy(update={name: RunConfig.model_fields[name].default}).config_hash}
    assert len(hashes) == 1
