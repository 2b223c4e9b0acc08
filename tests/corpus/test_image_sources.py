from collections import Counter
from pathlib import Path

import polars as pl
import pytest

from fvc_lib.corpus.sources.images import ImageListing, list_images
from fvc_lib.services.errors import DataError, LeakageError, UsageError
from tests.corpus.image_corpora import TOTALS, dish_row, put, write_food101, write_nutrition5k


def listed(corpus: Path, *, wanted: str | None = None) -> ImageListing:
    _, found, listing = list_images(corpus)
    assert wanted is None or found == wanted
    return listing


def reasons(listing: ImageListing) -> Counter[str]:
    return Counter(listing.rejections.frame()["reason"].to_list())


def detail_of(listing: ImageListing, reason: str) -> str:
    return "; ".join(listing.rejections.frame().filter(pl.col("reason") == reason)["detail"])


# Food-101


def test_food101_keeps_its_own_split_and_never_guesses_a_class(tmp_path: Path) -> None:
    train = ["pie/1", "pie/2", "soup/3", "sushi/9", "nonsense", "pie/4", "pie/1"]
    corpus = write_food101(tmp_path, train, ["pie/4", "soup/5", "soup/6"], classes=["pie", "soup"], absent=["soup/6"])
    put(corpus / "images" / "pie" / "77.jpg", 77)  # in neither list
    put(corpus / "images" / "curry" / "78.jpg", 78)  # of a class that the list of classes does not have
    put(corpus / "images" / "pie" / "notes.txt", "x")
    (corpus / "images" / "nonsense.jpg").unlink()
    lines = (corpus / "meta" / "train.txt").read_text()
    put(corpus / "meta" / "train.txt", f"{lines}pie/../../secret\n")
    listing = listed(corpus, wanted="food101")
    found = {(image.path, image.class_label, image.part, image.row) for image in listing.images}
    assert found == {
        ("images/pie/1.jpg", "pie", "train", 1),
        ("images/pie/2.jpg", "pie", "train", 2),
        ("images/soup/3.jpg", "soup", "train", 3),
        ("images/sushi/9.jpg", "sushi", "train", 4),
        ("images/pie/4.jpg", "pie", "test", 1),  # listed as both: what is tested on is not trained on
        ("images/soup/5.jpg", "soup", "test", 2),
    }
    assert all(image.stated_group is None and not image.targets for image in listing.images)
    assert reasons(listing) == {
        "missing_image": 1, "malformed_row": 2, "duplicate_path": 2, "not_listed": 2,
        "unknown_extension": 1,
    }  # fmt: skip


def test_food101_without_a_list_is_refused(tmp_path: Path) -> None:
    for name in ("train.txt", "test.txt"):  # never read as folders of the classes images and meta
        corpus = write_food101(tmp_path / name, ["pie/1"], ["pie/2"])
        (corpus / "meta" / name).unlink()
        with pytest.raises(DataError, match=name):
            list_images(corpus)


# Nutrition5k


def test_nutrition5k_gives_every_frame_its_dish(tmp_path: Path) -> None:
    cafe1 = [dish_row("dish_1"), dish_row("dish_2", (210.5, 99, 1, 2, 3), 0), dish_row("dish_3", num_ingredients=1)]
    cafe2 = [dish_row("dish_4"), dish_row("dish_5")]
    corpus = write_nutrition5k(
        tmp_path, cafe1, cafe2, train=["dish_1", "dish_2", "dish_5"], test=["dish_4"],
        pictures={"dish_1": 3, "dish_2": 1, "dish_3": 1, "dish_4": 2, "dish_5": 0, "dish_9": 1},
    )  # fmt: skip
    put(corpus / "imagery" / "side_angles" / "dish_1" / "camera_A.h264", b"x")
    listing = listed(corpus, wanted="nutrition5k")
    found = Counter((image.stated_group, image.part, image.class_label) for image in listing.images)
    assert found == {("dish_1", "train", None): 3, ("dish_2", "train", None): 1, ("dish_4", "test", None): 2}
    values = {image.stated_group: dict(image.targets) for image in listing.images}
    assert values["dish_1"] == dict(zip(("calories", "mass", "fat", "carbohydrate", "protein"), TOTALS, strict=True))
    assert listing.units == {"calories": "kcal", "mass": "g", "fat": "g", "carbohydrate": "g", "protein": "g"}
    assert not any("depth" in image.path for image in listing.images)
    assert reasons(listing) == {"not_listed": 2, "no_picture": 1}  # dish_3 in no list, dish_9 in no table, dish_5


