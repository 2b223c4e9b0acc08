"""A network as a file that needs no code of ours: ONNX, or what ``torch.export`` writes.

From pixels to its numbers, in float32, with any number of clips or pictures at once. What was written is loaded again
as whoever gets it would, and must give the network's own numbers on real ones. Nothing here is read when a bundle is
loaded.
"""

import copy
import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
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

ONNX, TORCH_EXPORT = "onnx", "torch_export"
SUFFIXES = {ONNX: ".onnx", TORCH_EXPORT: ".pt2"}
INPUT, OUTPUT = "frames", "logits"
TOLERANCE = 1e-4
_BATCHES = (1, 2, 5)  # one clip is what exporters like to take for a constant; five were never shown to them
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_MOST_SAID = 300


@dataclass(frozen=True)
class ClipsToCompare:
    """What a written network is compared on.

    Attributes:
        pixels: uint8 (B, ...), (T, 3, S, S) each of clips, (3, S, S) of pictures.
        are_real: of the run's files; else they were drawn.
        what: they are, in the plural.
    """

    pixels: Pixels
    are_real: bool
    what: str = "clips"

    @property
    def described(self) -> str:
        """How many there are of which kind."""
        if self.are_real:
            return f"{len(self.pixels)} {self.what} of the run"
        return f"{len(self.pixels)} drawn {self.what} (the run has none here)"


def clips_to_compare(paths: RunPaths, store: ClipStore) -> ClipsToCompare:
    """Return some of the run's stored clips, reals and fakes in turn; random ones where none are stored."""
    wanted, per_clip = max(_BATCHES), (store.num_frames, *store.shape[1:])
    index = read_table(paths.index, INDEX).sort("video_id")
    videos = (index.filter(label=label)["video_id"] for label in ("real", "fake"))
    stored = ([name for name in names if store.has(name, 0)][:wanted] for names in videos)
    found = [store.read(name, 0) for pair in zip_longest(*stored) for name in pair if name is not None]
    if not found:
        random = np.random.default_rng(0)
        coarse = random.integers(0, 256, (wanted, *per_clip[:2], 8, 8))
        zoom = -(-per_clip[-1] // 8)
        drawn = coarse.repeat(zoom, 3).repeat(zoom, 4)[..., : per_clip[-1], : per_clip[-1]]
        noisy = drawn + random.integers(-20, 21, drawn.shape)
        return ClipsToCompare(np.clip(noisy, 0, 255).astype(np.uint8), are_real=False)
    return ClipsToCompare(np.concatenate([each.reshape(-1, *per_clip) for each in found])[:wanted], are_real=True)


def check_packages(form: str) -> None:
    """Refuse ``form`` where a package that writes or reads it is missing.

    Raises:
        UsageError: says how to install it.
    """
    for package in _PACKAGES if form == ONNX else ():
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise UsageError(
                f"--format {form} needs the package {package!r}, which is not installed or does not start ({error}). "
                "Install it: make setup-verdicts, or pip install 'fvc_lib[verdicts]'"
            ) from error


def write_form(
    network: nn.Module,
    form: str,
    path: Path,
    clips: ClipsToCompare,
    name: str,
    names: tuple[str, str] = (INPUT, OUTPUT),
) -> float:
    """Write ``network`` to ``path`` as ``form``, and compare what was written with it.

    Args:
        network: uint8 (B, ...) to float (B,) or (B, N); not changed.
        form: a key of ``SUFFIXES``.
        path: of the new file; weights beyond 2 GB lie beside, as ``.data``.
        clips: to compare on.
        name: of the network, for messages.
        names: of its input and output.

    Returns:
        The largest difference of an output.

    Raises:
        UsageError: a package is missing, or the network cannot be written in this form or says something else there.
    """
    check_packages(form)
    network = copy.deepcopy(network).cpu().float().eval()
    pixels = torch.from_numpy(clips.pixels)
    while len(pixels) < max(_BATCHES):
        pixels = torch.cat([pixels, pixels.flip(-1)])
    told = f"{name} as {form}"
    with torch.no_grad(), _quiet():
        try:
            program = _exported(network, pixels[:2])
            written = _onnx(program, path, names) if form == ONNX else _torch_export(program, path)
            wanted, found = (
                torch.cat([answer(pixels[:size]) for size in _BATCHES]).double() for answer in (network, written)
            )
        except Exception as error:  # each layer of another library has its own; a user's network can do anything
            if isinstance(error, FvcError | MemoryError):
                raise
            reason = " ".join(str(error).split())[:_MOST_SAID]
            raise UsageError(
                f"{told}: cannot be written ({type(error).__name__}: {reason}). Nothing was written. Export without "
                "--format, or with another."
            ) from error
    difference = float((wanted - found).abs().max()) if wanted.shape == found.shape else float("nan")
    if not difference <= TOLERANCE:
        raise UsageError(
            f"{told}: does not say what the network says: on {clips.described}, an output differs by "
            f"{difference:g}, and {TOLERANCE:g} is allowed. Nothing was written. Export without --format, or with "
            "another."
        )
    return difference


def _exported(network: nn.Module, pixels: Tensor) -> Any:
    """Torch's program of the network, for any number of clips, without the names of files on this machine."""
    anything = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(network, (pixels,), dynamic_shapes=anything)
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


def _torch_export(program: Any, path: Path) -> Callable[[Tensor], Tensor]:
    torch.export.save(program, path)
    loaded: Callable[[Tensor], Tensor] = torch.export.load(path).module()
    return loaded


def _onnx(program: Any, path: Path, names: tuple[str, str]) -> Callable[[Tensor], Tensor]:
    made = torch.onnx.export(program, dynamo=True, input_names=names[:1], output_names=names[1:], verbose=False)
    assert made is not None
    made.save(path)
    runtime = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda pixels: torch.from_numpy(session.run([names[1]], {names[0]: pixels.numpy()})[0])


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
