"""The allocator's setting, and the advice after an out-of-memory."""

from typing import get_args

import pytest

from fvc_lib.services.memory import ALLOC_CONF_NAMES, RanOut, allocator_environment, memory_advice, ran_out_in


def test_the_allocator_is_set_unless_the_user_has_set_it_under_any_name():
    assert allocator_environment({"PATH": "/bin"}) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ALLOC_CONF_NAMES:
        assert allocator_environment({name: "max_split_size_mb:64"}) == {}


@pytest.mark.parametrize(
    ("ran_out", "named", "not_named"),
    [
        ("batch", "-p batch_size 1", "num_frames"),
        ("sample", "num_frames", "batch_size"),
        ("comparison", "effective_batch_size", "-p batch_size"),
        ("optimizer_step", "a smaller model", "gradient_checkpointing"),
        ("loaders", "-p num_workers 0", "batch_size"),
        ("preflight", "-p memory_preflight false", "batch_size"),
        ("elsewhere", "-p workers 1", "batch_size"),
    ],
)
def test_each_kind_of_death_has_one_sentence_of_advice(ran_out, named, not_named):
    advice = memory_advice(ran_out)
    assert named in advice
    assert not_named not in advice
    assert "mem_gb" in advice
    assert ran_out in get_args(RanOut)


@pytest.mark.parametrize(
    ("phase", "ran_out"),
    [("train", "batch"), ("control_validation", "batch"), ("preflight", "preflight"), ("setup", "elsewhere")],
)
def test_the_phase_says_what_runs_out(phase, ran_out):
    assert ran_out_in(phase) == ran_out
