"""JupyterLab as ``make lab`` opens it: the dashboard runs, answers to its controls, and asks nobody outside.

The runs it shows have names that would like to be markup, script or SQL; see ``runs.py``.
"""

import pytest

from fvc_lib.services.stage_logs import MetricLog
from tests.browser.runs import EXPERIMENT, RUN

pytestmark = pytest.mark.long


@pytest.mark.fault(38, 39)
def test_the_dashboard_runs_answers_to_its_controls_and_asks_nobody_outside(open_in_lab, lab, runs):
    notebook = open_in_lab("06_analysis_dashboard.ipynb")
    notebook.run_all()
    saved = notebook.saved()
    ran = [cell for cell in saved.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in ran] == list(range(1, len(ran) + 1))
    outputs = [output for cell in ran for output in cell.outputs]
    assert [output for output in outputs if output.output_type == "error"] == []
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []

    figures = sum("application/vnd.plotly.v1+json" in output.get("data", {}) for output in outputs)
    shown = notebook.fingerprints(figures)
    assert len(shown) == figures
    assert len(shown) >= 6

    notebook.drag_slider("Smoothing", 0.8)
    smooth = notebook.wait_for_change(shown)
    assert differing(shown, smooth) == {curves(notebook)}

    notebook.control("Metrics").locator("select").select_option("roc_auc")
    other = notebook.wait_for_change(smooth)
    assert differing(smooth, other) == {curves(notebook)}

    notebook.control("Folds").locator("select").select_option(["fold 0", "fold 3"])
    two_folds = notebook.wait_for_change(other)
    assert curves(notebook) in differing(other, two_folds)

    with MetricLog(runs.shown.metrics("04_fold_training", 3), run_id=runs.shown.run_id, fold=3) as log:
        log.log(step=66, epoch=11, phase="validation", metrics={"roc_auc": 0.9})
    notebook.page.locator("button.widget-button", has_text="Refresh").click()
    refreshed = notebook.wait_for_change(two_folds)
    assert differing(two_folds, refreshed) == {curves(notebook)}

    text = notebook.page.locator(".jp-Notebook").inner_text()
    assert RUN in text
    assert EXPERIMENT.partition("\n")[0] in text
    assert notebook.watched.trouble() == []
    assert lab.reached_outside() == []


def differing(before: list[str], after: list[str]) -> set[int]:
    return {number for number, (one, other) in enumerate(zip(before, after, strict=True)) if one != other}


def curves(notebook) -> int:
    """Which figure shows the learning curves."""
    axes = [figure.inner_text() for figure in notebook.page.locator(".js-plotly-plot").all()]
    (number,) = [number for number, text in enumerate(axes) if "\nStep" in text]
    return number
