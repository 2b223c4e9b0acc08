"""``forensic_svm``: a support vector machine with a Gaussian kernel on standardised features."""

from collections.abc import Sequence

import numpy as np

from fvc_lib.detectors.classical.logistic import Standardised
from fvc_lib.detectors.classical.model import Arrays, FloatArray, Part, Settings, forensic_spec
from fvc_lib.services.registry import DETECTORS

_INNER = 5  # folds of groups, from which the margins come that the line to log odds is fitted on


class SupportVectors:
    """After scikit-learn's ``SVC``. Margins become log odds by a line (J. Platt, "Probabilistic outputs for support
    vector machines", 1999) that is fitted on margins of videos whose groups the machine had not seen.

    ``c`` is the cost of a video on the wrong side, ``width`` times F the squared width of the kernel.
    """

    def candidates(self, num_rows: int) -> Sequence[Settings]:
        """Wide kernels and low costs first."""
        return [{"c": c, "width": width} for width in (10.0, 1.0) for c in (0.1, 1.0, 10.0)]

    def fit(self, part: Part, settings: Settings) -> Arrays:
        """``vectors`` (S, F + K), ``duals`` (S,), ``bias`` (1,), ``gamma`` (1,) and ``line`` (2,)."""
        arrays = self._machine(part, settings)
        return {**arrays, "line": self._line(part, settings)}

    def logits(self, arrays: Arrays, values: FloatArray) -> FloatArray:
        """Float64 (N,)."""
        slope, offset = arrays["line"].tolist()
        logits: FloatArray = slope * self._margins(arrays, values) + offset
        return logits

    @staticmethod
    def _machine(part: Part, settings: Settings) -> Arrays:
        from sklearn.svm import SVC  # a second to load

        arrays = Standardised.fit(part.values)
        seen = Standardised.of(arrays, part.values)
        gamma = 1 / (settings["width"] * seen.shape[1])
        model = SVC(C=settings["c"], gamma=gamma).fit(seen, part.labels, part.weights)
        fitted = {"vectors": model.support_vectors_, "duals": model.dual_coef_[0], "bias": model.intercept_}
        return {**arrays, **fitted, "gamma": np.array([gamma])}

    @staticmethod
    def _margins(arrays: Arrays, values: FloatArray) -> FloatArray:
        from sklearn.metrics.pairwise import rbf_kernel

        seen = Standardised.of(arrays, values)
        kernel: FloatArray = rbf_kernel(seen, arrays["vectors"], gamma=float(arrays["gamma"][0]))
        margins: FloatArray = kernel @ arrays["duals"] + arrays["bias"]
        return margins

    def _line(self, part: Part, settings: Settings) -> FloatArray:
        """Slope and offset (2,); the margin itself where the groups are too few to learn them."""
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import StratifiedGroupKFold

        margins, told = np.zeros(len(part.labels)), np.zeros(len(part.labels), bool)
        if len(np.unique(part.groups)) >= _INNER:
            folds = StratifiedGroupKFold(_INNER, shuffle=True, random_state=part.seed)
            for train, rest in folds.split(part.values, part.labels, part.groups):
                chosen = np.isin(np.arange(len(told)), train)
                if len(np.unique(part.labels[train])) == 2:
                    margins[rest] = self._margins(self._machine(part.only(chosen), settings), part.values[rest])
                    told[rest] = True
        if len(np.unique(part.labels[told])) < 2:
            return np.array([1.0, 0.0])
        line = LogisticRegression(C=1.0).fit(margins[told, None], part.labels[told], part.weights[told])
        # A falling line would turn the machine round on what is little more than chance.
        return np.array([max(float(line.coef_[0, 0]), 1e-3), float(line.intercept_[0])])


DETECTORS.register(
    forensic_spec(
        name="forensic_svm",
        paper="C. Cortes and V. Vapnik, Support-vector networks, 1995",
        bibtex="@article{cortes1995support, title={Support-vector networks}, author={Cortes, Corinna and Vapnik, "
        "Vladimir}, journal={Machine Learning}, volume={20}, pages={273--297}, year={1995}}",
        build=SupportVectors,
    )
)
