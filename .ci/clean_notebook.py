"""Copy a notebook from standard input to standard output without its outputs: the filter that .gitattributes names.

``make lab`` tells git of it, so running a committed notebook changes nothing that git sees, and editing a cell does.
"""

import json
import sys

notebook = json.load(sys.stdin)
notebook["metadata"]["language_info"] = {"name": "python"}  # JupyterLab adds the version of Python, and more
for cell in notebook["cells"]:
    cell["metadata"] = {name: value for name, value in cell["metadata"].items() if name == "tags"}
    if cell["cell_type"] == "code":
        cell["execution_count"], cell["outputs"] = None, []
json.dump(notebook, sys.stdout, indent=1, ensure_ascii=False, sort_keys=True)
print()
