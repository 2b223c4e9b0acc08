"""Whether a network whose code has changed since its training still says the same.

When a network is trained, it is asked about fixed samples that are generated and belong to no corpus, and its answer is
stored with the digest of its code. Where the code of this version has another digest (a docstring, a name, another
Python's way to write code down), the network is built by it with the stored weights and asked again. What says the same
goes on with a warning; what says something else, or has no stored answer, is refused.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from fvc_lib.engine.random_state import forked_random_state
from fvc_lib.engine.task import Outputs
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError

# A difference of a logit of so much changes a score by 0.00025 at most. Machines and versions of torch differ by less:
# by about 1e-6 of small networks, 1e-4 of large ones.
TOLERANCE = 1e-3
_MOST_VALUES = 4096  # a network may give more: the first of each output are stored
_logger = logging.getLogger(__name__)


_Number = Annotated[float, Field(allow_inf_nan=False)]
Rows = tuple[tuple[_Number | None, ...], ...]
FloatArray = np.ndarray[Any, np.dtype[np.float64]]


class StoredAnswer(BaseModel):
    """What a network said of generated samples.

    Attributes:
        question: hex SHA-256 of the samples.
        values: its outputs, one sample after the other.
        rows: the samples themselves, of a model on features; empty: they are generated anew.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    question: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    values: Annotated[tuple[_Number, ...], Field(max_length=_MOST_VALUES)]
    rows: Rows = ()


# Of one sample, tensors by name with a batch dimension of 1: a tensor, or several by name.
Says = Callable[[Mapping[str, Tensor]], Tensor | Outputs]


class Question:
    """Samples, and how a network is asked about them.

    Args:
        samples: tensors by name, the samples as first dimension; equal on every machine.
        says: given a network on the CPU, in evaluation mode, and one sample.
    """

    def __init__(
        self, samples: Mapping[str, Tensor], says: Callable[[nn.Module, Mapping[str, Tensor]], Tensor | Outputs]
    ) -> None:
        self.samples, self._says = samples, says

    def answer(self, network: nn.Module) -> StoredAnswer | None:
        """What ``network`` says; see ``answer_to``."""
        return answer_to(self.samples, lambda sample: self._says(network, sample))

    def answer_of_trained(
        self, build: Callable[[], nn.Module], weights: Mapping[str, Tensor] | None, name: str
    ) -> StoredAnswer | None:
        """What the network of ``build`` says with ``weights`` (None: its own); None where it cannot, which is logged.

        A training that is finished does not fail for it.
        """
        try:
            with forked_random_state(0, torch.device("cpu")):
                network = build().eval()
            if weights is not None:
                network.load_state_dict(weights)
            return self.answer(network)
        except Exception as error:  # noqa: BLE001 - a user's network, on a CPU that it was not trained on
            why = str(error).partition("\n")[0] or type(error).__name__
            _logger.warning("%s: cannot be asked about generated samples: %s", name, why)
            return None


