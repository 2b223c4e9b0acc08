"""Keep outputs out of the committed notebooks: what ``make lab`` has JupyterLab do before it saves one."""

from typing import Any


def clean(model: dict[str, Any], path: str, **_: Any) -> None:
    """Remove the outputs of a notebook in ``notebooks/``, so that git sees edits of cells alone."""
    if model["type"] != "notebook" or not path.lstrip("/").startswith("notebooks/"):
        return  # a record in runs/ keeps what it shows
    notebook = model["content"]
    notebook["metadata"]["language_info"] = {"name": "python"}  # JupyterLab adds the version of Python, and more
    for cell in notebook["cells"]:
        cell["metadata"] = {name: value for name, value in cell["metadata"].items() if name == "tags"}
        if cell["cell_type"] == "code":
            cell["execution_count"], cell["outputs"] = None, []
