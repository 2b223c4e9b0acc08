"""A trained run that several files of tests ask and none changes."""

from pathlib import Path

import pytest
from filelock import FileLock

from fvc_lib.services.records.digests import write_document
from fvc_lib.services.run_paths import RunPaths
from tests.kits.scored_run import trained_run


@pytest.fixture(scope="session")
def scored_run(session_folder: Path) -> RunPaths:
    """Trained once for all test processes: whoever comes second waits, and finds it."""
    home, done = session_folder / "scored_run", session_folder / "scored_run.done"
    with FileLock(f"{home}.lock"):
        if not done.exists():
            run = trained_run(home)
            write_document(run.run_json, {})
            done.write_text(str(run.root))
    return RunPaths(Path(done.read_text()))
