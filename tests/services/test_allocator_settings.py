"""Settings of the allocator: ours stand back, mistakes are named, and torch itself is asked whether they would be."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fvc_lib.services.memory_policy import (
    ALLOC_CONF_NAMES,
    MPS_HIGH,
    MPS_LOW,
    allocator_environment,
    allocator_in_force,
    check_allocator_environment,
)

MISSPELT_KEY = {"PYTORCH_ALLOC_CONF": "expandable_segment:True"}
MALFORMED = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb=64"}
BOTH = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32"}
USERS = [{name: "max_split_size_mb:64"} for name in ALLOC_CONF_NAMES]
# torch reads the variables when it is first asked, so one process that has loaded it can be forked for each case.
ASK_TORCH = """
import json, os, sys, torch
for environ in json.loads(sys.argv[1]):
    if not os.fork():
        os.environ.update(environ)
        try:
            print(torch._C._accelerator_getAllocatorSettings(), flush=True)
        except (RuntimeError, ValueError):
            print("refused", flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def torch_read():
    """What torch says it read from each of some environments."""
    cases = [allocator_environment({}), MISSPELT_KEY, MALFORMED, BOTH]
    cases += [{**allocator_environment(user), **user} for user in USERS]
    environ = {name: value for name, value in os.environ.items() if name not in ALLOC_CONF_NAMES}
    command = [sys.executable, "-c", ASK_TORCH, json.dumps(cases)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    answers = dict(zip(map(str, cases), done.stdout.splitlines(), strict=True))
    return lambda case: answers[str(case)]


def test_what_is_set_is_what_torch_reads_and_none_of_it_draws_a_warning(torch_read):
    ours = allocator_environment({})
    assert ours == {"PYTORCH_ALLOC_CONF": "expandable_segments:True", MPS_HIGH: "1.0", MPS_LOW: "0.9"}
    assert torch_read(ours) == "expandable_segments:True"
    assert check_allocator_environment(ours) == []


@pytest.mark.parametrize("user", USERS)
def test_what_the_user_has_set_stands_under_any_of_its_names(torch_read, user):
    assert torch_read({**allocator_environment(user), **user}) == "max_split_size_mb:64"
    assert allocator_in_force("cuda", user) == user


def test_of_several_names_the_one_in_force_is_the_one_torch_reads(torch_read):
    assert list(allocator_in_force("cuda", BOTH).values()) == [torch_read(BOTH)]
    (warning,) = check_allocator_environment(BOTH)
    assert warning.startswith("PYTORCH_ALLOC_CONF: torch reads PYTORCH_CUDA_ALLOC_CONF instead")


@pytest.mark.parametrize(
    ("user", "high", "low"),
    [
        ({MPS_HIGH: "0.7"}, None, "0.7"),  # torch's own low of 1.4 would be refused
        ({MPS_HIGH: "1.5"}, None, "0.9"),
        ({MPS_LOW: "1.3"}, "1.3", None),
        ({MPS_LOW: "0.5"}, "1.0", None),
        ({MPS_HIGH: "0.8", MPS_LOW: "0.4"}, None, None),
    ],
)
def test_the_low_watermark_never_ends_up_above_the_high_one(user, high, low):
    added = allocator_environment(user)
    assert (added.get(MPS_HIGH), added.get(MPS_LOW)) == (high, low)
    assert check_allocator_environment({**added, **user}) == []


def test_a_variable_that_does_not_exist_is_named_with_those_that_do():
    (warning,) = check_allocator_environment({"PYTORCH_MPS_ALLOCATOR_POLICY": "garbage_collection"})
    assert warning.startswith("PYTORCH_MPS_ALLOCATOR_POLICY: torch reads no such variable")
    assert "Did you mean" not in warning
    assert all(name in warning for name in (*ALLOC_CONF_NAMES, MPS_HIGH, MPS_LOW))


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("PYTORCH_CUDA_ALOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
        ("PYTORCH_CUDA_ALLOC_CONFIG", "PYTORCH_CUDA_ALLOC_CONF"),
        ("MY_ALLOC_CONF", None),
        ("PYTORCH_MPS_HIGH_WATERMARK", "PYTORCH_MPS_HIGH_WATERMARK_RATIO"),
        ("pytorch_cuda_alloc_conf", "PYTORCH_CUDA_ALLOC_CONF"),
        ("MALLOC_TRIM_THRESHOLD", "MALLOC_TRIM_THRESHOLD_"),
        ("MALLOC_ARENA_MAX_", "MALLOC_ARENA_MAX"),
    ],
)
def test_a_misspelt_variable_gets_a_suggestion(wrong, meant):
    (warning,) = check_allocator_environment({wrong: "1"})
    assert warning.startswith(f"{wrong}: ")
    if meant:
        assert warning.endswith(f"Did you mean {meant}?")


def test_a_misspelt_key_is_named_which_torch_itself_lets_pass(torch_read):
    (warning,) = check_allocator_environment(MISSPELT_KEY)
    assert warning == "PYTORCH_ALLOC_CONF: torch knows no key 'expandable_segment'. Did you mean 'expandable_segments'?"
    (unlike_any,) = check_allocator_environment({"PYTORCH_ALLOC_CONF": "xyz:1"})
    assert "There are: backend, " in unlike_any
    assert torch_read(MISSPELT_KEY) == "expandable_segment:True"


def test_right_keys_and_lists_of_values_are_right():
    settings = "roundup_power2_divisions:[256:1,512:2,>:4], expandable_segments:True,max_split_size_mb:64"
    assert check_allocator_environment({"PYTORCH_ALLOC_CONF": settings}) == []


def test_settings_that_torch_cannot_parse_are_named(torch_read):
    (warning,) = check_allocator_environment(MALFORMED)
    assert "got 'max_split_size_mb=64', and torch stops at anything but key:value" in warning
    assert torch_read(MALFORMED) == "refused"


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ({MPS_HIGH: "0.0"}, "removes the limit"),
        ({MPS_LOW: "0"}, "keeps torch from freeing memory"),
        ({MPS_HIGH: "much"}, "got 'much'"),
        ({MPS_HIGH: "2.5"}, "up to 2.0"),
        ({MPS_HIGH: "0.7", MPS_LOW: "0.8"}, "above PYTORCH_MPS_HIGH_WATERMARK_RATIO with 0.7, which torch refuses"),
    ],
)
def test_watermarks_that_do_harm_are_named(user, words):
    (warning,) = check_allocator_environment(user)
    assert words in warning


def test_variables_of_others_are_nobodys_mistake():
    others = {
        "MALLOC_CONF": "background_thread:true", "PYTORCH_ENABLE_MPS_FALLBACK": "1", "TORCH_HOME": "x", "PATH": "/bin",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "MALLOC_ARENA_MAX": "2", "MIMALLOC_VERBOSE": "1",
    }  # fmt: skip
    assert check_allocator_environment(others) == []
    assert allocator_in_force("cpu", others) == {"MALLOC_ARENA_MAX": "2"}
    assert allocator_in_force("cpu", {}) == {}
