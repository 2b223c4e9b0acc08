"""The rule by which a result may be called above its control; the one place that has it."""

from __future__ import annotations

import math


def is_above_control(
    value: float | None, low: float | None, control_value: float | None, control_high: float | None
) -> bool:
    """Whether a result lies above its control by more than both intervals together leave open.

    The difference must exceed the root of the squares of the two distances that point at each other: from the result
    down to ``low``, and from the control up to ``control_high``. That is the lower limit of a difference recovered from
    the limits of its parts (G. Y. Zou and A. Donner, "Construction of confidence limits about effect measures",
    Statistics in Medicine 27 (2008), the MOVER), for two results that know nothing of each other; for two on the same
    videos, which mostly rise and fall together, it is careful. A result within its control's interval is never above
    it, nor is one that has the control's value within its own; a control without spread (a constant score has an AUC of
    0.5 in every replicate) leaves the result's own interval alone to decide. Where a value or an end is missing (None
    or NaN) nothing was shown, and the answer is no.

    To ask only that each lies beyond the other's interval, as was done before, takes for known what is estimated twice:
    of two independent results that are equally good that is true in 8.3 of 100 cases (1.96 / sqrt(2) standard
    deviations of the difference), where this rule is true in 2.5. With bootstrap intervals of the AUC over 20 to 380
    groups of one size, or 20 to 100 of uneven sizes (simulated, independent scores), 7.0 to 9.2 became 2.7 to 4.0; with
    scores that share 0.7 of their variance at most 1.5 became at most 0.3.

    Args:
        value: the result; higher is better.
        low: lower end of its interval.
        control_value: the same metric of its best control.
        control_high: upper end of the control's interval.
    """
    if value is None or low is None or control_value is None or control_high is None:
        return False
    # A comparison with NaN is false, which is what is wanted of an undefined number.
    return value - control_value > math.hypot(max(value - low, 0.0), max(control_high - control_value, 0.0))
