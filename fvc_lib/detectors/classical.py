"""Classical models on features of whole videos, by scikit-learn, XGBoost and LightGBM.

Every model consists of candidate settings, a function that fits it, and a function that computes scores. A fitted model
is a dictionary of arrays, saved as safetensors like the weights of a network. The models of XGBoost and LightGBM are
stored in the libraries' text formats, as arrays of bytes. No file is unpickled.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.registry import DETECTORS, DetectorSpec

Values = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]
Settings = Mapping[str, float]  # hyper-parameters by name


@dataclass(frozen=True)
class ClassicalModel:
    """The functions and candidate settings of one kind of estimator; fitted state is not stored here.

    Attributes:
        candidates: hyper-parameters among which a training chooses, the simplest model first.
        fit: deterministic function that returns the fitted arrays. It takes features float64 (N, F) with NaN where
            missing, labels int64 (N,) of both classes (1 is fake), sample weights float64 (N,) and one of
            ``candidates``.
        logits: function that takes the fitted arrays and features float64 (N, F). It returns scores float64 (N,),
            positive for fake: log odds, or margins for the support vector machine.
        per_frame: whether both functions take the features of all T frames, float64 (N, T, F).
        fewest_frames: the smallest number of frames of a clip with which the model works.
    """

    candidates: tuple[Settings, ...]
    fit: Callable[[Values, Labels, Values, Settings], Arrays]
    logits: Callable[[Arrays, Values], Values]
    per_frame: bool = False
    fewest_frames: int = 1


def fit_scaling(values: Values) -> Arrays:
    """Compute the medians, means and standard deviations of training features, with which ``scaled`` standardises.

    Args:
        values: float64 (N, F), NaN where missing.

    Returns:
        A mapping with

            * ``median``: float64 (F,), medians of the columns.
            * ``indicator``: int64 (K,), indices of the columns in which some values are missing, but not all.
            * ``mean``, ``scale``: float64 (F + K,), mean and standard deviation of the F columns and of their K
              missing-value indicators. The scale of a constant column is infinite.
    """
    missing = np.isnan(values)
    known = np.where(missing.all(0), 0.0, values)
    sometimes_missing = missing.any(0) & ~missing.all(0)
    arrays = {
        "median": np.nanmedian(known, axis=0),
        "indicator": np.flatnonzero(sometimes_missing).astype(np.int64),
    }
    filled = _filled(arrays, values)
    scale = filled.std(0)
    constant = scale <= 1e-12 * np.abs(filled).max(0)  # rounding alone must not make a column vary
    return {**arrays, "mean": filled.mean(0), "scale": np.where(constant, np.inf, scale)}


def scaled(arrays: Arrays, values: Values) -> Values:
    """Standardise features: return float64 (N, F + K), the F columns of ``values``, then K missing-value indicators.

    Columns have mean 0 and standard deviation 1 in training. A missing value is replaced by the column's median. A
    column that was constant in training becomes 0.

    Args:
        arrays: the result of ``fit_scaling`` on training values.
        values: float64 (N, F), NaN where missing.

    Raises:
        ValueError: the arrays are made for another number of columns than ``values`` has.
    """
    filled = _filled(arrays, values)
    if {arrays[name].shape for name in ("mean", "scale")} != {filled.shape[1:]}:
        raise ValueError(f"mean or scale of another shape than {filled.shape[1:]}")
    return (filled - arrays["mean"]) / arrays["scale"]


def _filled(arrays: Arrays, values: Values) -> Values:
    missing = np.isnan(values)
    if arrays["median"].shape != values.shape[1:]:
        raise ValueError(f"medians of {len(arrays['median'])} features")
    return np.hstack([np.where(missing, arrays["median"], values), missing[:, arrays["indicator"]]])


def _fit_logistic(values: Values, labels: Labels, weights: Values, settings: Settings) -> Arrays:
    from sklearn.linear_model import LogisticRegression  # takes a second to load

    scaling = fit_scaling(values)
    model = LogisticRegression(C=1 / settings["penalty"], max_iter=5000)
    model.fit(scaled(scaling, values), labels, weights)
    return {**scaling, "weight": model.coef_[0], "intercept": model.intercept_}


def _logistic_logits(arrays: Arrays, values: Values) -> Values:
    return scaled(arrays, values) @ arrays["weight"] + arrays["intercept"]


def _fit_svm(values: Values, labels: Labels, weights: Values, settings: Settings) -> Arrays:
    from sklearn.svm import SVC

    scaling = fit_scaling(values)
    seen = scaled(scaling, values)
    gamma = 1 / (settings["width"] * seen.shape[1])
    model = SVC(C=settings["c"], gamma=gamma).fit(seen, labels, weights)
    machine = {"vectors": model.support_vectors_, "duals": model.dual_coef_[0], "bias": model.intercept_}
    return {**scaling, **machine, "gamma": np.array([gamma])}


def _svm_logits(arrays: Arrays, values: Values) -> Values:
    """Return the margins of a support vector machine, float64 (N,), positive for fake.

    Margins are not log odds. The training multiplies them by a fitted factor, the temperature, which makes them log
    odds (Platt, 1999).
    """
    from sklearn.metrics.pairwise import rbf_kernel

    kernel: Values = rbf_kernel(scaled(arrays, values), arrays["vectors"], gamma=float(arrays["gamma"][0]))
    return kernel @ arrays["duals"] + arrays["bias"]


_RATE = 0.1
_TREES = tuple({"rounds": rounds, "leaves": leaves} for leaves, rounds in ((3, 40), (3, 120), (8, 60)))


def _smallest_leaf(num_rows: int) -> int:
    """Return the least number of rows in a leaf of a tree: a tenth of ``num_rows``, at least 3 and at most 20.

    scikit-learn's default is always 20, which would allow only a single split with 50 videos.
    """
    return min(max(num_rows // 10, 3), 20)


def boosting(num_rows: int, rounds: int, leaves: int, categorical: Sequence[bool] | None = None) -> Any:
    """Return an unfitted ``HistGradientBoostingClassifier`` for a training part of ``num_rows`` rows.

    The least number of rows in a leaf is adapted to small training parts: a tenth of the rows, at least 3 and at most
    20.

    Args:
        num_rows: number of rows of the training part.
        rounds: number of trees.
        leaves: largest number of leaves of a tree.
        categorical: for every column whether it holds categories; None: no column does.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier  # takes a second to load

    return HistGradientBoostingClassifier(
        learning_rate=_RATE,
        max_iter=rounds,
        max_leaf_nodes=leaves,
        min_samples_leaf=_smallest_leaf(num_rows),
        l2_regularization=1.0,
        categorical_features=categorical,
        early_stopping=False,  # it would hold out single videos, not groups
        random_state=0,
    )


