"""The rule by which a result may be called above its control; the one place that has it."""

from __future__ import annotations


def is_above_control(
    value: float | None, low: float | None, control_value: float | None, control_high: float | None
) -> bool:
    """Whether a result lies above its control: above the control's interval, and its own interval above the control.

    The first half alone would let a control without spread (a constant score has an AUC of 0.5 in every replicate) call
    any 0.51 a success; the second alone would overlook that the control is uncertain as well. Where a value or an end
    is missing (None or NaN) nothing was shown, and the answer is no.

    Args:
        value: the result; higher is better.
        low: lower end of its interval.
        control_value: the same metric of its best control.
        control_high: upper end of the control's interval.
    """
    return _exceeds(value, control_high) and _exceeds(low, control_value)


def _exceeds(left: float | None, right: float | None) -> bool:
    # A comparison with NaN is false, which is what is wanted of an undefined number.
    return left is not None and right is not None and left > right