def answer_to(samples: Mapping[str, Tensor], says: Says) -> StoredAnswer | None:
    """What is said of ``samples``, one at a time; None where some of it is no finite number."""
    digest, found = hashlib.sha256(), list[float]()
    for name, tensor in sorted(samples.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    number = len(next(iter(samples.values())))
    with torch.inference_mode(), forked_random_state(0, torch.device("cpu")):
        for place in range(number):
            said = says({name: tensor[place : place + 1] for name, tensor in samples.items()})
            outputs = {"": said} if isinstance(said, Tensor) else said
            share = _MOST_VALUES // number // len(outputs)
            for _, tensor in sorted(outputs.items()):
                found += tensor.double().reshape(-1)[:share].tolist()
    if not all(map(math.isfinite, found)):
        return None
    return StoredAnswer(question=digest.hexdigest(), values=tuple(found))


def still_says(
    stored: StoredAnswer | None,
    now: Callable[[], StoredAnswer | None],
    *,
    code: str,
    of: str,
    remedy: str,
    part: str = "",
) -> str:
    """That a network of changed code says what it said, as a sentence for a warning.

    Args:
        stored: from its training; None: it is of an earlier version.
        now: asks it.
        code: name of its class.
        of: name of the run.
        remedy: a sentence, for who is refused.
        part: which of the run's networks; empty: it has one.

    Raises:
        UsageError: it says something else, or there is no stored answer to the same question.
    """
    told = f"{of}: the code of {code} is not what it was when {part or 'it'} was trained"
    found = now() if stored is not None else None
    if stored is None or found is None or found.question != stored.question:
        why = "it has no stored answer" if stored is None else "it cannot be asked what it was asked then"
        raise UsageError(
            f"{told}, and {why} by which it would be known whether it still says the same, so it may see something "
            f"else. {remedy}"
        )
    if len(found.values) != len(stored.values):
        raise UsageError(f"{told}: it gives {len(found.values)} numbers where it gave {len(stored.values)}. {remedy}")
    then, again = np.array(stored.values), np.array(found.values)
    beyond = np.abs(again - then) / np.maximum(1.0, np.abs(then))
    worst = int(beyond.argmax())
    if beyond[worst] > TOLERANCE:
        raise UsageError(
            f"{told}, and it says something else: of a generated sample {again[worst]:.6g} where it said "
            f"{then[worst]:.6g} (allowed: {TOLERANCE:g}, or that share of a number above 1). {remedy}"
        )
    return (
        f"{of}: the code of {code} is not what it was when it was trained. Asked about generated samples it says what "
        f"it said then (to {TOLERANCE:g}), so it is taken to be the same."
    )


def clip_question(config: RunConfig) -> Question:
    """Of a network from clips, ``frames`` uint8 (1, T, 3, S, S), to logits (1,)."""
    clips = config.clips
    frames = drawn_pixels(clips.num_frames, clips.side)
    return Question({"frames": frames}, lambda network, sample: network(sample["frames"]))


def drawn_pixels(num_frames: int, side: int) -> Tensor:
    """Uint8 (2, ``num_frames``, 3, ``side``, ``side``): coarse coloured tiles that move, under fine noise.

    Made of integers and SHAKE-128 alone, so that they are the same wherever they are made.
    """
    clips = []
    place = np.arange(side)
    for number, tiles in enumerate((5, 16)):
        coarse = _drawn(f"tiles {number}", (3, tiles, tiles)).astype(np.int64)
        noise = _drawn(f"noise {number}", (num_frames, 3, side, side)).astype(np.int64) % 32 - 16
        moved = []
        for frame in range(num_frames):
            rows, columns = ((place + step * frame) % side * tiles // side for step in (1, 2))
            moved.append(coarse[:, rows][:, :, columns])
        clips.append(np.clip(np.stack(moved) + noise, 0, 255).astype(np.uint8))
    return torch.from_numpy(np.stack(clips))


def mixed_rows(values: FloatArray) -> Rows:
    """16 rows (F,) that are no video's: of each feature of ``values`` (N, F) some percentile; None where missing."""
    percents = np.array([5, 25, 50, 75, 95])
    drawn = _drawn("percentiles", (16, values.shape[1]))
    missing = np.isnan(values)
    ranked = np.nanpercentile(np.where(missing.all(0), 0.0, values), percents, axis=0)
    rows = np.take_along_axis(ranked, (drawn % len(percents)).astype(np.int64), axis=0)
    left_out = missing.any(0) & (drawn >= 200)
    return tuple(
        tuple(None if out else float(f"{value:.5g}") for value, out in zip(*pair, strict=True))
        for pair in zip(rows.tolist(), left_out.tolist(), strict=True)
    )


def answer_about(rows: Rows, says: Callable[[FloatArray], FloatArray]) -> StoredAnswer | None:
    """What a model on features says of ``rows``: ``says`` gives float64 (N,) of float64 (N, F), NaN where missing."""
    values = torch.tensor([[math.nan if each is None else each for each in row] for row in rows], dtype=torch.float64)
    found = answer_to({"values": values}, lambda sample: torch.from_numpy(says(sample["values"].numpy())))
    return found and found.model_copy(update={"rows": rows})


def _drawn(name: str, shape: Sequence[int]) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    stream = hashlib.shake_128(f"fvc {name}".encode()).digest(math.prod(shape))
    return np.frombuffer(stream, np.uint8).reshape(shape)
