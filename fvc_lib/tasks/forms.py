"""Write a network as ONNX, a file that needs no code of this project.

It takes pixels and returns the network's numbers, in float32, for any number of clips or pictures at once. The file is
loaded again with onnxruntime and must give the network's own numbers. No bundle reads it when it is loaded.
"""

import copy
import importlib
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import INDEX, read_table
from fvc_lib.video.clips.clip_file import Pixels
from fvc_lib.video.clips.store import ClipStore

ONNX, SUFFIX = "onnx", ".onnx"
INPUT, OUTPUT = "frames", "logits"
TOLERANCE = 1e-4
_BATCHES = (1, 2, 5)  # exporters take a batch of one for a constant; they never saw one of five
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_MOST_SHOWN = 300


def clips_to_compare(paths: RunPaths, store: ClipStore) -> tuple[Pixels, str]:
    """Return clips uint8 (B, T, 3, S, S) of the run, reals and fakes in turn, or random ones, and a description."""
    wanted, per_clip = max(_BATCHES), (store.num_frames, *store.shape[1:])
    index = read_table(paths.index, INDEX).sort("video_id")
    videos = (index.filter(label=label)["video_id"] for label in ("real", "fake"))
    stored = ([name for name in names if store.has(name, 0)][:wanted] for names in videos)
    found = [store.read(name, 0) for pair in zip_longest(*stored) for name in pair if name is not None]
    if found:
        clips = np.concatenate([each.reshape(-1, *per_clip) for each in found])[:wanted]
        return clips, f"{len(clips)} clips of the run"
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (wanted, *per_clip[:2], 8, 8))
    zoom = -(-per_clip[-1] // 8)
    drawn = coarse.repeat(zoom, 3).repeat(zoom, 4)[..., : per_clip[-1], : per_clip[-1]]
    noisy = drawn + random.integers(-20, 21, drawn.shape)
    return np.clip(noisy, 0, 255).astype(np.uint8), f"{wanted} random clips (the run has none here)"


def check_packages() -> None:
    """Raise ``UsageError`` where a package that writes or reads ONNX is missing."""
    for package in _PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise UsageError(
                f"--format {ONNX} needs the package {package!r}, which is not installed or does not start ({error}). "
                "Install it: make setup-verdicts, or pip install 'fvc_lib[verdicts]'"
            ) from error


def write_onnx(
    network: nn.Module,
    path: Path,
    pixels: Pixels,
    described: str,
    name: str,
    names: tuple[str, str] = (INPUT, OUTPUT),
) -> float:
    """Write ``network`` to ``path`` as ONNX, and compare the file with it.

    Args:
        network: uint8 (B, ...) to float (B,) or (B, N); not changed.
        path: of the new file; weights beyond 2 GB lie next to it, as ``.data``.
        pixels: uint8 (B, ...) to compare on.
        described: a description of these, for messages.
        name: of the network, for messages.
        names: of its input and output.

    Returns:
        The largest difference of an output.

    Raises:
        UsageError: a package is missing, or the network cannot be written as ONNX or answers otherwise there.
    """
    check_packages()
    network = copy.deepcopy(network).cpu().float().eval()
    inputs = torch.from_numpy(pixels)
    while len(inputs) < max(_BATCHES):
        inputs = torch.cat([inputs, inputs.flip(-1)])
    with torch.no_grad(), _quiet():
        try:
            program = _exported(network, inputs[:2])
            made = torch.onnx.export(program, dynamo=True, input_names=names[:1], output_names=names[1:], verbose=False)
            assert made is not None
            made.save(path)
            runtime = importlib.import_module("onnxruntime")
            session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

            def written(some: Tensor) -> Tensor:
                return torch.from_numpy(session.run([names[1]], {names[0]: some.numpy()})[0])

            wanted, found = (
                torch.cat([answer(inputs[:size]) for size in _BATCHES]).double() for answer in (network, written)
            )
        except Exception as error:  # each layer of the exporter has its own errors, and a user's network any
            if isinstance(error, FvcError | MemoryError):
                raise
            reason = " ".join(str(error).split())[:_MOST_SHOWN]
            raise UsageError(
                f"{name} as {ONNX}: cannot be written ({type(error).__name__}: {reason}). Nothing was written. Export "
                "without --format."
            ) from error
    difference = float((wanted - found).abs().max()) if wanted.shape == found.shape else float("nan")
    if not difference <= TOLERANCE:
        raise UsageError(
            f"{name} as {ONNX}: answers otherwise than the network: on {described}, an output differs by "
            f"{difference:g}, and {TOLERANCE:g} is allowed. Nothing was written. Export without --format."
        )
    return difference


def _exported(network: nn.Module, pixels: Tensor) -> Any:
    """Return torch's program of the network, for any number of clips, without file names of this machine."""
    anything = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(network, (pixels,), dynamic_shapes=anything)
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence exporters, which report their steps and packages that nothing here needs."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
