"""A click on a fold in any figure of a live notebook, told to Python."""

from __future__ import annotations

from typing import Any

NO_FOLD = -1

# Figures of the notebook's own plotly renderer tell Python nothing, and widgets of plotly weigh 5 MB each in a record.
# So one small widget listens to the page: a press and release on one spot, over a point whose trace shows a fold.
_SCRIPT = """
function foldAt(target) {
  const plot = target && target.closest ? target.closest(".js-plotly-plot") : null;
  const point = plot && plot._hoverdata ? plot._hoverdata[0] : null;
  const meta = point && point.data ? point.data.meta : null;
  return meta && Number.isInteger(meta.fold) ? meta.fold : null;
}
function render({ model }) {
  let pressed = null;
  const down = (event) => {
    const fold = foldAt(event.target);
    pressed = fold === null ? null : { fold, x: event.clientX, y: event.clientY };
  };
  const up = (event) => {
    if (pressed && Math.hypot(event.clientX - pressed.x, event.clientY - pressed.y) < 4) {
      model.set("fold", model.get("fold") === pressed.fold ? -1 : pressed.fold);
      model.save_changes();
    }
    pressed = null;
  };
  document.addEventListener("mousedown", down, true);
  document.addEventListener("mouseup", up, true);
  return () => {
    document.removeEventListener("mousedown", down, true);
    document.removeEventListener("mouseup", up, true);
  };
}
export default { render };
"""


def fold_clicks() -> Any:
    """A widget without a look whose trait ``fold`` is the fold clicked last, or ``NO_FOLD`` after a second click."""
    import anywidget  # heavy, and nothing but the live dashboard needs it
    import traitlets

    class FoldClicks(anywidget.AnyWidget):
        _esm = _SCRIPT
        fold = traitlets.Int(NO_FOLD).tag(sync=True)

    return FoldClicks()