def _fit_boosting(values: Values, labels: Labels, weights: Values, settings: Settings) -> Arrays:
    values = np.where(np.isnan(values).all(0), 0.0, values)  # a column in which all values are missing cannot be binned
    model = boosting(len(labels), int(settings["rounds"]), int(settings["leaves"]))
    # On so few rows several threads take a hundred times longer than one if other processes want the cores.
    with threadpool_limits(1, user_api="openmp"):
        model.fit(values, labels, weights)
        expected = model.decision_function(values)
    arrays = _trees(model)
    if not np.array_equal(_boosting_logits(arrays, values), expected):
        raise FvcError(
            "forensic_boosting: the stored trees do not give the scores of scikit-learn's model. Install the version "
            "in requirements.lock, and report this one."
        )
    return arrays


def _trees(model: Any) -> Arrays:
    """Return the trees of a fitted ``HistGradientBoostingClassifier`` as arrays.

    The nodes of the T trees are joined to one array per field, such as ``feature`` and ``threshold``. ``first`` int64
    (T,) holds the index of every tree's root, ``baseline`` float64 (1,) the log odds before the first tree.

    scikit-learn does not document the attributes that are read, so ``_fit_boosting`` checks the result.
    """
    nodes = [predictor.nodes for (predictor,) in model._predictors]
    sizes = np.array([len(each) for each in nodes])
    every = np.concatenate(nodes)
    fields = {
        "feature": ("feature_idx", np.int64), "threshold": ("num_threshold", np.float64),
        "missing_left": ("missing_go_to_left", np.uint8), "left": ("left", np.int64), "right": ("right", np.int64),
        "value": ("value", np.float64), "is_leaf": ("is_leaf", np.uint8),
    }  # fmt: skip
    arrays = {name: every[field].astype(kind) for name, (field, kind) in fields.items()}
    baseline = np.ravel(model._baseline_prediction).astype(np.float64)
    return {**arrays, "first": np.cumsum(sizes) - sizes, "baseline": baseline}


