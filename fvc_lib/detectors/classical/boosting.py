"""``forensic_boosting``: gradient boosting of small trees on features, scikit-learn's."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from fvc_lib.detectors.classical.model import Arrays, FloatArray, Part, Settings, forensic_spec
from fvc_lib.services.errors import FvcError
from fvc_lib.services.registry import DETECTORS

RATE = 0.1


def tree_settings() -> Sequence[Settings]:
    """Few and small trees first."""
    return [{"rounds": rounds, "leaves": leaves} for leaves, rounds in ((3, 40), (3, 120), (8, 60))]


def informative(values: FloatArray) -> npt.NDArray[np.int64]:
    """(K,), the columns of ``values`` (N, F) that have any value: others cannot be binned."""
    return np.flatnonzero(~np.isnan(values).all(0))


class Boosting:
    """After scikit-learn's ``HistGradientBoostingClassifier`` (LightGBM: G. Ke et al., NIPS 2017). A missing value
    goes to the side where training found that such videos belong.
    """

    def candidates(self, num_rows: int) -> Sequence[Settings]:
        """Few and small trees first."""
        return tree_settings()

    def fit(self, part: Part, settings: Settings) -> Arrays:
        """Every tree's nodes one after the other, ``first`` (T,) being the root of each; ``baseline`` (1,)."""
        from sklearn.ensemble import HistGradientBoostingClassifier  # a second to load

        columns = informative(part.values)
        if not columns.size:  # nothing differs: only the share of fakes is known
            share = float(np.average(part.labels, weights=part.weights))
            return {"columns": columns, "baseline": np.log([share / (1 - share)]), "first": np.empty(0, np.int64)}
        model = HistGradientBoostingClassifier(
            learning_rate=RATE,
            max_iter=int(settings["rounds"]),
            max_leaf_nodes=int(settings["leaves"]),
            # With few videos the default of 20 would allow one split.
            min_samples_leaf=min(max(len(part.labels) // 10, 3), 20),
            l2_regularization=1.0,
            early_stopping=False,  # it would hold out single videos, not groups
            random_state=0,
        )
        # Of so few rows threads take a hundred times longer than one, where others want the cores as well.
        with threadpool_limits(1, user_api="openmp"):
            model.fit(part.values[:, columns], part.labels, part.weights)
            expected = model.decision_function(part.values[:, columns])
        arrays = {"columns": columns, **_trees(model)}
        if not np.array_equal(self.logits(arrays, part.values), expected):
            raise FvcError(
                "forensic_boosting: the trees taken out of scikit-learn's model do not say what it says. Install the "
                "version that requirements.lock names, and report this one."
            )
        return arrays

    def logits(self, arrays: Arrays, values: FloatArray) -> FloatArray:
        """Float64 (N,), added up tree by tree."""
        seen, rows = values[:, arrays["columns"]], np.arange(len(values))
        logits = np.full(len(values), float(arrays["baseline"][0]))
        for root in arrays["first"].tolist():
            node = np.full(len(values), root)
            while not (leaf := arrays["is_leaf"][node].astype(bool)).all():
                value = seen[rows, arrays["feature"][node]]
                missing = np.isnan(value)
                goes_left = np.where(missing, arrays["missing_left"][node] == 1, value <= arrays["threshold"][node])
                child = root + np.where(goes_left, arrays["left"][node], arrays["right"][node])
                node = np.where(leaf, node, child)
            logits += arrays["value"][node]
        return logits


def _trees(model: Any) -> Arrays:
    """The nodes of a fitted model; its trees are attributes that scikit-learn does not promise, so ``fit`` checks."""
    nodes = [predictor.nodes for (predictor,) in model._predictors]
    sizes = np.array([len(each) for each in nodes])
    every = np.concatenate(nodes)
    names = {
        "feature": "feature_idx", "threshold": "num_threshold", "missing_left": "missing_go_to_left", "left": "left",
        "right": "right", "value": "value", "is_leaf": "is_leaf",
    }  # fmt: skip
    arrays = {name: np.ascontiguousarray(every[field]) for name, field in names.items()}
    whole = {
        name: array.astype(np.int64) if array.dtype.kind in "iu" and array.dtype != np.uint8 else array
        for name, array in arrays.items()
    }
    baseline = np.ravel(model._baseline_prediction).astype(np.float64)
    return {**whole, "first": np.cumsum(sizes) - sizes, "baseline": baseline}


DETECTORS.register(
    forensic_spec(
        name="forensic_boosting",
        paper="G. Ke et al., LightGBM: A highly efficient gradient boosting decision tree, NIPS 2017",
        bibtex="@inproceedings{ke2017lightgbm, title={LightGBM: A highly efficient gradient boosting decision tree}, "
        "author={Ke, Guolin and others}, booktitle={NIPS}, year={2017}}",
        build=Boosting,
    )
)
