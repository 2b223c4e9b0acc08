"""Every metric is declared once, with its direction, and found under every name that logs and tables give it."""

import pytest

from fvc_lib.metrics.cross_validation import DECISION_METRICS, METRICS, PROBABILITY_METRICS, RANKING_METRICS
from fvc_lib.metrics.declaration import declaration, declare, is_share


def test_the_metrics_of_a_cross_validation_are_those_declared_for_it_in_their_order():
    assert list(RANKING_METRICS) == [
        "roc_auc", "average_precision", "equal_error_rate", "true_positive_rate_at_5_percent",
        "true_positive_rate_at_1_percent", "true_positive_rate_at_0_1_percent", "partial_auc_to_10_percent",
    ]  # fmt: skip
    assert list(DECISION_METRICS) == ["f1", "balanced_accuracy", "matthews_correlation"]
    assert list(PROBABILITY_METRICS) == ["brier_score", "expected_calibration_error"]
    lower = {name for name in METRICS if declaration(name).better == "lower"}
    assert lower == {"equal_error_rate", "brier_score", "expected_calibration_error"}
    assert METRICS["roc_auc"]([0, 1, 1], [0.1, 0.9, 0.05]) == 0.5


@pytest.mark.parametrize(
    ("name", "title", "better", "share"),
    [
        ("roc_auc", "ROC AUC", "higher", True),
        ("text_to_video/recall@5", "Recall@5", "higher", True),
        ("mae_calories", "Mean absolute error, calories", "lower", False),
        ("r2_mass_of_dish", "R², mass_of_dish", "higher", False),
        ("brier_score_uncalibrated", "Brier score before temperature", "lower", False),
        ("validation/loss", "Loss", "lower", False),
    ],
)
def test_a_metric_is_found_under_the_names_that_logs_and_tables_give_it(name, title, better, share):
    found = declaration(name)
    assert (found.title, found.better, is_share(name)) == (title, better, share)


def test_what_has_no_better_way_and_what_is_unknown():
    assert declaration("learning_rate").better is None
    for name in ("no_such_metric", "mae_", "recall"[:3]):
        assert declaration(name) is None


def test_a_second_metric_of_one_name_is_refused():
    with pytest.raises(ValueError, match="'roc_auc' is declared twice"):
        declare("roc_auc", "ROC AUC", "higher", "Something else.")
