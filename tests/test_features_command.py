"""``run_notebooks.py features`` and docs/features.md list what the registry has."""

import re
from pathlib import Path

from click.testing import CliRunner

from fvc_lib.command_line.commands import features
from fvc_lib.video.features.family import families_named

DOCS = Path(__file__).parents[1] / "docs" / "features.md"
COLUMNS = [f"{family.name}_{feature.name}" for family in families_named("all") for feature in family.features]


def test_all_features_are_listed_by_the_command_and_in_the_docs():
    shown = CliRunner().invoke(features).output
    assert re.findall(r"^  (\w+) ", shown, re.MULTILINE) == COLUMNS
    assert all(family.paper in shown for family in families_named("all"))
    one = CliRunner().invoke(features, ["sharpness"]).output
    assert ("sharpness_laplacian" in one, "spectrum" in one) == (True, False)
    listed = DOCS.read_text(encoding="utf-8").partition("## All of them\n")[2]
    assert re.findall(r"^\| `(\w+)` \|", listed, re.MULTILINE) == COLUMNS
