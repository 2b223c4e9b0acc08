"""``forensic_xgboost`` and ``forensic_lightgbm``: trees as ``forensic_boosting`` has, by these packages if installed.

What they store is their own text format (JSON; LightGBM's model file) as bytes, which runs no code when it is read.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fvc_lib.detectors.classical.boosting import RATE, tree_settings
from fvc_lib.detectors.classical.model import Arrays, FloatArray, Part, Settings, forensic_spec
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import DETECTORS


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{name} is not installed ({error}). pip install 'fvc_lib[boosters]'") from error


class XgBoost:
    """After T. Chen and C. Guestrin, "XGBoost: A scalable tree boosting system" (KDD 2016)."""

    def candidates(self, num_rows: int) -> Sequence[Settings]:
        """Few and small trees first."""
        return tree_settings()

    def fit(self, part: Part, settings: Settings) -> Arrays:
        """``json`` uint8, the booster's own."""
        package = _package("xgboost")
        data = package.DMatrix(part.values, part.labels, weight=part.weights)
        asked = {
            "objective": "binary:logistic", "eta": RATE, "tree_method": "hist", "grow_policy": "lossguide",
            "max_leaves": int(settings["leaves"]), "max_depth": 0, "lambda": 1.0, "seed": 0, "nthread": 1,
            "min_child_weight": 1.0, "verbosity": 0,
        }  # fmt: skip
        booster = package.train(asked, data, num_boost_round=int(settings["rounds"]))
        return {"json": np.frombuffer(bytes(booster.save_raw("json")), np.uint8).copy()}

    def logits(self, arrays: Arrays, values: FloatArray) -> FloatArray:
        """Float64 (N,)."""
        package = _package("xgboost")
        booster = package.Booster({"nthread": 1})
        booster.load_model(bytearray(arrays["json"].tobytes()))
        return np.asarray(booster.predict(package.DMatrix(values), output_margin=True), np.float64)


class LightGbm:
    """After G. Ke et al., "LightGBM: A highly efficient gradient boosting decision tree" (NIPS 2017)."""

    def candidates(self, num_rows: int) -> Sequence[Settings]:
        """Few and small trees first."""
        return tree_settings()

    def fit(self, part: Part, settings: Settings) -> Arrays:
        """``text`` uint8, LightGBM's model file."""
        package = _package("lightgbm")
        asked = {
            "objective": "binary", "learning_rate": RATE, "num_leaves": int(settings["leaves"]), "lambda_l2": 1.0,
            "min_data_in_leaf": min(max(len(part.labels) // 10, 3), 20), "seed": 0, "num_threads": 1, "verbose": -1,
            "deterministic": True, "force_row_wise": True,
        }  # fmt: skip
        data = package.Dataset(part.values, part.labels, weight=part.weights, params={"verbose": -1})
        booster = package.train(asked, data, num_boost_round=int(settings["rounds"]))
        return {"text": np.frombuffer(booster.model_to_string().encode(), np.uint8).copy()}

    def logits(self, arrays: Arrays, values: FloatArray) -> FloatArray:
        """Float64 (N,)."""
        booster = _package("lightgbm").Booster(model_str=arrays["text"].tobytes().decode())
        return np.asarray(booster.predict(values, raw_score=True, num_threads=1), np.float64)


DETECTORS.register(
    forensic_spec(
        name="forensic_xgboost",
        paper="T. Chen and C. Guestrin, XGBoost: A scalable tree boosting system, KDD 2016",
        bibtex="@inproceedings{chen2016xgboost, title={XGBoost: A scalable tree boosting system}, author={Chen, Tianqi "
        "and Guestrin, Carlos}, booktitle={KDD}, year={2016}}",
        build=XgBoost,
        packages=("xgboost",),
    )
)
DETECTORS.register(
    forensic_spec(
        name="forensic_lightgbm",
        paper="G. Ke et al., LightGBM: A highly efficient gradient boosting decision tree, NIPS 2017",
        bibtex="@inproceedings{ke2017lightgbm, title={LightGBM: A highly efficient gradient boosting decision tree}, "
        "author={Ke, Guolin and others}, booktitle={NIPS}, year={2017}}",
        build=LightGbm,
        packages=("lightgbm",),
    )
)
