"""Names, directions and meanings of metrics. Every metric is declared once, next to the function that computes it.

Tables, figures and comparisons read the declarations. A new metric needs one declaration in a file of this folder.
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
    """The name of a metric and how tables and figures show it."""

    name: str  # in tables and logs; ``recall@*`` stands for every name that begins with ``recall@``
    title: str  # in figures and pages, without its unit
    better: Better | None  # whether higher or lower values are better; None where neither is
    says: str  # a sentence on its meaning
    unit: str = ""  # unit of the values; ``target``: the unit of the predicted number; empty: none
    is_share: bool = False  # whether it lies in [0, 1], so that figures show the whole range
    chance: float | None = None  # value of a model that knows nothing; None where it depends on the data
    per_target: bool = False  # whether it is computed per target, as in ``mae_calories``
    # For a metric of a cross-validation, its input: scores ranked within each fold, decisions, or probabilities. None
    # for all other metrics.
    of_folds: Literal["ranking", "decision", "probability"] | None = None
    function: Callable[..., Any] | None = None  # the decorated function; None without one


_DECLARED: dict[str, Declaration] = {}
UNCALIBRATED = "_uncalibrated"  # suffix of a metric of probabilities before temperature scaling


def declare(name: str, title: str, better: Better | None, says: str, **more: Any) -> Callable[[Function], Function]:
    """Declare a metric, and return a decorator for the function that computes it.

    The arguments are fields of ``Declaration``. If no function is decorated, the metric is declared all the same, but
    the ``function`` of its declaration is None.

    Raises:
        ValueError: the name is declared already with other fields, or ``of_folds`` has an unknown value.
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
    """Return the declarations of all metrics, grouped by the file that declares them and in the order of that file."""
    _import_declarations()
    return tuple(_DECLARED.values())


def declaration(metric: str) -> Declaration | None:
    """Return the declaration of a metric; None if no declaration fits.

    ``metric`` is a name as it occurs in logs. It may contain a prefix, a target or a number, such as
    ``text_to_video/recall@5`` or ``mae_calories``. The declaration has this name without the prefix, and a title with
    the target or number.
    """
    _import_declarations()
    name = metric.rpartition("/")[2]
    if name in _DECLARED:
        return _DECLARED[name]
    if name.endswith(UNCALIBRATED) and (base := _DECLARED.get(name.removesuffix(UNCALIBRATED))):
        return replace(base, name=name, title=f"{base.title} before temperature")
    kind, _, target = name.partition("_")
    if target and kind in _DECLARED and _DECLARED[kind].per_target:
        return replace(_DECLARED[kind], name=name, title=f"{_DECLARED[kind].title}, {target}")
    kind, at, k = name.partition("@")
    family = _DECLARED.get(f"{kind}@*") if at else None
    return replace(family, name=name, title=f"{family.title}{k}") if family else None


def is_share(metric: str) -> bool:
    """Return whether ``metric`` is declared as a share in [0, 1]; False for an unknown metric."""
    declared = declaration(metric)
    return declared is not None and declared.is_share


# Logged by trainings, which compute them as sums over samples.
declare("loss", "Loss", "lower", "What the training makes smaller, per sample.", unit="nats")
declare("caption_loss", "Caption loss", "lower", "Negative log-likelihood of a caption's tokens.", unit="nats")
declare("token_accuracy", "Token accuracy", "higher", "Share of next tokens that are the likeliest.", is_share=True)
declare("accuracy", "Accuracy", "higher", "Share of right decisions.", is_share=True)
declare("precision", "Precision", "higher", "Share of right calls among all calls of a class.", is_share=True)
declare("recall", "Recall", "higher", "Share of a class that is found.", is_share=True)
declare("learning_rate", "Learning rate", None, "The optimizer's step size.")
