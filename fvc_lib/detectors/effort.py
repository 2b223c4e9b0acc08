"""Effort: fine-tune only the part of every attention weight that has its smallest singular values.

After Z. Yan et al., "Orthogonal subspace decomposition for generalizable AI-generated image detection" (ICML 2025): a
weight is split by its singular value decomposition, W = W_main + U diag(s) V, where the second part has the ``rank``
smallest singular values (1 in the paper). W_main, which holds the knowledge from pretraining, is frozen. U, s and V
are trained. A penalty keeps them orthogonal to W_main, and keeps the norm of W.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fvc_lib.services.checkpoint_files import weights_digest
from fvc_lib.services.errors import UsageError

# (U, s, V) by rank and digest of the weights: a training builds its network several times, and each singular value
# decomposition takes up to a second.
_known: dict[str, tuple[Tensor, Tensor, Tensor]] = {}


class Residual(nn.Module):
    """The trained part of a weight matrix (out, in): U diag(s) V, the part with its smallest singular values.

    Args:
        left: U, float (out, rank).
        sizes: s, float (rank,), singular values.
        right: V, float (rank, in).
    """

    first_left: Tensor
    first_right: Tensor

    def __init__(self, left: Tensor, sizes: Tensor, right: Tensor) -> None:
        super().__init__()
        self.left, self.sizes, self.right = (nn.Parameter(part.clone()) for part in (left, sizes, right))
        # Not persistent: they can be computed again from the published weights.
        self.register_buffer("first_left", left.clone(), persistent=False)
        self.register_buffer("first_right", right.clone(), persistent=False)
        self.first_square = float(sizes.square().sum()) if not sizes.is_meta else 0.0

    def forward(self, main: Tensor) -> Tensor:
        """Return the sum of the frozen part ``main`` and this trained part, the full weight (out, in)."""
        return main + (self.left * self.sizes) @ self.right

    def penalty(self, main: Tensor) -> Tensor:
        """Return the sum of the paper's two losses, a scalar: orthogonality (equation 4) and norm (equation 5).

        ``main`` is the frozen part of the weight, (out, in). The first loss keeps U and V orthogonal to ``main``, and
        their vectors orthonormal. It penalises the components of U that leave the space of the initial U, which was
        orthogonal to ``main``; likewise for V. If the weight is not square, this is stricter on the longer side than
        the paper's loss, because there are more directions that are orthogonal to ``main``. The second loss is the
        change of the full weight's squared norm.
        """
        across = self.left.T @ self.left
        down = self.right @ self.right.T
        outside_left = self.left - self.first_left @ (self.first_left.T @ self.left)
        outside_right = self.right - (self.right @ self.first_right.T) @ self.first_right
        one = torch.eye(len(self.sizes), dtype=across.dtype, device=across.device)
        orthogonal = 2 * (outside_left.square().sum() + outside_right.square().sum())
        orthogonal = orthogonal + (across - one).square().sum() + (down - one).square().sum()
        overlap = (self.sizes * (self.left * (main @ self.right.T)).sum(0)).sum()  # its inner product with W_main
        square = (self.sizes[:, None] * across * self.sizes * down).sum()
        return orthogonal + (2 * overlap + square - self.first_square).abs()


def adapt(trunk: nn.Module, rank: int) -> list[nn.Parameter]:
    """Split the weights of linear layers in ``trunk`` into a frozen part and a trained part, in place.

    Only linear layers inside attention modules are split; if there are none, all linear layers are.

    Args:
        trunk: a network without head.
        rank: number of singular values of the trained part.

    Returns:
        The parameters to train: U, s and V of every split layer.

    Raises:
        UsageError: no linear layer has more than ``rank`` singular values.
    """
    attention = [part for part in trunk.modules() if "attention" in type(part).__name__.lower()]
    linear = [part for part in _linear(attention) or _linear([trunk]) if min(part.weight.shape) > rank]
    if not linear:
        raise UsageError(
            f"tune: effort:{rank} wants linear layers with more than {rank} singular values, and a "
            f"{type(trunk).__name__} has none. Give a lower rank, a network with attention, or another tune."
        )
    trained: list[nn.Parameter] = []
    for layer in linear:
        with torch.no_grad():
            left, sizes, right = _least(layer.weight, rank)
            layer.weight -= (left * sizes) @ right
        residual = Residual(left, sizes, right)
        parametrize.register_parametrization(layer, "weight", residual)
        trained += residual.parameters()
    return trained


def penalty(network: nn.Module) -> Tensor | None:
    """Return the penalty on the trained parts of weights, averaged over the split layers of ``network``, a scalar.

    A split layer has a frozen and a trained part of its weight (see ``adapt``). ``Residual.penalty`` is the penalty of
    one layer: it keeps the trained part orthogonal to the frozen part. The result is None if no layer is split.
    """
    found = []
    for part in network.modules():
        if isinstance(part, parametrize.ParametrizationList) and isinstance(part[0], Residual):
            with torch.autocast(part.original.device.type, enabled=False):
                found.append(part[0].penalty(part.original))
    return torch.stack(found).mean() if found else None


def _linear(parts: list[nn.Module]) -> list[nn.Linear]:
    found = (each for part in parts for each in part.modules() if isinstance(each, nn.Linear))
    return list(dict.fromkeys(found))


def _least(weight: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the singular vectors and values of ``weight`` (out, in) for its ``rank`` smallest singular values.

    The result is a tuple: U (out, rank), s (rank,) and V (rank, in).
    """
    key = "" if weight.is_meta else f"{rank} {weights_digest({'': weight})}"
    if key not in _known or not key:
        left, sizes, right = torch.linalg.svd(weight.detach().float(), full_matrices=False)
        _known[key] = (left[:, -rank:].clone(), sizes[-rank:].clone(), right[-rank:].clone())
    left, sizes, right = _known[key]
    return left.to(weight), sizes.to(weight), right.to(weight)
