"""Facts about every detector (sizes, costs, licences), for ``fvc detectors``."""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

from fvc_lib.detectors.network import build_detector, built_trunk
from fvc_lib.detectors.packages import REMEDY
from fvc_lib.engine.device import resolve_device
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError, command_text
from fvc_lib.services.registry import DETECTORS, DetectorSpec, TrunkOptions


@dataclass(frozen=True)
class DetectorFacts:
    """A detector's ``DetectorSpec`` (name, input, origin), its size and cost, and whether it runs on this machine."""

    spec: DetectorSpec
    missing: tuple[str, ...]  # packages that are not installed
    # Without the publisher's class layer and this project's head; None where the network cannot be built here.
    num_parameters: int | None
    # Floating-point operations of a forward pass of one clip, in 1e9; a multiply-add counts as two. None if unknown.
    gflops: float | None
    trouble: str  # why the network cannot be built here; empty if it can

    def row(self) -> list[str]:
        """Return a table row of texts.

        The columns are name, parameters, GFLOPs, clip, origin of the weights, their licence, and whether it runs here.
        """
        spec = self.spec
        origin = "to fetch" if spec.weights or spec.name.endswith(":NAME") else "from scratch"
        return [
            spec.name,
            "" if self.num_parameters is None else f"{self.num_parameters / 1e6:.3g} M",
            "" if self.gflops is None else f"{self.gflops:,.4g}",
            "features" if spec.of_features == "forensic" else f"{spec.num_frames} x {spec.side}",
            "brought" if spec.brings_weights else origin,
            spec.weights_licence,
            "yes" if not self.trouble else f"needs {', '.join(self.missing)}" if self.missing else "no",
        ]

    def record(self) -> dict[str, Any]:
        """Return the facts as JSON values by name."""
        names = (
            "name", "family", "paper", "licence", "weights", "weights_licence", "brings_weights", "of_features",
            "num_frames", "side",
        )  # fmt: skip
        of_spec = {name: getattr(self.spec, name) for name in names}
        return of_spec | {name: value for name, value in vars(self).items() if name != "spec"}

    def text(self) -> str:
        """Return a text with all facts, one per line, and a command that uses the detector."""
        spec = self.spec
        to_fetch, of_files = bool(spec.weights) and not spec.brings_weights, spec.of_features == "forensic"
        lines = {
            "paper": spec.paper,
            "code": spec.licence,
            "clip": "" if of_files else f"{spec.num_frames} frames of {spec.side} x {spec.side} pixels",
            "sampled": "" if of_files else f"{spec.frame_sampling}, {spec.frame_fit}",
            "normalisation": spec.normalisation,
            "trained": "" if spec.of_features else spec.tune,
            "head": spec.head if spec.build_trunk and not spec.estimator else "",
            "size": f"{self.num_parameters:,} parameters" if self.num_parameters else "",
            "cost": "" if self.gflops is None else f"{self.gflops:,.4g} GFLOPs per clip",
            "weights": ", ".join(filter(None, [spec.weights, spec.weights_licence])),
            "not here": self.trouble,
            "use": f"{command_text()} -p corpus FOLDER -p num_frames 0 -p fixed_size 0 -p model {spec.name}"
            + " -p model_weights FILE_OR_FOLDER" * to_fetch,
        }
        shown = "\n".join(f"  {name:<14} {value}" for name, value in lines.items() if value)
        return f"{spec.name}  ({spec.family})\n{shown}"


# {name: {"num_parameters", "gflops"}} of all networks. A test compares them with those of the networks that it builds.
SIZES = Path(__file__).with_name("sizes.json")


def facts_of_all() -> list[DetectorFacts]:
    """Return the facts about all detectors.

    Sizes and costs are read from the file ``SIZES``. A network that is not in the file is built to measure them.
    """
    sizes = json.loads(SIZES.read_text())
    return [facts_of(name, sizes.get(name)) for name in DETECTORS.names()]


def facts_of(name: str, size: Mapping[str, Any] | None = None) -> DetectorFacts:
    """Return the facts about the detector ``name``.

    ``size`` holds the known ``num_parameters`` and ``gflops``. If it is not given, the network is built on torch's meta
    device to measure them. This takes no memory and loads no weights.

    Raises:
        UsageError: the name is unknown, or it is the path of a file but does not name a class in that file.
    """
    DETECTORS.check(name)
    spec = dict(DETECTORS.items()).get(name) or DETECTORS.get(name)
    missing = _missing(spec)
    if spec.of_name is not None and not name.endswith(":NAME") and not missing:
        spec = spec.of_name(name)
        missing = _missing(spec)
    if missing or size:
        trouble = f"not installed: {', '.join(missing)}. {REMEDY}." if missing else ""
        known = size or {"num_parameters": None, "gflops": None}
        return DetectorFacts(spec, missing, known["num_parameters"], known["gflops"], trouble)
    if spec.build is None and spec.build_trunk is None:
        return DetectorFacts(spec, (), None, None, "")  # no network, or a family such as timm:NAME
    number, gflops, trouble = None, None, ""
    with torch.device("meta"):
        clip = torch.zeros(1, spec.num_frames, 3, spec.side, spec.side, dtype=torch.uint8)
        options = TrunkOptions(spec.name, spec.num_frames, spec.side, pretrained=False)
        try:
            network: Any = spec.build() if spec.build else built_trunk(spec, options)
            number = sum(parameter.numel() for parameter in network.parameters())
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                network.eval().requires_grad_(False)(clip)  # else the counter fails where attention learns its query
            gflops = counter.get_total_flops() / 1e9
        except Exception as error:  # noqa: BLE001 - whatever a user's class raises, or a network that looks at values
            trouble = str(error) if number is None else ""
    return DetectorFacts(spec, (), number, gflops, trouble)


def _missing(spec: DetectorSpec) -> tuple[str, ...]:
    return tuple(package for package in spec.packages if importlib.util.find_spec(package) is None)


_TIMED_SECONDS = 1.0


def measured_costs(configs: Sequence[RunConfig]) -> list[dict[str, float]]:
    """Measure the size and speed of the network of every configuration on this machine.

    Returns:
        One mapping per configuration: ``num_parameters``, ``num_trained`` (number of trained parameters) and
        ``milliseconds_per_clip`` (median of the forward passes of one clip in about a second, after passes to warm up).
        The mapping is empty for a network that cannot be built or run here, and for a model on features.
    """
    return [_cost_of(config) for config in configs]


def _cost_of(config: RunConfig) -> dict[str, float]:
    if config.of_features:  # no network whose forward pass could be timed
        return {}
    device, clips = resolve_device(config.device, config.amp).device, config.clips
    try:
        network = build_detector(config).eval().to(device)
        clip = torch.full((1, clips.num_frames, 3, clips.side, clips.side), 128, dtype=torch.uint8, device=device)
        timer = Timer("network(clip)", globals={"network": network, "clip": clip}, num_threads=torch.get_num_threads())
        with torch.inference_mode():
            passes = timer.blocked_autorange(min_run_time=_TIMED_SECONDS)
    except (FvcError, RuntimeError, MemoryError):  # of PyTorch: it does not fit into the memory, for instance
        return {}
    parameters = list(network.parameters())
    return {
        "num_parameters": sum(parameter.numel() for parameter in parameters),
        "num_trained": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "milliseconds_per_clip": 1e3 * passes.median,
    }
