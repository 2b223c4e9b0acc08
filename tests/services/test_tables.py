"""Schemas refuse a bad table on writing and on reading, and name the column."""

import csv
import errno
import io
import math
import os

import polars as pl
import pytest

from fvc_lib.services import tables
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import FOLDS, read_table, write_table
from tests.faults.disks import small_tmpfs

FRAME = pl.DataFrame({"video_id": ["a", "b"], "group_id": ["g", "h"], "label": ["real", "fake"], "fold": [0, 1]})


def test_a_table_of_features_has_the_columns_of_whatever_families_there_are(tmp_path):
    frame = FRAME.drop("fold").with_columns(pl.lit(0.5, pl.Float32).alias("sharpness_edges_mean"))
    path = tmp_path / "features.parquet"
    for good in (frame, FRAME.drop("fold"), frame.with_columns(pl.lit(None, pl.Float32).alias("packets_a"))):
        write_table(good, tables.FEATURES, path)
        assert read_table(path, tables.FEATURES).equals(good)
    for bad in (
        frame.with_columns(pl.lit(0.5).alias("sharpness_edges_mean")),
        frame.with_columns(pl.lit(math.nan, pl.Float32).alias("sharpness_edges_mean")),
        frame.with_columns(pl.lit(None, pl.Float32).alias("x"), pl.lit("a").alias("y")),
        frame.drop("group_id"),
    ):
        with pytest.raises(DataError, match="does not fit the features schema"):
            write_table(bad, tables.FEATURES, path)


@pytest.mark.fault(11, 42)
@pytest.mark.parametrize("suffix", ["parquet", "feather", "csv"])
def test_a_full_disk_is_named_wherever_in_the_table_it_fills(suffix, tmp_path):
    rows, errors = 1500, []
    frame = pl.DataFrame({"video_id": [f"v{i}" for i in range(rows)], "group_id": [f"g{i * i}" for i in range(rows)]})
    frame = frame.with_columns(pl.lit("real").alias("label"), pl.lit(0, FRAME["fold"].dtype).alias("fold"))
    with small_tmpfs(tmp_path / "disk", "256k") as disk:
        path, ballast = disk.folder / f"folds.{suffix}", disk.folder / "ballast"
        while not path.exists():
            disk.fill()
            os.truncate(ballast, ballast.stat().st_size - len(errors) * 4096)
            try:
                write_table(frame, FOLDS, path)
            except OSError as error:
                errors.append((error.errno, error.filename))
            disk.make_room()
    assert len(errors) >= 2
    assert set(errors) == {(errno.ENOSPC, str(path))}


def test_in_csv_for_people_no_text_is_a_formula_and_tables_of_stages_stay():
    texts = ["=1+1", "+cmd|' /C calc'!A0", "-x", "@SUM(A1)", "\t=1", "\r=2", "-0.5", "+1e3", "-", "a=b", "", None]
    frame = pl.DataFrame({"name": texts, "number": [-1.5] * len(texts)})
    shown = tables.csv_for_people(frame)
    rows = list(csv.reader(io.StringIO(shown, newline="")))
    assert rows[0] == ["name", "number"]
    assert [row[0] for row in rows[1:]] == [*(f"'{text}" for text in texts[:6]), *texts[6:11], ""]
    assert {row[1] for row in rows[1:]} == {"-1.5"}
    assert tables.csv_for_people(frame, header=False) == shown.partition("\n")[2]
    assert tables.csv_for_people(pl.DataFrame({"n": [-1]})) == "n\n-1\n"


@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".csv"])
def test_a_table_reads_back_as_written(tmp_path, suffix):
    path = tmp_path / f"x[1] *{suffix}"
    write_table(FRAME, FOLDS, path)
    assert read_table(path, FOLDS).equals(FRAME)
    assert read_table(path, FOLDS, without=["label"]).equals(FRAME.drop("label"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            pl.lit(None, dtype=pl.String).alias("group_id"),
            "'group_id': wanted a text that is not empty",
        ),
        (pl.lit("").alias("group_id"), "'group_id'"),
        (pl.lit("parody").alias("label"), "got 'parody'"),
        (pl.lit("a").alias("video_id"), "'video_id'"),
        (pl.lit(-1, dtype=pl.Int64).alias("fold"), "'fold'"),
        (pl.lit(1.5).alias("fold"), "'fold'"),
        (pl.lit(1).alias("extra"), "extra"),
    ],
)
def test_a_row_that_does_not_fit_is_never_written(tmp_path, change, words):
    path = tmp_path / "folds.parquet"
    with pytest.raises(DataError) as caught:
        write_table(FRAME.with_columns(change), FOLDS, path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert not path.exists()


def test_a_missing_or_broken_table_is_named_with_the_remedy(tmp_path):
    with pytest.raises(DataError, match="no such table"):
        read_table(tmp_path / "folds.parquet", FOLDS)
    (tmp_path / "folds.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="cannot be read as a table"):
        read_table(tmp_path / "folds.parquet", FOLDS)
