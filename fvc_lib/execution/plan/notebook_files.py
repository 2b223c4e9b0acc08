"""What a notebook says of itself: its parameters cell, read without running it."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.config import resolve_config
from fvc_lib.services.errors import UsageError, did_you_mean

# Filled in by whoever starts the stage; everything else in a parameters cell is a field of RunConfig.
STAGE_PARAMETERS = ("run_dir", "fold")


@dataclass(frozen=True)
class Notebook:
    """One notebook: its path, title, and the names and default values in its parameters cell."""

    path: Path
    title: str
    parameters: dict[str, Any]
    source_hash: str

    @property
    def name(self) -> str:
        """The file name without its suffix: the stage's name."""
        return self.path.stem


def read_notebook(path: Path) -> Notebook:
    """Read and check ``path``.

    Raises:
        UsageError: missing or unreadable file, no cell or several cells tagged ``parameters``, or a parameters cell
            that is more than annotated literals. papermill would run each of these and let the wrong value win.
    """
    return notebook_of(load_document(path), path)


def notebook_of(document: Any, path: Path) -> Notebook:
    """The same of a notebook that is read already (an nbformat node); arguments and errors as for ``read_notebook``."""
    cells = [cell for cell in document.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) != 1:
        raise UsageError(
            f"notebook {str(path)!r}: got {len(cells)} cells tagged 'parameters', wanted exactly one. "
            "Tag it in JupyterLab under Property Inspector > Cell tags."
        )
    return Notebook(path, _title(document), parse_parameters(cells[0].source, path), _source_hash(document))


def check_parameters(notebook: Notebook, values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` by name, each of its parameter's type: papermill would take unknown names and leave ``'true'`` a text.

    Raises:
        UsageError: a name that the parameters cell does not have, or a value that cannot be of its type.
    """
    for name in values:
        if name not in notebook.parameters:
            known = ", ".join(notebook.parameters)
            raise UsageError(
                f"notebook {str(notebook.path)!r}: {name!r} is no parameter of it."
                f"{did_you_mean(name, notebook.parameters)} Its parameters cell has: {known}."
            )
    fold, run_dir = values.get("fold", 0), values.get("run_dir", "")
    if isinstance(fold, bool) or not isinstance(fold, int) or fold < 0:
        raise UsageError(f"fold: got {fold!r}, wanted the number of a fold, from 0.")
    if not isinstance(run_dir, str):
        raise UsageError(f"run_dir: got {run_dir!r}, wanted the path or name of a run.")
    fields = {name: value for name, value in values.items() if name not in STAGE_PARAMETERS}
    typed = resolve_config(fields, environ={}).model_dump(mode="json")
    return {name: typed.get(name, value) for name, value in values.items()}


def load_document(path: Path) -> Any:
    """The notebook as an nbformat node.

    Raises:
        UsageError: the file is missing or is no notebook.
    """
    import nbformat  # takes a second to load, and `status` shall not wait for it

    try:
        return nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
    except OSError as error:
        raise UsageError(f"notebook {str(path)!r}: {error.strerror}. Is this a complete checkout?") from error
    except (
        nbformat.reader.NotJSONError,
        nbformat.ValidationError,
        json.JSONDecodeError,
        UnicodeDecodeError,
    ) as error:
        raise UsageError(f"notebook {str(path)!r} is not a readable notebook: {error}") from error


def parse_parameters(source: str, path: Path) -> dict[str, Any]:
    """Names and literal values of a parameters cell, in order.

    Raises:
        UsageError: a statement other than ``name = literal`` or ``name: type = literal``.
    """
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise UsageError(f"notebook {str(path)!r}: the parameters cell is not valid Python: {error}") from error
    return dict(_assignment(statement, path) for statement in statements)


def _assignment(statement: ast.stmt, path: Path) -> tuple[str, Any]:
    target: ast.expr
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        target, value = statement.target, statement.value
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, value = statement.targets[0], statement.value
    else:
        raise _not_a_literal(statement, path)
    if not isinstance(target, ast.Name):
        raise _not_a_literal(statement, path)
    try:
        return target.id, ast.literal_eval(value)
    except ValueError:
        raise _not_a_literal(statement, path) from None


def _not_a_literal(statement: ast.stmt, path: Path) -> UsageError:
    return UsageError(
        f"notebook {str(path)!r}: the parameters cell has {ast.unparse(statement)!r}, wanted 'name: type = literal'. "
        "Move the line to the next cell."
    )


def _title(document: Any) -> str:
    for cell in document.cells:
        for line in cell.source.splitlines():
            if cell.cell_type == "markdown" and line.startswith("# "):
                return str(line[2:].strip())
    return ""


def _source_hash(document: Any) -> str:
    """Over what runs: a new heading does not make a finished stage stale."""
    return sha256_of_json([cell.source for cell in document.cells if cell.cell_type == "code"])