def _boosting_logits(arrays: Arrays, values: Values) -> Values:
    rows = np.arange(len(values))
    logits = np.full(len(values), float(arrays["baseline"][0]))
    for root in arrays["first"].tolist():
        node = np.full(len(values), root)
        while not (leaf := arrays["is_leaf"][node].astype(bool)).all():
            value = values[rows, arrays["feature"][node]]
            missing_goes_left = arrays["missing_left"][node] == 1
            is_below = value <= arrays["threshold"][node]
            goes_left = np.where(np.isnan(value), missing_goes_left, is_below)
            child = root + np.where(goes_left, arrays["left"][node], arrays["right"][node])
            node = np.where(leaf, node, child)
        logits += arrays["value"][node]
    return logits


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{name} is not installed ({error}). pip install 'fvc_lib[detectors]'") from error


def _fit_xgboost(values: Values, labels: Labels, weights: Values, settings: Settings) -> Arrays:
    xgboost = _package("xgboost")
    parameters = {
        "objective": "binary:logistic", "eta": _RATE, "tree_method": "hist", "grow_policy": "lossguide",
        "max_leaves": int(settings["leaves"]), "max_depth": 0, "lambda": 1.0, "seed": 0, "nthread": 1,
        "min_child_weight": 1.0, "verbosity": 0,
    }  # fmt: skip
    data = xgboost.DMatrix(values, labels, weight=weights)
    booster = xgboost.train(parameters, data, num_boost_round=int(settings["rounds"]))
    return {"json": np.frombuffer(bytes(booster.save_raw("json")), np.uint8).copy()}


def _xgboost_logits(arrays: Arrays, values: Values) -> Values:
    xgboost = _package("xgboost")
    booster = xgboost.Booster({"nthread": 1})
    booster.load_model(bytearray(arrays["json"].tobytes()))
    return np.asarray(booster.predict(xgboost.DMatrix(values), output_margin=True), np.float64)


def _fit_lightgbm(values: Values, labels: Labels, weights: Values, settings: Settings) -> Arrays:
    lightgbm = _package("lightgbm")
    parameters = {
        "objective": "binary", "learning_rate": _RATE, "num_leaves": int(settings["leaves"]), "lambda_l2": 1.0,
        "min_data_in_leaf": _smallest_leaf(len(labels)), "seed": 0, "num_threads": 1, "verbose": -1,
        "deterministic": True, "force_row_wise": True,
    }  # fmt: skip
    data = lightgbm.Dataset(values, labels, weight=weights, params={"verbose": -1})
    booster = lightgbm.train(parameters, data, num_boost_round=int(settings["rounds"]))
    return {"text": np.frombuffer(booster.model_to_string().encode(), np.uint8).copy()}


def _lightgbm_logits(arrays: Arrays, values: Values) -> Values:
    lightgbm = _package("lightgbm")
    booster = lightgbm.Booster(model_str=arrays["text"].tobytes().decode())
    return np.asarray(booster.predict(values, raw_score=True, num_threads=1), np.float64)


LOGISTIC = ClassicalModel(
    tuple({"penalty": penalty} for penalty in (3000.0, 300.0, 30.0, 3.0, 0.3)), _fit_logistic, _logistic_logits
)
# ``c`` is the cost of a video on the wrong side. ``width`` times F is the squared width of the Gaussian kernel.
SVM = ClassicalModel(
    tuple({"c": c, "width": width} for width in (10.0, 1.0) for c in (0.1, 1.0, 10.0)), _fit_svm, _svm_logits
)
BOOSTING = ClassicalModel(_TREES, _fit_boosting, _boosting_logits)
XGBOOST = ClassicalModel(_TREES, _fit_xgboost, _xgboost_logits)
LIGHTGBM = ClassicalModel(_TREES, _fit_lightgbm, _lightgbm_logits)


