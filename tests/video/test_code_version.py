from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fvc_lib.video.code_version import code_hash, modules_behind


@pytest.mark.parametrize("name", ["decode", "augmentation"])
def test_they_are_the_modules_that_importing_loads(name):
    """Against the interpreter's own list, so that a module which is split off cannot be forgotten."""
    code = (
        f"import sys, fvc_lib.video.{name}\n"
        "print(*(m.rsplit('.', 1)[1] for m in sys.modules if m.startswith('fvc_lib.video.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert modules_behind(name) == tuple(sorted(done.stdout.split()))


def test_every_way_to_import_counts_and_others_do_not(tmp_path: Path):
    sources = {
        "a": "from fvc_lib.video.b import x\nimport av\nfrom fvc_lib.services.errors import FvcError",
        "b": "def f():\n    import fvc_lib.video.c",
        "c": "from fvc_lib.video import d\nfrom fvc_lib.video.a import y",
        "d": "",
        "e": "from fvc_lib.video.a import x",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    assert modules_behind("a", tmp_path) == ("a", "b", "c", "d")
    assert modules_behind("d", tmp_path) == ("d",)


def test_decoding_and_augmenting_have_versions_of_their_own():
    assert code_hash("decode") != code_hash("augmentation")
    assert "letterbox" in modules_behind("decode")
    assert "letterbox" not in modules_behind("augmentation")
