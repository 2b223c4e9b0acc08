from collections import Counter
from pathlib import Path

import polars as pl
import pytest

from fvc_lib.corpus.images import image_root, index_images
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, LeakageError, StoppedError
from fvc_lib.services.tables import IMAGE_TARGETS, IMAGES, REJECTED, check_table
from tests.corpus.edited_pictures import EDITS, drawn, put_picture
from tests.corpus.image_corpora import dish_row, picture, put, write_food101, write_nutrition5k


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
    assert (index.layout, index.root, index.classes) == ("food101", food, ("pie", "soup"))
    assert image_root(config_for(food)) == food
    rejected = {(Path(path).parts[-2] + "/" + Path(path).stem, reason) for path, reason in index.rejected.select(
        "path", "reason").rows()}  # fmt: skip
    assert rejected == {
        ("pie/0", "truncated"), ("pie/1", "no_image"), ("pie/3", "duplicate_content"), ("pie/4", "duplicate_content"),
        ("pie/5", "conflicting_labels"), ("soup/0", "conflicting_labels"),
    }  # fmt: skip
    images = index.images
    assert images.height == 13
    assert images.select("width", "height", "source").unique().rows() == [(12, 12, "food101")]
    official = set(images.filter(part="test", split_source="official")["path"])
    assert official == {f"images/{name}.jpg" for name in ("pie/90", "soup/91", "soup/92")}
    assert Counter(images.select("part", "split_source").rows())["validation", "made"] >= 1
    assert images.group_by("group_id").agg(pl.col("part").n_unique())["part"].max() == 1


def test_pictures_of_a_dish_are_a_group_and_a_stopped_index_goes_on(dishes: Path, tmp_path: Path) -> None:
    config = config_for(dishes, cache_dir=str(tmp_path), targets=("mass", "calories"))
    with pytest.raises(StoppedError, match="run it again"):
        index_images(config, stop=lambda: True)
    seen: list[tuple[int, int]] = []
    index = index_images(config, progress=lambda *done: seen.append(done))
    assert seen[0][0] > 0
    check_table(index.images, IMAGES, "images")
    check_table(index.targets, IMAGE_TARGETS, "targets")
    assert (index.images.height, index.images["class_label"].null_count(), index.targets.height) == (24, 24, 24 * 2)
    assert dict(index.units) == {"mass": "g", "calories": "kcal"}
    assert set(index.images["part"]) == {"train", "validation", "test"}
    grouped = index.images.group_by("group_id").agg(pl.len(), pl.col("part").n_unique())
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
    assert {Path(path).stem for path in index.images.filter(part="test")["path"]} == {"0", "1", "2"}
    assert index.images.height == 30
    assert index.images.group_by("group_id").agg(pl.col("part").n_unique())["part"].max() == 1


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
