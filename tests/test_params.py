"""The memory profiles in ``params/`` change how a run is computed, never what comes out of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fvc_lib.services.config import MAY_CHANGE_ON_RESUME, RunConfig, read_params_file, resolve_config
from fvc_lib.services.registry import DETECTORS

FOLDER = Path(__file__).parents[1] / "params"
PROFILES = ("full", "safe", "ultra_safe")
IMAGE_PROFILES = ("image_full", "safe", "ultra_safe")


def resolved(*names: str) -> RunConfig:
    values: dict[str, object] = {}
    for name in names:  # later files win, as on the command line
        values.update(read_params_file(FOLDER / f"{name}.yaml"))
    return resolve_config(values, environ={})


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_params_file_is_valid_and_says_what_it_is_for(path):
    resolve_config(read_params_file(path), environ={})
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("name", sorted({*PROFILES, *IMAGE_PROFILES}))
def test_a_memory_profile_sets_only_what_a_run_may_be_resumed_with(name):
    values = read_params_file(FOLDER / f"{name}.yaml")
    assert values
    assert values.keys() <= MAY_CHANGE_ON_RESUME


@pytest.mark.parametrize("name", PROFILES)
def test_behind_another_file_a_profile_leaves_every_number_of_it_alone(name):
    plain, profiled = resolved("demo"), resolved("demo", name)
    assert {**plain.model_dump(), **read_params_file(FOLDER / f"{name}.yaml")} == profiled.model_dump()
    assert profiled.effective_batch_size % profiled.batch_size == 0


def test_the_profiles_take_ever_fewer_clips_and_full_takes_the_batch_in_one_piece():
    full, safe, ultra_safe = (resolved(name) for name in PROFILES)
    assert full.batch_size == full.effective_batch_size
    assert (full.batch_size, full.num_workers) == (16, 4)
    assert safe.batch_size == 8
    assert (ultra_safe.batch_size, ultra_safe.num_workers) == (4, 2)


def test_of_images_the_profiles_take_24_8_and_4_at_once_and_accumulate_to_the_same_batch():
    profiles = [resolved("image", name) for name in IMAGE_PROFILES]
    assert [profile.batch_size for profile in profiles] == [24, 8, 4]
    assert {profile.effective_batch_size for profile in profiles} == {24}


@pytest.mark.parametrize("model", ["frame_cnn", "r2plus1d"])
def test_the_defaults_are_careful_without_any_profile(model):
    defaults = resolved()
    assert (defaults.batch_size, defaults.num_workers, defaults.gradient_checkpointing) == (0, 0, False)
    assert 1 <= DETECTORS.get(model).micro_batch <= resolved("safe").batch_size