_GBM = (
    "G. Ke et al., LightGBM: A highly efficient gradient boosting decision tree, NIPS 2017",
    (
        "@inproceedings{ke2017lightgbm, title={LightGBM: A highly efficient gradient boosting decision tree}, "
        "author={Ke, Guolin and others}, booktitle={NIPS}, year={2017}}"
    ),
)
_MODELS: dict[str, tuple[ClassicalModel, tuple[str, ...], str, str]] = {
    "forensic_logistic": (
        LOGISTIC,
        (),
        "D. R. Cox, The regression analysis of binary sequences, 1958",
        (
            "@article{cox1958regression, title={The regression analysis of binary sequences}, author={Cox, David R}, "
            "journal={Journal of the Royal Statistical Society B}, volume={20}, pages={215--242}, year={1958}}"
        ),
    ),
    "forensic_svm": (
        SVM,
        (),
        "C. Cortes and V. Vapnik, Support-vector networks, 1995",
        (
            "@article{cortes1995support, title={Support-vector networks}, author={Cortes, Corinna and Vapnik, "
            "Vladimir}, journal={Machine Learning}, volume={20}, pages={273--297}, year={1995}}"
        ),
    ),
    "forensic_boosting": (BOOSTING, (), *_GBM),
    "forensic_xgboost": (
        XGBOOST,
        ("xgboost",),
        "T. Chen and C. Guestrin, XGBoost: A scalable tree boosting system, KDD 2016",
        (
            "@inproceedings{chen2016xgboost, title={XGBoost: A scalable tree boosting system}, author={Chen, Tianqi "
            "and Guestrin, Carlos}, booktitle={KDD}, year={2016}}"
        ),
    ),
    "forensic_lightgbm": (LIGHTGBM, ("lightgbm",), *_GBM),
}


for _name, (_model, _packages, _paper, _bibtex) in _MODELS.items():
    DETECTORS.register(
        DetectorSpec(
            name=_name,
            family="classical",
            paper=f"{_paper}; features: see their families",
            bibtex=_bibtex,
            licence="this project's",
            num_frames=6,  # number and side of the frames that a result page shows; the model does not use them
            side=112,
            normalisation="none: the model sees features of the coded frames, not clips",
            micro_batch=1,
            estimator=_model,
            packages=_packages,
            of_features="forensic",
        )
    )


def refuse_settings(config: RunConfig) -> None:
    """Raise ``UsageError`` if ``config`` sets parameters that do not apply to a model on features, such as ``head``."""
    if config.of_features == "both" and config.self_blended:
        raise UsageError(
            "self_blended: pseudo-fakes are made of frames, and have no forensic features. Add -p views frames, or "
            "leave self_blended out."
        )
    on_clips = config.of_features != "forensic"
    estimator, num_frames = DETECTORS.get(config.model).estimator, config.clips.num_frames
    if on_clips and num_frames < estimator.fewest_frames:
        raise UsageError(
            f"num_frames: got {num_frames}, and model {config.model!r} wants {estimator.fewest_frames} or more."
        )
    several = on_clips and not estimator.per_frame  # clips of a video are averaged
    wrong: dict[str, object] = {
        "num_ranks": config.num_ranks > 1,
        "device": config.device not in ("auto", "cpu"),
        "head": config.head,
        "wavelet_bands": config.wavelet_bands,
        "tune": config.tune and not (on_clips and config.tune == "head"),
        "l2_normalise": config.l2_normalise,
        "clips_per_video": config.clips_per_video > 1 and not several,
        "model_weights": config.model_weights and not on_clips,
        "crop": config.crop and not on_clips,
        "self_blended": config.self_blended and not on_clips,
    }
    if names := [name for name, is_wrong in wrong.items() if is_wrong]:
        raise UsageError(
            f"{', '.join(names)}: model {config.model!r} is fitted to features of whole videos, in one process on the "
            "CPU. Leave them out."
        )
