"""One notebook in one kernel, as an engine of papermill.

papermill loads the engines of entry points, ours among them, while it is imported itself. So it comes first: whatever
of this folder is imported, the engine's module is then loaded whole, and once.
"""

import papermill  # noqa: F401 - for what importing it does
