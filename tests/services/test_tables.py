"""Schemas stop a bad table at the border, on writing and on reading, and name the column."""

import shlex
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, strategies as st

from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import FOLDS, read_table, write_table

FRAME = pl.DataFrame({"video_id": ["a", "b"], "group_id": ["g", "h"], "label": ["real", "fake"], "fold": [0, 1]})


@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".csv"])
def test_a_table_reads_back_as_written(tmp_path, suffix):
    path = tmp_path / f"x[1] *{suffix}"
    write_table(FRAME, FOLDS, path)
    assert read_table(path, FOLDS).equals(FRAME)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (pl.lit(None, dtype=pl.String).alias("group_id"), "'group_id': not_nullable"),
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


def test_a_table_without_groups_is_refused_on_reading(tmp_path):
    path = tmp_path / "folds.parquet"
    FRAME.drop("group_id").write_parquet(path)
    with pytest.raises(DataError, match="group_id"):
        read_table(path, FOLDS)


def test_a_missing_or_broken_table_is_named_with_the_remedy(tmp_path):
    with pytest.raises(DataError, match="no such table"):
        read_table(tmp_path / "folds.parquet", FOLDS)
    (tmp_path / "folds.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="cannot be read as a table"):
        read_table(tmp_path / "folds.parquet", FOLDS)


@given(name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
def test_any_text_survives_a_csv(tmp_path_factory, name):
    path = tmp_path_factory.mktemp("csv") / "folds.csv"
    frame = FRAME.with_columns(pl.Series("group_id", [name, name]))
    write_table(frame, FOLDS, path)
    assert read_table(path, FOLDS).equals(frame)


def test_a_missing_table_s_message_ends_in_a_command_that_works_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as refused:
        read_table(tmp_path / "folds.parquet", FOLDS)
    command = shlex.split(str(refused.value).rpartition("its name: ")[2])
    assert command[0] == "python"
    assert Path(command[1]).is_file()
    assert command[2:] == ["--list"]
