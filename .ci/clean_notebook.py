"""Keep outputs out of the committed notebooks: what ``make lab`` has JupyterLab do before it saves one."""

from typing import Any


def clean(model: dict[str, Any], path: str, **_: Any) -> None:
    """Remove the outputs of a notebook in ``notebooks/``, so that git sees edits of cells alone."""
    if model["type"] != "notebook" or not path.lstrip("/").startswith("notebooks/"):
        return  # a record in runs/ keeps what it shows
    notebook = model["content"]
    # JupyterLab adds the version of Python, the name of one's kernel and the state of widgets.
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    notebook["metadata"] = {"kernelspec": kernel, "language_info": {"name": "python"}}
    for cell in notebook["cells"]:
        cell["metadata"] = {name: value for name, value in cell["metadata"].items() if name == "tags"}
        if cell["cell_type"] == "code":
            cell["execution_count"], cell["outputs"] = None, []
