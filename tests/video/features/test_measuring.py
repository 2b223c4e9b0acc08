import json

import numpy as np
import polars as pl
import pytest

from fvc_lib.services.atomic_files import path_to_text, sha256_of_file
from fvc_lib.services.records.digests import write_document
from fvc_lib.services.tables import FEATURES, read_table
from fvc_lib.video.features import measuring
from fvc_lib.video.features.family import families_named
from fvc_lib.video.features.measuring import FeatureStore, measure_features
from fvc_lib.video.features.worker import measure_video

NAMES = ("plain.mp4", "tiny.mp4", "cut.mp4", "one \udcff.mp4")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, encode_video):
    """Four videos, of which one is cut, and their rows of the index."""
    root = tmp_path_factory.mktemp("corpus")
    rows = []
    for number, (name, side, count) in enumerate(zip(NAMES, (130, 16, 128, 64), (30, 9, 30, 1), strict=True)):
        path = encode_video(
            root / "made.mp4", count, width=side, height=side, container_options={"movflags": "faststart"}
        ).rename(root / name)
        if name.startswith("cut"):
            path.write_bytes(path.read_bytes()[:-200])
        digest = sha256_of_file(path)
        label, group = ("real", "fake")[number % 2], f"group {number}"
        rows.append((digest[:16], path_to_text(name), label, group, digest))
    return root, pl.DataFrame(rows, ["video_id", "path", "label", "group_id", "content_sha256"], orient="row")


def test_features_are_measured_once_and_a_video_that_fails_is_a_row_of_nulls(tmp_path, corpus):
    root, index = corpus
    seen = []
    path = tmp_path / "tables" / "features.parquet"

    def measure(families="sharpness,spectrum", workers=1):
        return measure_features(
            index, root, families, tmp_path / "cache", path,
            progress=lambda *done: seen.append(done), workers=workers,
        )  # fmt: skip

    report = measure()
    assert (report.measured, report.reused) == (3, 0)
    ((failed, reason),) = report.failed
    assert failed == index["video_id"][2]
    assert "truncated" in reason
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    table = read_table(path, FEATURES)
    assert table["video_id"].to_list() == index["video_id"].to_list()
    columns = [column for family in families_named("all") if family.name in ("sharpness", "spectrum")
               for column in family.columns()]  # fmt: skip
    assert table.columns[3:] == columns
    values = table.select(columns).to_numpy()
    families = families_named("sharpness,spectrum")
    for row, name in zip(values, NAMES, strict=True):
        if name.startswith("cut"):
            assert np.isnan(row).all()
            continue
        found = measure_video(root / name, families)
        wanted = np.float32([value for family in families for value in found[family.name].values()])
        np.testing.assert_array_equal(row, wanted)
    assert np.isnan(values[1]).all()  # smaller than a tile
    assert not np.isnan(values[[0, 3]][:, columns.index("sharpness_laplacian_mean")]).any()

    before = path.read_bytes()
    again = measure(workers=2)
    assert (again.measured, again.reused, len(again.failed)) == (0, 3, 1)
    assert path.read_bytes() == before
    (tmp_path / "cache" / "features").rename(tmp_path / "gone")
    measure(workers=2)
    assert path.read_bytes() == before


def test_only_what_is_missing_is_measured(tmp_path, corpus):
    root, index = corpus
    index = index[:1]
    content = index["content_sha256"][0]
    cache, path = tmp_path / "cache", tmp_path / "features.parquet"
    assert measure_features(index, root, "sharpness", cache, path).measured == 1
    kept = FeatureStore(cache).path(content)
    entry = json.loads(kept.read_text())
    assert list(entry) == ["sharpness", "document_sha256"]
    entry["sharpness"][1][0] = 7.5  # would be another number if it was measured again
    write_document(kept, entry)
    assert measure_features(index, root, "sharpness,spectrum", cache, path).measured == 1
    assert read_table(path, FEATURES)["sharpness_laplacian_mean"].to_list() == [7.5]
    entry["sharpness"][0] = "other code"
    write_document(kept, entry)
    assert measure_features(index, root, "sharpness", cache, path).measured == 1
    assert read_table(path, FEATURES)["sharpness_laplacian_mean"][0] != 7.5


def test_a_damaged_file_of_the_cache_counts_as_missing(tmp_path):
    store, content = FeatureStore(tmp_path), "a" * 64
    store.add(content, {"sharpness": ["code", [1.5, None]]})
    store.add(content, {"timing": ["code", [1]]})
    whole = store.path(content).read_text()
    assert store.read(content) == {"sharpness": ["code", [1.5, None]], "timing": ["code", [1]]}
    for text in (whole.replace("1.5", "1.25"), '{"sharpness": ["code", [1]]}', "[]", whole[:-9], ""):
        store.path(content).write_text(text)
        assert store.read(content) == {}, text


def test_a_crash_or_a_changed_file_costs_that_video(tmp_path, corpus, monkeypatch):
    root, index = corpus
    path = tmp_path / "features.parquet"
    changed = index.with_columns(pl.lit("0" * 64).alias("content_sha256"))[:1]
    ((_, reason),) = measure_features(changed, root, "timing", tmp_path, path).failed
    assert "its content has changed" in reason
    monkeypatch.setattr(measuring, "MEASURE_FUNCTION", "tests.video.features.crashing_worker:crash")
    report = measure_features(index[:2], root, "timing", tmp_path, path)
    assert [reason.split(":")[1].strip() for _, reason in report.failed] == ["crashed", "crashed"]
    assert read_table(path, FEATURES).drop("video_id", "group_id", "label").null_count().row(0)[0] == 2
