from pathlib import Path

import polars as pl

from fvc_lib.analysis.read.runs import read_tables, run_names
from fvc_lib.services import tables
from fvc_lib.services.run_paths import RunPaths


def test_a_foreign_table_is_left_out_and_named(tmp_path: Path) -> None:
    good = pl.DataFrame({"video_id": ["v"], "group_id": ["g"], "label": ["real"], "fold": [0]})
    tables.write_table(good, tables.FOLDS, tmp_path / "good.parquet")
    pl.DataFrame({"other": [1]}).write_parquet(tmp_path / "foreign.parquet")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    names = ("good", "foreign", "torn", "missing")
    answer = read_tables([(name, tmp_path / f"{name}.parquet") for name in names], tables.FOLDS)
    assert answer.frame.rows() == [("good", "v", "g", "real", 0)]
    assert len(answer.notes) == 2
    assert "foreign.parquet was left out" in answer.notes[0]
    assert "torn.parquet was left out" in answer.notes[1]


def test_a_run_is_called_by_as_little_as_tells_it_from_the_others(tmp_path: Path) -> None:
    one, two = (RunPaths(tmp_path / folder / "run_a") for folder in ("x/e", "x/f"))
    lone = RunPaths(tmp_path / "x" / "e" / "run_b")
    assert run_names([one, lone]) == ["run_a", "run_b"]
    assert run_names([two, one, lone]) == [str(two.root), str(one.root), "run_b"]
    assert run_names([one, one]) == ["run_a", "run_a"]
