import pytest

from fvc_lib.services.memory.policy import MORE_MEMORY, memory_advice, next_settings


def test_a_step_takes_less_setting_by_setting_and_then_needs_more():
    assert next_settings("batch", batch_size=8)[:3] == (
        "-p batch_size 4", "-p gradient_checkpointing true", "-p num_workers 0",
    )  # fmt: skip
    assert next_settings("batch")[0] == "a smaller batch_size"
    assert next_settings("batch", batch_size=1, num_workers=2)[:2] == (
        "-p gradient_checkpointing true", "-p num_workers 0",
    )  # fmt: skip
    assert next_settings("batch", batch_size=1, recomputes=True, num_workers=0) == (MORE_MEMORY,)
    assert next_settings("batch", batch_size=8, reads=()) == (MORE_MEMORY,)


@pytest.mark.parametrize(
    ("ran_out", "named", "not_named"),
    [
        ("sample", "num_frames", "batch_size"),
        ("validation_sample", "num_frames", "gradient_checkpointing"),
        ("comparison", "effective_batch_size", "-p batch_size"),
        ("optimizer_step", "a smaller model", "gradient_checkpointing"),
        ("loaders", "-p num_workers 0", "batch_size"),
        ("preparation", "-p workers 1", "batch_size"),
        ("before_training", "-p workers 1", "batch_size"),
        ("preflight", "-p memory_preflight false", "more memory"),
        ("batch_size_sweep", "-p batch_size_sweep false", "more memory"),
    ],
)
def test_the_advice_names_what_helps_against_what_ran_out(ran_out, named, not_named):
    advice = memory_advice(ran_out)
    assert advice.startswith("Next, try ")
    assert named in advice
    assert not_named not in advice


def test_half_as_many_workers_are_advised_until_there_is_one():
    assert next_settings("preparation", workers=16) == ("-p workers 8", MORE_MEMORY)
    assert next_settings("preparation", workers=1) == (MORE_MEMORY,)
    assert next_settings("before_training", workers=1, num_workers=2) == ("-p num_workers 0", MORE_MEMORY)
