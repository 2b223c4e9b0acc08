"""Settings of the allocator: ours stand back, and torch itself is asked what it read."""

import json
import os
import subprocess
import sys

import pytest

from fvc_lib.services.memory.policy import (
    ALLOC_CONF_NAMES,
    MPS_HIGH,
    MPS_LOW,
    allocator_environment,
    allocator_in_force,
)

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
    cases = [allocator_environment({}), BOTH]
    cases += [{**allocator_environment(user), **user} for user in USERS]
    environ = {name: value for name, value in os.environ.items() if name not in ALLOC_CONF_NAMES}
    command = [sys.executable, "-c", ASK_TORCH, json.dumps(cases)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    answers = dict(zip(map(str, cases), done.stdout.splitlines(), strict=True))
    return lambda case: answers[str(case)]


def test_what_is_set_is_what_torch_reads(torch_read):
    ours = allocator_environment({})
    assert ours == {"PYTORCH_ALLOC_CONF": "expandable_segments:True", MPS_HIGH: "1.0", MPS_LOW: "0.9"}
    assert torch_read(ours) == "expandable_segments:True"


@pytest.mark.parametrize("user", USERS)
def test_what_the_user_has_set_stands_under_any_of_its_names(torch_read, user):
    assert torch_read({**allocator_environment(user), **user}) == "max_split_size_mb:64"
    assert allocator_in_force("cuda", user) == user


def test_of_several_names_the_one_in_force_is_the_one_torch_reads(torch_read):
    assert list(allocator_in_force("cuda", BOTH).values()) == [torch_read(BOTH)]


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


def test_on_the_cpu_what_the_user_gave_glibc_is_in_force():
    environ = {"MALLOC_CONF": "background_thread:true", "MALLOC_ARENA_MAX": "2", "PATH": "/bin"}
    assert allocator_in_force("cpu", environ) == {"MALLOC_ARENA_MAX": "2"}
    assert allocator_in_force("cpu", {}) == {}
