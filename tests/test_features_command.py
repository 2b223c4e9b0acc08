"""``fvc features`` lists what the registry has."""

import re

from click.testing import CliRunner

from fvc_lib.command_line.commands import features
from fvc_lib.video.features.family import families_named

COLUMNS = [f"{family.name}_{feature.name}" for family in families_named("all") for feature in family.features]


def test_all_features_are_listed_by_the_command():
    shown = CliRunner().invoke(features).output
    assert re.findall(r"^  (\w+) ", shown, re.MULTILINE) == COLUMNS
    assert all(family.paper in shown for family in families_named("all"))
    one = CliRunner().invoke(features, ["sharpness"]).output
    assert ("sharpness_laplacian" in one, "spectrum" in one) == (True, False)
