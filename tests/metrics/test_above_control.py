from __future__ import annotations

import numpy as np
import pytest

from fvc_lib.metrics.paired_difference import is_above_control


@pytest.mark.parametrize(
    ("value", "low", "control_value", "control_high", "above"),
    [
        (0.9, 0.8, 0.5, 0.6, True),
        (0.6, 0.55, 0.5, 0.6, False),  # within the control's interval, its end included
        (0.9, 0.4, 0.5, 0.6, False),  # so uncertain that the control's value is among the possible ones
        (0.51, 0.3, 0.5, 0.5, False),  # a constant has no spread: that alone must not make 0.51 a success
        (0.52, 0.505, 0.5, 0.5, True),  # nor against one: there is nothing else that could be chance
        (0.3, 0.2, 0.5, 0.6, False),
        (0.72, 0.61, 0.6, 0.7, False),  # each beyond the other's interval, and both together open
        (0.76, 0.65, 0.6, 0.7, True),
        (0.7, 0.6, 0.7, 0.6, False),
        (None, None, 0.5, 0.6, False),
        (0.9, None, 0.5, 0.6, False),
        (0.9, 0.8, 0.5, None, False),
        (0.9, 0.8, None, None, False),
        (float("nan"), 0.8, 0.5, 0.6, False),
        (0.9, 0.8, 0.5, float("nan"), False),
    ],
)
def test_it_takes_more_than_both_intervals_leave_open(
    value: float | None, low: float | None, control_value: float | None, control_high: float | None, above: bool
) -> None:
    assert is_above_control(value, low, control_value, control_high) is above


@pytest.mark.parametrize(("width", "control_width"), [(1.0, 1.0), (1.0, 0.3), (0.2, 1.0), (1.0, 0.0)])
def test_of_equally_good_results_no_more_than_their_intervals_promise_are_above(width, control_width):
    """Intervals of 95% err upwards in 2.5 of 100 cases, whatever the two widths are to each other."""
    draw = np.random.default_rng(0)
    values, controls = draw.normal(0, width, 20_000), draw.normal(0, control_width, 20_000)
    pairs = list(zip(values.tolist(), controls.tolist(), strict=True))
    above = [is_above_control(v, v - 1.96 * width, c, c + 1.96 * control_width) for v, c in pairs]
    each_beyond = [v > c + 1.96 * control_width and v - 1.96 * width > c for v, c in pairs]
    assert np.mean(above) == pytest.approx(0.025, abs=0.004)
    assert all(beyond for beyond, found in zip(each_beyond, above, strict=True) if found)
    if width == control_width:
        assert np.mean(each_beyond) == pytest.approx(0.083, abs=0.006)  # why that alone does not do
