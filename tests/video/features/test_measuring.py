import json

import numpy as np
import polars as pl
import pytest

from fvc_lib.services.atomic_files import path_to_text, sha256_of_file
from fvc_lib.services.records.digests import write_document
from fvc_lib.services.tables import FEATURES, read_table
from fvc_lib.video.features import measuring
from fvc_lib.video.features.family import families_named
from fvc_lib.video.features.measuring import features_folder, measure_features, values_path
from fvc_lib.video.features.worker import code_of, measure_video

NAMES = ("plain.mp4", "tiny.mp4", "cut.mp4", "one \udcff.mp4")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, encode_video):
    """Four videos, of which one is cut, and their rows of the index."""
    root = tmp_path_factory.mktemp("corpus")
    rows = []
    for number, (name, side, count) in enumerate(zip(NAMES, (130, 16, 128, 64), (30, 9, 30, 1), strict=True)):
        fast = {"container_options": {"movflags": "faststart"}}
        path = encode_video(root / "made.mp4", count, width=side, height=side, **fast).rename(root / name)
        if name.startswith("cut"):
            path.write_bytes(path.read_bytes()[:-200])
        digest = sha256_of_file(path)
        rows.append((digest[:16], path_to_text(name), ("real", "fake")[number % 2], f"group {number}", digest))
    return root, pl.DataFrame(rows, ["video_id", "path", "label", "group_id", "content_sha256"], orient="row")


def test_features_are_measured_once_and_a_video_that_fails_is_a_row_of_nulls(tmp_path, corpus):
    root, index = corpus
    names, seen = "sharpness,spectrum", []
    path = tmp_path / "tables" / "features.parquet"
    options = {"progress": lambda *done: seen.append(done), "workers": 1}
    report = measure_features(index, root, names, tmp_path / "cache", path, **options)
    assert (report.measured, report.reused) == (3, 0)
    ((failed, reason),) = report.failed
    assert failed == index["video_id"][2]
    assert "truncated" in reason
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    table, families = read_table(path, FEATURES), families_named(names)
    assert table["video_id"].to_list() == index["video_id"].to_list()
    columns = [column for family in families for column in family.columns()]
    assert table.columns[3:] == columns
    values = table.select(columns).to_numpy()
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
    values_path(features_folder(tmp_path / "cache"), index["content_sha256"][0]).unlink()
    again = measure_features(index, root, names, tmp_path / "cache", path, workers=2)
    assert (again.measured, again.reused, len(again.failed)) == (1, 2, 1)
    assert path.read_bytes() == before


def test_only_what_is_missing_is_measured(tmp_path, corpus):
    root, index = corpus
    index, cache, path = index[[0, 1, 3]], tmp_path / "cache", tmp_path / "features.parquet"
    files = [values_path(features_folder(cache), content) for content in index["content_sha256"]]
    family = families_named("sharpness")[0]
    measured = [7.5] * len(family.columns())  # would be other numbers if it was measured again
    for file, code in zip(files, (code_of(family), "other code", code_of(family)), strict=True):
        write_document(file, {"sharpness": [code, measured]})
    files[2].write_text(files[2].read_text().replace("7.5", "7.25"))  # damaged
    assert measure_features(index, root, "sharpness,timing", cache, path).measured == 3
    values = read_table(path, FEATURES)["sharpness_laplacian_mean"]
    assert [value == 7.5 for value in values] == [True, False, False]
    for file in files:
        assert set(json.loads(file.read_text())) == {"sharpness", "timing", "document_sha256"}


def test_a_crash_or_a_changed_file_costs_that_video(tmp_path, corpus, monkeypatch):
    root, index = corpus
    path = tmp_path / "features.parquet"
    changed = index.with_columns(pl.lit("0" * 64).alias("content_sha256"))[:1]
    ((_, reason),) = measure_features(changed, root, "timing", tmp_path, path).failed
    assert "its content has changed" in reason
    monkeypatch.setattr(measuring, "MEASURE_FUNCTION", "faulthandler:_sigsegv")
    report = measure_features(index[:2], root, "timing", tmp_path, path)
    assert [reason.split(":")[1].strip() for _, reason in report.failed] == ["crashed", "crashed"]
    assert read_table(path, FEATURES).drop("video_id", "group_id", "label").null_count().row(0)[0] == 2
