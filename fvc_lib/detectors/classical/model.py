"""What a model on features is: candidates of its settings, a fit, and log odds computed from plain arrays.

A fitted model is arrays by name and nothing else, so that it is stored as safetensors, as a network's weights are, and
no file has to be unpickled. scikit-learn fits; what it fitted is taken out of it, and what these arrays say is computed
here, the same to rounding whatever version of scikit-learn reads them later.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fvc_lib.services.registry import DetectorSpec

FloatArray = npt.NDArray[np.float64]
Arrays = dict[str, npt.NDArray[Any]]
Settings = Mapping[str, float]  # hyper-parameters by name


@dataclass(frozen=True)
class Part:
    """Videos to learn from.

    Attributes:
        values: float64 (N, F), NaN where a value is missing.
        labels: int64 (N,), 1 is fake; both occur.
        weights: float64 (N,) of each in the loss.
        groups: (N,) names; videos of one group are never on two sides.
        seed: of whatever is drawn.
    """

    values: FloatArray
    labels: npt.NDArray[np.int64]
    weights: FloatArray
    groups: npt.NDArray[np.str_]
    seed: int

    def only(self, chosen: npt.NDArray[np.bool_]) -> "Part":
        """The videos that are ``chosen``, (N,)."""
        return Part(self.values[chosen], self.labels[chosen], self.weights[chosen], self.groups[chosen], self.seed)


class ClassicalModel(Protocol):
    """One kind of model on features, without state."""

    def candidates(self, num_rows: int) -> Sequence[Settings]:
        """What may be chosen for ``num_rows`` training videos, the plainest model first: of equals the first is."""
        ...

    def fit(self, part: Part, settings: Settings) -> Arrays:
        """The fitted model as arrays; equal parts and settings give equal bits on one machine."""
        ...

    def logits(self, arrays: Arrays, values: FloatArray) -> FloatArray:
        """Float64 (N,), log odds of fake of ``values`` (N, F), NaN where missing, at the odds of the weights."""
        ...


def forensic_spec(
    name: str, paper: str, bibtex: str, build: Callable[[], ClassicalModel], packages: tuple[str, ...] = ()
) -> DetectorSpec:
    """The declaration of a model on the forensic features of a video."""
    return DetectorSpec(
        name=name,
        family="classical",
        paper=f"{paper}; features: as their families say",
        bibtex=bibtex,
        licence="this project's",
        num_frames=6,  # that pages show of a judged file, and their side: the model sees none of them
        side=112,
        normalisation="none: it sees features of the coded frames, not clips",
        micro_batch=1,
        build=build,
        packages=packages,
        of_features="forensic",
    )
