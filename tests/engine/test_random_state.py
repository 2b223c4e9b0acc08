import random

import numpy as np
import pytest
import torch

from fvc_lib.engine.random_state import capture_random_state, forked_random_state, restore_random_state, stable_seed

CPU = torch.device("cpu")


def draw() -> list[float]:
    """Draw from every generator. Normal draws leave a second value stored in NumPy and Python."""
    return [torch.rand(()).item(), np.random.normal(), random.gauss(0, 1), np.random.random(), random.random()]


@pytest.mark.parametrize("draws_before", range(3))
def test_a_restored_state_repeats_every_draw(draws_before):
    with forked_random_state(5, CPU):
        for _ in range(draws_before):
            draw()
        state = capture_random_state(CPU)
        first = [draw() for _ in range(400)]  # beyond one block of the Mersenne Twister
        restore_random_state(state, CPU)
        assert [draw() for _ in range(400)] == first


def test_seeds_are_the_same_on_every_machine():
    assert stable_seed("fold", 0, 1) == 3814335672677516077
