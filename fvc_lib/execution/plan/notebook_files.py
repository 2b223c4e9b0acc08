"""What a notebook says of itself: its parameters cell, read without running it."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.errors import UsageError

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
    document = load_document(path)
    cells = [cell for cell in document.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) != 1:
        raise UsageError(
            f"notebook {str(path)!r}: got {len(cells)} cells tagged 'parameters', wanted exactly one. "
            "Tag it in JupyterLab under Property Inspector > Cell tags."
        )
    return Notebook(path, _title(document), parse_parameters(cells[0].source, path), _source_hash(document))


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
