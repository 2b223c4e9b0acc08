"""Names, directions and meanings of metrics, declared once, next to each function.

Tables, figures and comparisons read from here; a new metric is one declaration in a file of this folder.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

Better = Literal["higher", "lower"]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Declaration:
    """A metric."""

    name: str  # in tables and logs; ``recall@*`` stands for every name that begins so
    title: str  # in figures and pages, without its unit
    better: Better | None  # which way it gets better; None for what has no better way
    says: str  # what it measures, a sentence
    unit: str = ""  # of its values; ``target``: that of the number that is predicted; empty: none
    is_share: bool = False  # whether it lies in [0, 1] and is read against both ends
    chance: float | None = None  # its value for a model that knows nothing, where that does not depend on the data
    per_target: bool = False  # whether ``mae_calories`` is that of the target calories
    # For a metric of a cross-validation what it is computed from: scores ranked within each fold, decisions, or
    # probabilities.
    of_folds: Literal["ranking", "decision", "probability"] | None = None
    function: Callable[..., Any] | None = None  # ``metric(labels, scores)`` of such a metric


_DECLARED: dict[str, Declaration] = {}
UNCALIBRATED = "_uncalibrated"  # of a metric of probabilities before the temperature


def declare(name: str, title: str, better: Better | None, says: str, **more: Any) -> Callable[[Function], Function]:
    """Declare a metric; as a decorator it notes the function, too. For the arguments see ``Declaration``.

    Raises:
        ValueError: the name is declared already, for another metric, or ``of_folds`` is none of its values.
    """
    kinds = (None, "ranking", "decision", "probability")
    if more.get("of_folds") not in kinds:
        raise ValueError(f"metric {name!r}: of_folds: got {more['of_folds']!r}, wanted one of {kinds[1:]}.")
    declared = Declaration(name, title, better, says, **more)
    known = _DECLARED.setdefault(name, declared)
    if replace(known, function=None) != declared:
        raise ValueError(f"metric {name!r} is declared twice: {known.says!r} and {says!r}. Rename one of them.")

    def noted(function: Function) -> Function:
        _DECLARED[name] = replace(declared, function=function)
        return function

    return noted


@cache
def _import_declarations() -> None:
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if "declare(" in path.read_text(encoding="utf-8") and path.stem != Path(__file__).stem:
            importlib.import_module(f"{__package__}.{path.stem}")


def declarations() -> tuple[Declaration, ...]:
    """Return all metrics, file by file in the order of their declarations."""
    _import_declarations()
    return tuple(_DECLARED.values())


def declaration(metric: str) -> Declaration | None:
    """Return the declaration of a metric named as in a log, say ``text_to_video/recall@5``; None if unknown."""
    _import_declarations()
    name = metric.rpartition("/")[2]
    if name in _DECLARED:
        return _DECLARED[name]
    if name.endswith(UNCALIBRATED) and (found := _DECLARED.get(name.removesuffix(UNCALIBRATED))):
        return replace(found, name=name, title=f"{found.title} before temperature")
    kind, _, target = name.partition("_")
    if target and kind in _DECLARED and _DECLARED[kind].per_target:
        return replace(_DECLARED[kind], name=name, title=f"{_DECLARED[kind].title}, {target}")
    kind, at, k = name.partition("@")
    family = _DECLARED.get(f"{kind}@*") if at else None
    return replace(family, name=name, title=f"{family.title}{k}") if family else None


def direction(metric: str) -> Better:
    """Return which way ``metric`` gets better.

    Raises:
        ValueError: it is not declared, or has no better way, such as a learning rate.
    """
    found = declaration(metric)
    if found is None or found.better is None:
        known = ", ".join(each.name for each in declarations() if each.better)
        raise ValueError(f"metric: got {metric!r}, wanted one of {known}; or say direction='lower' or 'higher'.")
    return found.better


def is_share(metric: str) -> bool:
    """Return whether ``metric`` lies in [0, 1] and is read against both ends."""
    found = declaration(metric)
    return found is not None and found.is_share


# Logged by trainings, which compute them as sums over samples.
declare("loss", "Loss", "lower", "What the training makes smaller, per sample.", unit="nats")
declare("caption_loss", "Caption loss", "lower", "Negative log-likelihood of a caption's tokens.", unit="nats")
declare("masked_loss", "Masked loss", "lower", "Squared error of hidden frames' features.")
declare("token_accuracy", "Token accuracy", "higher", "Share of next tokens that are the likeliest.", is_share=True)
declare("accuracy", "Accuracy", "higher", "Share of right decisions.", is_share=True)
declare("precision", "Precision", "higher", "Share of right ones among what is called so.", is_share=True)
declare("recall", "Recall", "higher", "Share of a class that is found.", is_share=True)
declare("learning_rate", "Learning rate", None, "The optimizer's step size.")
# Of retrieval, whose module needs torch: here they can be read without it.
declare("recall@*", "Recall@", "higher", "Share of queries with a match among the first k.", is_share=True)
declare("mrr", "Mean reciprocal rank", "higher", "Mean of 1 / rank of the first match.", is_share=True)
declare("ndcg", "NDCG", "higher", "Discounted gain of all matches' ranks against the best order.", is_share=True)
declare("median_rank", "Median rank", "lower", "Half of the queries have their first match by this rank.")
declare("mean_rank", "Mean rank", "lower", "Mean rank of the first match.")
declare(
    "mean_positive_similarity", "Mean similarity of what belongs together", "higher",
    "Mean dot product of pairs that match; their mean cosine where embeddings have norm 1.",
)  # fmt: skip