def test_broken_rows_of_nutrition5k_are_named_with_file_and_row(tmp_path: Path) -> None:
    broken = [("a lot", 1, 2, 3, 4), (1, -2, 3, 4, 5), (1, 2, "nan", 4, 5)]
    rows = [dish_row("d1"), *(dish_row(f"d{number}", row) for number, row in enumerate(broken, start=2)), "d5,1,2,3"]
    rows += [dish_row("d6"), dish_row("d7"), "", dish_row("d8") + ",ingr_99,half an ingredient"]
    again = [dish_row("d6", (1, 2, 3, 4, 5)), dish_row("d7")]
    dishes = [f"d{number}" for number in range(1, 9)]
    listing = listed(write_nutrition5k(tmp_path, rows, again, pictures=dict.fromkeys(dishes, 1)))
    assert sorted(str(image.stated_group) for image in listing.images) == ["d1", "d6", "d7", "d8"]
    rejected = listing.rejections.frame().filter(pl.col("row").is_not_null()).sort("path", "row")
    assert [(Path(path).name, *rest) for path, *rest in rejected.select("path", "row", "reason").rows()] == [
        *(("dish_metadata_cafe1.csv", row, "malformed_row") for row in (2, 3, 4, 5)),
        *(("dish_metadata_cafe2.csv", row, "duplicate_path") for row in (1, 2)),
    ]


def test_a_dish_in_both_official_lists_stops_the_run(tmp_path: Path) -> None:
    corpus = write_nutrition5k(
        tmp_path, [dish_row("d1"), dish_row("d2")], train=["d1", "d2"], test=["d2"], pictures={"d1": 1, "d2": 1}
    )
    with pytest.raises(LeakageError, match=r"rgb_train_ids.txt.*rgb_test_ids.txt.*'d2'"):
        list_images(corpus)


# Plain folders


def test_a_folder_of_classes(tmp_path: Path) -> None:
    put(tmp_path / "pie" / "a.jpg", 1)
    put(tmp_path / "pie" / "deeper" / "b.PNG", 2)
    put(tmp_path / "soup" / "c.webp", 3)
    put(tmp_path / "loose.jpg", 4)
    put(tmp_path / ".hidden" / "d.jpg", 5)
    listing = listed(tmp_path, wanted="folder")
    assert {(i.path, i.class_label, i.part) for i in listing.images} == {
        ("pie/a.jpg", "pie", None), ("pie/deeper/b.PNG", "pie", None), ("soup/c.webp", "soup", None),
    }  # fmt: skip
    assert reasons(listing) == {"no_class": 1}
    for seed, name in enumerate(["train/pie/a", "val/pie/c", "test/soup/d"]):  # parts, not classes
        put(tmp_path / "pie" / f"{name}.jpg", seed)
    (tmp_path / "pie" / "deeper").rename(tmp_path / "deeper")
    parts = {(i.part, i.class_label) for i in listed(tmp_path / "pie").images}
    assert parts == {("train", "pie"), ("validation", "pie"), ("test", "soup")}


def test_a_flat_folder_says_what_to_do(tmp_path: Path) -> None:
    put(tmp_path / "a.jpg", 1)
    put(tmp_path / "labels.csv", "path,class\na.jpg,pie\n")
    with pytest.raises(UsageError, match=r"Did you mean .*labels.csv"):
        list_images(tmp_path)


# Manifests


def test_a_manifest_with_classes_groups_parts_and_numbers(tmp_path: Path) -> None:
    for name in "abcdefg":
        put(tmp_path / "x" / f"{name}.jpg", ord(name))
    put(tmp_path / "out.jpg", 0)
    manifest = put(
        tmp_path / "x" / "list.csv",
        "image_path,label,group,split,calories_kcal,mass_g,mass_kg,rating,remark\n"
        "a.jpg,pie,g1,Train,100,5,0.005,3,good\n"
        "./b.jpg,pie,g1,train,,6,nan,4,\n"
        "c.jpg,,g2,val,1e2,7,,unrated,fine\n"
        "d.jpg,soup,,,inf,8,,2,\n"
        "../out.jpg,soup,,,1,1,1,1,\n"
        "e.jpg,soup,,holdout,1,1,1,1,\n"
        "gone.jpg,soup,,,1,1,1,1,\n"
        ",soup,,,1,1,1,1,\n"
        "f.jpg,soup\n",
    )
    listing = listed(manifest, wanted="manifest")
    assert listing.units == {"calories": "kcal", "mass": "g", "mass_kg": "kg", "rating": ""}
    rows = {image.path: image for image in listing.images}
    assert sorted(rows) == ["a.jpg", "b.jpg", "c.jpg", "d.jpg"]
    assert (rows["a.jpg"].class_label, rows["a.jpg"].stated_group, rows["a.jpg"].part) == ("pie", "g1", "train")
    assert dict(rows["a.jpg"].targets) == {"calories": 100, "mass": 5, "mass_kg": 0.005, "rating": 3}
    assert (rows["c.jpg"].class_label, rows["c.jpg"].part) == (None, "validation")
    assert dict(rows["c.jpg"].targets) == {"calories": 100, "mass": 7}
    assert dict(rows["d.jpg"].targets) == {"mass": 8, "rating": 2}
    assert reasons(listing) == {
        "outside_corpus": 1, "unknown_split": 1, "missing_image": 1, "no_path": 1, "malformed_row": 1
    }  # fmt: skip
    assert "row 6" in detail_of(listing, "unknown_split")
    assert all(name in " ".join(listing.notes) for name in ("'remark'", "1 cells of 'rating'"))
