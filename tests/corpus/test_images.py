"""Corpora of images: their layouts, the rules of the index, and the index of whole corpora."""

import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from PIL import Image

from fvc_lib.corpus.corpus_files import Rejections
from fvc_lib.corpus.images import (
    ImageListing,
    ListedImage,
    image_root,
    index_images,
    learnable,
    list_images,
    one_of_each_content,
    wanted_targets,
    with_groups,
    without_copies_across,
)
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, LeakageError, StoppedError, UsageError
from fvc_lib.services.tables import IMAGE_TARGETS, IMAGES, REJECTED, check_table
from tests.corpus.edited_pictures import EDITS, drawn, put_picture

TOTALS = (100.0, 50.0, 4.0, 12.0, 3.0)  # kcal, then grams of mass, fat, carbohydrate, protein


def picture(seed: int, kind: str = "JPEG") -> bytes:
    """A picture of 12 pixels a side; seeds differ, equal seeds give equal bytes."""
    stream = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (12, 12, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def put(path: Path, content: bytes | str | int) -> Path:
    """Write a file and its folders; a number is the seed of a picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, int):
        content = picture(content, "PNG" if path.suffix == ".png" else "JPEG")
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_food101(
    folder: Path,
    train: Sequence[str],
    test: Sequence[str],
    absent: Iterable[str] = (),
) -> Path:
    """Food-101's layout with the images of both lists but for the ``absent``; lines are like ``pie/1``."""
    put(folder / "meta" / "train.txt", "\n".join(train) + "\n")
    put(folder / "meta" / "test.txt", "\n".join(test) + "\n")
    for seed, line in enumerate(sorted({*train, *test} - set(absent))):
        put(folder / "images" / f"{line}.jpg", seed)
    return folder


def dish_row(dish: str, totals: Sequence[object] = TOTALS) -> str:
    """A row of Nutrition5k's tables, with one ingredient."""
    return ",".join([dish, *map(str, totals), "ingr_1,rice,20,30.0,1.0,5.0,0.5"])


def write_nutrition5k(
    folder: Path,
    cafe1: Sequence[str],
    cafe2: Sequence[str] = (),
    *,
    lists: Mapping[str, Sequence[str]] | None = None,
    pictures: Mapping[str, int],
) -> Path:
    """Nutrition5k's layout; ``pictures`` says of how many pictures which dish has, the first one from above."""
    for number, rows in enumerate((cafe1, cafe2), start=1):
        put(folder / f"metadata/dish_metadata_cafe{number}.csv", "\n".join(rows) + "\n")
    for part, dishes in (lists or {}).items():
        put(folder / f"dish_ids/splits/rgb_{part}_ids.txt", "\n".join(dishes) + "\n")
    for seed, (dish, count) in enumerate(pictures.items(), start=100):
        above, aside = folder / "imagery/realsense_overhead" / dish, folder / "imagery/side_angles" / dish
        put(above / "depth_color.png", 10 * seed)
        frames = [aside / f"frames_sampled30/camera_A_frame_{number:03d}.jpeg" for number in range(1, count)]
        for number, path in enumerate([above / "rgb.png", *frames][:count], start=1):
            put(path, 10 * seed + number)
    return folder


def listed(corpus: Path, *, wanted: str | None = None) -> ImageListing:
    _, found, listing = list_images(corpus)
    assert wanted is None or found == wanted
    return listing


def reasons(listing: ImageListing) -> Counter[str]:
    return Counter(listing.rejections.frame()["reason"].to_list())


# Food-101


def test_food101_keeps_its_own_split_and_never_guesses_a_class(tmp_path: Path) -> None:
    train = ["pie/1", "pie/2", "soup/3", "sushi/9", "nonsense", "pie/../../secret", "pie/1"]
    corpus = write_food101(tmp_path, train, ["pie/4", "soup/5", "soup/6"], absent=["soup/6", "pie/../../secret"])
    put(corpus / "images" / "pie" / "77.jpg", 77)  # in neither list
    put(corpus / "images" / "curry" / "78.jpg", 78)  # of a class that the list of classes does not have
    put(corpus / "images" / "pie" / "notes.txt", "x")
    put(corpus / "secret.jpg", 79)
    (corpus / "images" / "nonsense.jpg").unlink()
    listing = listed(corpus, wanted="food101")
    found = {(image.path, image.class_label, image.part) for image in listing.images}
    assert found == {
        ("images/pie/1.jpg", "pie", "train"),
        ("images/pie/2.jpg", "pie", "train"),
        ("images/soup/3.jpg", "soup", "train"),
        ("images/sushi/9.jpg", "sushi", "train"),
        ("images/pie/4.jpg", "pie", "test"),
        ("images/soup/5.jpg", "soup", "test"),
    }
    assert all(image.stated_group is None and not image.targets for image in listing.images)
    assert reasons(listing) == {"missing_image": 3, "not_listed": 2, "unknown_extension": 1}
    put(corpus / "meta" / "train.txt", "pie/1\npie/4\n")  # an image of both lists is tested on, never trained on
    assert {image.part for image in listed(corpus).images if image.path == "images/pie/4.jpg"} == {"test"}


def test_food101_without_a_list_is_refused(tmp_path: Path) -> None:
    for name in ("train.txt", "test.txt"):  # never read as folders of the classes images and meta
        corpus = write_food101(tmp_path / name, ["pie/1"], ["pie/2"])
        (corpus / "meta" / name).unlink()
        with pytest.raises(DataError, match=name):
            list_images(corpus)


# Nutrition5k


def test_nutrition5k_gives_every_frame_its_dish(tmp_path: Path) -> None:
    cafe1 = [dish_row("dish_1"), dish_row("dish_2", (210.5, 99, 1, 2, 3)), dish_row("dish_3")]
    cafe2 = [dish_row("dish_4"), dish_row("dish_5"), dish_row("dish_1", (9,) * 5), "dish_6", dish_row("dish_7", "a")]
    corpus = write_nutrition5k(
        tmp_path, cafe1, cafe2, lists={"train": ["dish_1", "dish_2", "dish_5"], "test": ["dish_4"]},
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
    # Six depth images, dish_3 in no list, dish_9 in no table; dish_5; the video.
    assert reasons(listing) == {"not_listed": 8, "no_picture": 1, "unknown_extension": 1}


def test_a_dish_in_both_official_lists_is_not_trained_on(tmp_path: Path) -> None:
    lists, rows = {"train": ["d1", "d2"], "test": ["d2"]}, [dish_row("d1"), dish_row("d2")]
    corpus = write_nutrition5k(tmp_path, rows, lists=lists, pictures={"d1": 1, "d2": 1})
    assert {image.stated_group: image.part for image in listed(corpus).images} == {"d1": "train", "d2": "test"}


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
    assert rows["c.jpg"].targets == {"calories": 100, "mass": 7, "mass_kg": None, "rating": None}
    assert rows["d.jpg"].targets == {"calories": None, "mass": 8, "mass_kg": None, "rating": 2}
    assert reasons(listing) == {
        "outside_corpus": 1, "unknown_split": 1, "missing_image": 1, "no_path": 1, "malformed_row": 1
    }  # fmt: skip
    assert "row 6" in listing.rejections.frame().filter(reason="unknown_split")["detail"][0]


UNITS = {"calories": "kcal", "mass": "g", "rating": ""}


def image(path: str, group: str | None = None, part: str | None = None, label: str | None = "pie", **values):
    return ListedImage(path, label, group, part, **values)


def table(images: list[ListedImage], contents: str) -> pl.DataFrame:
    """The images as read from files of these contents; equal contents are copies."""
    content_of = dict(zip((each.path for each in images), contents, strict=True))
    frame = learnable(images, ["calories", "mass"], Rejections())
    shown = [content_of[path] for path in frame["path"]]
    return frame.with_columns(
        copy=pl.Series([ord(name) for name in shown]), content_sha256=pl.Series([name * 64 for name in shown])
    )


def test_copies_join_groups_but_not_across_an_official_split() -> None:
    images = [
        image("a", "g1"), image("b", "g1"), image("c", "g2"), image("d", "g3", "train"), image("e", "g4", "test"),
        image("f"), image("g", "g5"), image("h", "g4"), image("i"), image("j", label="soup"), image("k"),
    ]  # fmt: skip
    grouped = with_groups(table(images, "12233456775"))
    groups = dict(grouped.select("path", "group_id").rows())
    assert groups["a"] == groups["b"] == groups["c"]
    assert groups["e"] == groups["h"]
    assert groups["g"] == groups["k"] == "g5"  # a picture without a stated group stays with its copies
    assert groups["i"] == groups["j"]
    assert len(set(groups.values())) == 6


def test_what_looks_like_the_official_test_is_not_trained_on() -> None:
    images = [
        image("a", part="train"), image("b", part="test"), image("c", part="validation"), image("d"),
        image("e", part="train"), image("f", part="train"), image("g", part="validation"), image("h", "g", "test"),
        image("i", "g"),
    ]  # fmt: skip
    rejections = Rejections()
    grouped = with_groups(table(images, "111123344"))
    assert set(without_copies_across(grouped, "known", "copy", rejections)["path"]) == set("beghi")
    assert Counter(rejections.frame()["reason"]) == {"copy_across_split": 4}


@pytest.mark.parametrize(
    ("images", "contents", "kept", "reasons"),
    [
        (  # of copies the official test image stays, then the first by path, with what any of them states
            [
                image("a", part="train"), image("b", part="test"), image("c", part="train", label=None),
                image("d", part="train", label="soup"),
                image("e", part="train", label="soup", targets={"mass": 1.0}), image("f"),
            ],
            "112223", "bdf", {"duplicate_content": 2},
        ),
        (  # copies that contradict each other are all left out
            [
                image("a"), image("b", label="soup"), image("c", label=None, targets={"calories": 1.0}),
                image("d", label=None, targets={"mass": 1.0}),
                image("e", label=None, targets={"calories": 9.0, "mass": 2.0}),
                image("f", label=None, targets={"calories": 9.0}), image("g", label=None, targets={"mass": 3.0}),
            ],
            "1112234", "fg", {"conflicting_labels": 5},
        ),
        ([image("a", row=1), image("a", row=2)], "11", "a", {"duplicate_content": 1}),
    ],
)  # fmt: skip
def test_one_image_of_each_content_stays(images, contents, kept, reasons) -> None:
    for order in (1, -1):
        rejections = Rejections()
        remaining = one_of_each_content(table(images[::order], contents[::order]), rejections)
        assert "".join(remaining["path"]) == kept
        assert remaining.filter(path="d")["value:mass"].to_list() == [1.0] * kept.count("d")
        assert Counter(rejections.frame()["reason"]) == Counter(reasons)


def test_targets_are_asked_for_by_name() -> None:
    for wanted, names in (((), [*UNITS]), (("none",), []), (("rating", "calories"), ["rating", "calories"])):
        assert list(wanted_targets(wanted, UNITS)) == names
    for wanted, units in ((("none", "mass"), UNITS), (("calories_kcal",), UNITS), (("mass",), {})):
        with pytest.raises(UsageError):
            wanted_targets(wanted, units)


def config_for(corpus: Path, **values) -> RunConfig:
    settings = {"cache_dir": str(corpus.parent / "cache"), "workers": 1, "max_rejected_share": 0.9, **values}
    return RunConfig(task="image", corpus=str(corpus), **settings)


@pytest.fixture(scope="module")
def food(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Food-101 with damage and copies."""
    train = [f"{name}/{number}" for name in ("pie", "soup") for number in range(8)]
    corpus = write_food101(tmp_path_factory.mktemp("food") / "corpus", train, ["pie/90", "soup/91", "soup/92"])
    images = corpus / "images"
    put(images / "pie" / "0.jpg", picture(3, "PNG")[:90])  # truncated
    put(images / "pie" / "1.jpg", "no picture")
    put(images / "pie" / "2.jpg", (images / "pie" / "3.jpg").read_bytes())  # a copy within the training part
    put(images / "pie" / "4.jpg", (images / "pie" / "90.jpg").read_bytes())  # a training copy of a test image
    put(images / "soup" / "0.jpg", (images / "pie" / "5.jpg").read_bytes())  # one content, two classes
    return corpus


@pytest.fixture(scope="module")
def dishes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = [f"dish_{number}" for number in range(12)]
    rows = [dish_row(dish, (100 + 10 * number, 50, 4, 12, 3)) for number, dish in enumerate(names)]
    return write_nutrition5k(tmp_path_factory.mktemp("n5k") / "corpus", rows, pictures=dict.fromkeys(names, 2))


def test_food101_keeps_its_split_and_leaves_out_what_cannot_be_used(food: Path) -> None:
    index = index_images(config_for(food))
    check_table(index.rejected, REJECTED, "rejected")
    assert (index.notes[0], index.root) == (f"food101: {food}", food)
    assert image_root(config_for(food)) == food
    rejected = {(Path(path).parts[-2] + "/" + Path(path).stem, reason) for path, reason in index.rejected.select(
        "path", "reason").rows()}  # fmt: skip
    assert rejected == {
        ("pie/0", "truncated"), ("pie/1", "no_image"), ("pie/3", "duplicate_content"), ("pie/4", "duplicate_content"),
        ("pie/5", "conflicting_labels"), ("soup/0", "conflicting_labels"),
    }  # fmt: skip
    images = index.rows
    assert images.height == 13
    assert images.select("width", "height", "source").unique().rows() == [(12, 12, "food101")]
    official = set(images.filter(part="test", split_source="official")["path"])
    assert official == {f"images/{name}.jpg" for name in ("pie/90", "soup/91", "soup/92")}
    assert Counter(images.select("part", "split_source").rows())["validation", "made"] >= 1
    assert images.group_by("group_id").agg(pl.col("part").n_unique())["part"].max() == 1


def test_pictures_of_a_dish_are_a_group_and_a_stopped_index_goes_on(dishes: Path, tmp_path: Path) -> None:
    config = config_for(dishes, cache_dir=str(tmp_path), targets=("mass", "calories"))

    def stopped(done: int, total: int) -> None:
        if done:
            raise StoppedError("as by a signal")

    with pytest.raises(StoppedError):
        index_images(config, progress=stopped)
    seen: list[tuple[int, int]] = []
    index = index_images(config, progress=lambda *done: seen.append(done))
    assert seen[0][0] > 0
    check_table(index.rows, IMAGES, "images")
    check_table(index.targets, IMAGE_TARGETS, "targets")
    assert (index.rows.height, index.rows["class_label"].null_count(), index.targets.height) == (24, 24, 24 * 2)
    assert dict(index.targets.select("target", "unit").unique().rows()) == {"mass": "g", "calories": "kcal"}
    assert set(index.rows["part"]) == {"train", "validation", "test"}
    grouped = index.rows.group_by("group_id").agg(pl.len(), pl.col("part").n_unique())
    assert grouped.drop("group_id").rows() == [(2, 1)] * 12


@pytest.fixture
def edited(tmp_path: Path) -> Path:
    """Twelve dishes of two classes, each also saved anew, cropped and mirrored under other names."""
    corpus = tmp_path / "corpus"
    for number, dish in enumerate(drawn(12)):
        folder = corpus / ("pie" if number % 2 else "soup")
        put_picture(folder / f"{number}.jpg", dish)
        for edit in ("half the size", "mirrored and cropped"):
            put_picture(folder / f"{edit} {11 - number}.jpg", EDITS[edit](dish))
    return corpus


def test_an_official_test_part_is_kept_and_its_copies_are_not_trained_on(edited: Path) -> None:
    rows = ["path,class,split"]
    for path in sorted(edited.glob("*/*.jpg")):
        split = "test" if path.stem in {"0", "1", "2"} else "train"
        rows.append(f"{path.relative_to(edited)},{path.parent.name},{split}")
    put(edited / "manifest.csv", "\n".join(rows) + "\n")
    index = index_images(config_for(edited))
    assert Counter(index.rejected["reason"]) == {"copy_across_split": 6}
    assert {Path(path).stem for path in index.rows.filter(part="test")["path"]} == {"0", "1", "2"}
    assert index.rows.height == 30
    assert index.rows.group_by("group_id").agg(pl.col("part").n_unique())["part"].max() == 1


def test_a_manifest_group_on_both_sides_stops_the_run(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    for name in "abc":
        put(corpus / f"{name}.jpg", ord(name))
    put(corpus / "manifest.csv", "path,class,group,split\na.jpg,x,g,train\nb.jpg,y,g,test\nc.jpg,x,h,train\n")
    with pytest.raises(LeakageError, match="'g'"):
        index_images(config_for(corpus))
    put(corpus / "manifest.csv", "path,class\na.jpg,x\nb.jpg,x\nc.jpg,x\n")
    with pytest.raises(DataError, match="1 class"):
        index_images(config_for(corpus))
