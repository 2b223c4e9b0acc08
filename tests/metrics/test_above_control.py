from __future__ import annotations

import pytest

from fvc_lib.metrics.above_control import is_above_control


@pytest.mark.parametrize(
    ("value", "low", "control_value", "control_high", "above"),
    [
        (0.9, 0.8, 0.5, 0.6, True),
        (0.6, 0.55, 0.5, 0.6, False),  # within the control's interval, its end included
        (0.9, 0.4, 0.5, 0.6, False),  # so uncertain that the control's value is among the possible ones
        (0.51, 0.3, 0.5, 0.5, False),  # a constant has no spread: that alone must not make 0.51 a success
        (0.3, 0.2, 0.5, 0.6, False),
        (None, None, 0.5, 0.6, False),
        (0.9, None, 0.5, 0.6, False),
        (0.9, 0.8, 0.5, None, False),
        (0.9, 0.8, None, None, False),
        (float("nan"), 0.8, 0.5, 0.6, False),
        (0.9, 0.8, 0.5, float("nan"), False),
    ],
)
def test_both_halves_of_the_rule_are_needed(
    value: float | None, low: float | None, control_value: float | None, control_high: float | None, above: bool
) -> None:
    assert is_above_control(value, low, control_value, control_high) is above
