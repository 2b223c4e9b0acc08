"""``embedding_logistic:TRUNK``: logistic regression on what a frozen trunk says of a clip (linear probing).

Such as ``embedding_logistic:efficientnet_lite0`` or ``embedding_logistic:timm:resnet50``.
"""

from dataclasses import replace

from fvc_lib.detectors.classical.logistic import Logistic
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import DETECTORS, DetectorSpec

_PAPER = "G. Alain and Y. Bengio, Understanding intermediate layers using linear classifier probes, 2016"


def _of_trunk(name: str) -> DetectorSpec:
    trunk = name.partition(":")[2]
    spec = DETECTORS.load(trunk)
    if spec.build_trunk is None:
        raise UsageError(
            f"model {name!r}: {trunk} has no trunk whose features could be taken. Take a published network: "
            "run_notebooks.py detectors lists them."
        )
    return replace(
        spec,
        name=name,
        aliases=(),
        family="classical",
        paper=f"{_PAPER}; {spec.paper}",
        build=Logistic,
        build_trunk=None,
        of_name=None,
        of_features="embedding",
        trunk=trunk,
        tune="head",
    )


DETECTORS.register(
    DetectorSpec(
        name="embedding_logistic:NAME",
        family="classical",
        paper=_PAPER,
        bibtex="@article{alain2016understanding, title={Understanding intermediate layers using linear classifier "
        "probes}, author={Alain, Guillaume and Bengio, Yoshua}, journal={arXiv:1610.01644}, year={2016}}",
        licence="this project's, and the trunk's",
        num_frames=6,
        side=112,
        normalisation="the trunk's",
        micro_batch=2,
        of_name=_of_trunk,
        of_features="embedding",
    )
)
