"""The look that figures of memory share: a colour for each phase, and the budget as a line where it is in sight."""

from __future__ import annotations

import plotly.graph_objects as go

from fvc_lib.analysis import theme
from fvc_lib.analysis.memory_findings import NEAR_LIMIT_PERCENT, MemoryFindings
from fvc_lib.analysis.memory_wording import megabytes_text

PHASE_COLORS = {
    "setup": "#B8BDC4", "whole_stage": "#B8BDC4", "preflight": "#CC79A7", "fits": "#E3B5CF",
    "train": "#0072B2", "validation": "#E69F00", "test": "#009E73",
    "control_train": "#7FB8D8", "control_validation": "#F2CF80", "control_test": "#80CEB9",
    "report": "#D9DCE1",
}  # fmt: skip
_NEAR_FACTOR = 2.5  # a budget further above the peak than this would flatten everything below it


def far_budget_text(found: MemoryFindings) -> str:
    """For a subtitle: the budget where it is not drawn, or that none is recorded."""
    known = _budget(found)
    if known is None:
        return "; no budget is recorded"
    return f"; budget {megabytes_text(known[0])}, out of sight" if known[0] > _NEAR_FACTOR * known[1] else ""


def draw_budget(figure: go.Figure, found: MemoryFindings, *, horizontal: bool) -> None:
    """The budget and its 90% as lines at their height (or place on the x axis), unless far above the peak."""
    known = _budget(found)
    if known is None or known[0] > _NEAR_FACTOR * known[1]:
        return
    near = known[0] * NEAR_LIMIT_PERCENT / 100
    for value, text, dash in ((known[0], "budget", "solid"), (near, f"{NEAR_LIMIT_PERCENT:.0f}%", "dot")):
        line = {"color": theme.NOT_ABOVE_CONTROL, "width": 1.2, "dash": dash}
        note = {"text": text, "font": {"size": 11, "color": theme.NOT_ABOVE_CONTROL}, "showarrow": False}
        if horizontal:
            figure.add_shape(type="line", x0=0, x1=1, xref="x domain", y0=value, y1=value, line=line)
            figure.add_annotation(x=1, xref="x domain", y=value, xanchor="right", yanchor="bottom", **note)
        else:
            figure.add_shape(type="line", x0=value, x1=value, y0=0, y1=1, yref="y domain", line=line)
            figure.add_annotation(x=value, y=1, yref="y domain", xanchor="center", yanchor="bottom", **note)


def _budget(found: MemoryFindings) -> tuple[float, float] | None:
    """The budget of where the peak is and that peak, in MB."""
    peak = found.peak
    return None if peak is None or peak["budget_mb"] is None else (peak["budget_mb"], peak["used_mb"])
