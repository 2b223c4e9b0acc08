import pytest

from fvc_lib.corpus.image_listing import ImageListing, ListedImage
from fvc_lib.corpus.images import joined_units, strata_of, wanted_targets
from fvc_lib.services.errors import UsageError

UNITS = {"calories": "kcal", "mass": "g", "rating": ""}


def test_targets_are_asked_for_by_name_with_or_without_their_unit() -> None:
    assert wanted_targets((), UNITS) == UNITS
    assert wanted_targets(("none",), UNITS) == {}
    assert list(wanted_targets(("rating", "calories_kcal", "calories"), UNITS)) == ["rating", "calories"]
    with pytest.raises(UsageError, match=r"'none' stands alone"):
        wanted_targets(("none", "mass"), UNITS)
    with pytest.raises(UsageError, match=r"no 'masss'. Did you mean 'mass'"):
        wanted_targets(("masss",), UNITS)
    with pytest.raises(UsageError, match="has no column of numbers"):
        wanted_targets(("mass",), {})


def test_one_target_with_two_units_is_refused() -> None:
    with pytest.raises(UsageError, match="'mass': has the unit 'g' in one part of the corpus and 'kg' in another"):
        joined_units([ImageListing(units={"mass": "g"}), ImageListing(units={"mass": "kg"})])


def test_images_without_a_class_are_spread_by_quarters_of_the_first_number_known() -> None:
    images = [ListedImage(f"{n}", "manifest", targets=(("calories", float(n)),)) for n in range(1, 13)]
    images += [ListedImage("x", "manifest", "pie", targets=(("calories", 99.0),)), ListedImage("y", "folder")]
    images += [ListedImage("z", "manifest", targets=(("mass", 5.0),))]
    strata = strata_of(images, ["calories", "mass"])
    assert strata[:12] == [f"calories quarter {1 + n // 3}" for n in range(12)]
    assert strata[12:] == ["pie", None, "mass quarter 1"]
    assert strata_of(images[4:], ["calories", "mass"]) == [None] * 8 + ["pie", None, None]
