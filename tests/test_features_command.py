"""``run_notebooks.py features`` and docs/features.md list what the registry has."""

import re
from pathlib import Path

from click.testing import CliRunner

from fvc_lib.command_line.commands import features
from fvc_lib.video.features.family import families_named

DOCS = Path(__file__).parents[1] / "docs" / "features.md"
COLUMNS = [f"{family.name}_{feature.name}" for family in families_named("all") for feature in family.features]


def test_all_features_are_listed_with_unit_meaning_and_paper():
    shown = CliRunner().invoke(features).output
    listed = re.findall(r"^  (\w+) ", shown, re.MULTILINE)
    assert listed == COLUMNS
    for family in families_named("all"):
        assert f"{family.name}, of " in shown
        assert family.paper in shown
    one = CliRunner().invoke(features, ["sharpness"]).output
    assert "sharpness_laplacian" in one
    assert "spectrum" not in one


def test_the_docs_list_what_there_is():
    """The table of docs/features.md is made by ``run_notebooks.py features --markdown``."""
    listed = DOCS.read_text(encoding="utf-8").partition("## All of them\n")[2]
    written = re.findall(r"^\| `(\w+)` \|", listed, re.MULTILINE)
    assert written == COLUMNS
