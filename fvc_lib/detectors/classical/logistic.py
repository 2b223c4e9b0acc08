"""``forensic_logistic``: logistic regression with an L2 penalty on standardised features."""

from collections.abc import Sequence

import numpy as np

from fvc_lib.detectors.classical.model import Arrays, FloatArray, Part, Settings, forensic_spec
from fvc_lib.services.registry import DETECTORS


class Standardised:
    """Features as numbers of mean 0 and deviation 1, missing ones as the median, and for each that training misses
    somewhere whether it is missing.
    """

    @staticmethod
    def fit(values: FloatArray) -> Arrays:
        """``median`` (F,), ``indicator`` (K,), ``mean`` and ``scale`` (F + K,) of ``values`` (N, F)."""
        missing = np.isnan(values)
        known = np.where(missing.all(0), 0.0, values)  # what training has none of stays at 0
        median = np.nanmedian(known, axis=0)
        arrays = {"median": median, "indicator": np.flatnonzero(missing.any(0) & ~missing.all(0)).astype(np.int64)}
        filled = Standardised._filled(arrays, values)
        scale = filled.std(0)
        # A column of one value says nothing, however little that value is off by rounding.
        constant = scale <= 1e-12 * np.abs(filled).max(0)
        return {**arrays, "mean": filled.mean(0), "scale": np.where(constant, np.inf, scale)}

    @staticmethod
    def of(arrays: Arrays, values: FloatArray) -> FloatArray:
        """Float64 (N, F + K) of ``values`` (N, F)."""
        result: FloatArray = (Standardised._filled(arrays, values) - arrays["mean"]) / arrays["scale"]
        return result

    @staticmethod
    def _filled(arrays: Arrays, values: FloatArray) -> FloatArray:
        missing = np.isnan(values)
        return np.hstack([np.where(missing, arrays["median"], values), missing[:, arrays["indicator"]]])


class Logistic:
    """After scikit-learn's ``LogisticRegression`` (L-BFGS); ``penalty`` is 1 / C."""

    def candidates(self, num_rows: int) -> Sequence[Settings]:
        """Penalties from strong to weak."""
        return [{"penalty": penalty} for penalty in (3000.0, 300.0, 30.0, 3.0, 0.3)]

    def fit(self, part: Part, settings: Settings) -> Arrays:
        """``weight`` (F + K,) and ``intercept`` (1,) beside what ``Standardised`` has."""
        from sklearn.linear_model import LogisticRegression  # a second to load

        arrays = Standardised.fit(part.values)
        model = LogisticRegression(C=1 / settings["penalty"], max_iter=5000)
        model.fit(Standardised.of(arrays, part.values), part.labels, part.weights)
        return {**arrays, "weight": model.coef_[0], "intercept": model.intercept_}

    def logits(self, arrays: Arrays, values: FloatArray) -> FloatArray:
        """Float64 (N,)."""
        logits: FloatArray = Standardised.of(arrays, values) @ arrays["weight"] + arrays["intercept"]
        return logits


DETECTORS.register(
    forensic_spec(
        name="forensic_logistic",
        paper="D. R. Cox, The regression analysis of binary sequences, 1958",
        bibtex="@article{cox1958regression, title={The regression analysis of binary sequences}, author={Cox, David "
        "R}, journal={Journal of the Royal Statistical Society B}, volume={20}, pages={215--242}, year={1958}}",
        build=Logistic,
    )
)
