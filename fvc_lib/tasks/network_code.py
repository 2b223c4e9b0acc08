"""Digests of the functions of a network's classes; they show which code has changed since its training.

Docstrings, comments and installed packages do not count.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from types import FunctionType

from torch import nn

from fvc_lib.services.atomic_files import sha256_of_json

_MOST_NAMED = 5
_USER_FILE = re.compile(r"fvc_user_(\w+)_[0-9a-f]{16}")  # the folder of the file does not count


def functions_of(network: nn.Module) -> dict[str, str]:
    """Return the digests of all functions of the network's classes and base classes, by their dotted names."""
    found = {}
    for kind in {base for part in network.modules() for base in type(part).__mro__}:
        module = _USER_FILE.sub(r"\1", kind.__module__)
        for name, function in vars(kind).items():
            if inspect.isfunction(function) and "site-packages" not in function.__code__.co_filename:
                found[f"{module}.{kind.__qualname__}.{name}"] = _digest(function)
    return dict(sorted(found.items()))


def own_code(functions: Mapping[str, str]) -> str:
    """Return one digest of all functions outside of FVC and torch, such as those of a user's file or notebook cell.

    Empty where there are none. Such code is an input of a training: a change of it leads to a new training.
    """
    own = {name: digest for name, digest in functions.items() if not name.startswith(("fvc_lib.", "torch."))}
    return sha256_of_json(own) if own else ""


def changed_functions(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return a text that lists the functions which differ between ``then`` and ``now``, at most five by name.

    Empty where none differs, or ``then`` is empty.
    """
    names = sorted(name for name in {*then, *now} if then.get(name) != now.get(name)) if then else []
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(name.removeprefix("fvc_lib.") for name in names[:_MOST_NAMED]) + more


def _digest(function: FunctionType) -> str:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # in no file, or a part of a line
        return sha256_of_json(function.__code__.co_code.hex())[:16]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return sha256_of_json(ast.unparse(tree))[:16]
