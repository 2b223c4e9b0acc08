"""Every command answers with the exit code and the facts it gave before; wording is free."""

import re
from pathlib import Path

import polars as pl
import pytest

from tests.golden.golden_runs import ROOT, compare, run

pytestmark = pytest.mark.long
MEDIA = ROOT.parent / "shared" / "media"
needs_media = pytest.mark.skipif(not MEDIA.is_dir(), reason="needs the development media")


def auc_of(run_folder: Path, source: str = "model") -> str:
    """Return the AUC of the run's results with three digits."""
    results = pl.read_ipc((run_folder / "kfold_results.feather").read_bytes())
    row = results.filter((pl.col("source") == source) & (pl.col("metric") == "roc_auc") & (pl.col("scope") == "all"))
    return f"{row['value'][0]:.3f}"


def asked(folder: Path, *arguments: str, code: int = 0) -> str:
    """Return what a command printed; it must end with ``code``."""
    found, shown = run(folder, *arguments)
    assert found == code, shown
    return shown


def test_help_names_every_command(golden_folder):
    shown = asked(golden_folder, "--help")
    commands = re.findall(r"^  ([a-z-]+)  ", shown.split("Commands:")[1], re.MULTILINE)
    wanted = "audit clean compare corpora detectors doctor ensemble export predict robustness status sweep"
    assert set(wanted.split()) <= set(commands)
    for command in commands:
        assert command in asked(golden_folder, command, "--help")


OF_COMMANDS = {"08_detector_comparison", "09_robustness", "11_ensemble", "30_verdicts", "40_score_audit"}


def test_list_names_every_stage(golden_folder):
    shown = asked(golden_folder, "--list")
    stages = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} - OF_COMMANDS
    assert [name for name in sorted(stages) if name not in shown] == []


def test_status_and_report(golden_folder, golden_run):
    made = golden_run("demo")
    shown = asked(golden_folder, "status", str(made))
    assert "04_fold_training_fold_1" in shown
    assert "done" in shown
    before = (made / "report.html").stat().st_mtime_ns
    shown = asked(golden_folder, "report", str(made))
    assert auc_of(made) in shown
    assert (made / "report.html").stat().st_mtime_ns > before
    assert auc_of(made) in (made / "report.html").read_text()
    assert (golden_folder / "runs/index.html").is_file()


def test_compare_shows_both_and_their_difference(golden_folder, golden_run):
    first, second = golden_run("demo"), golden_run("frozen")
    shown = asked(golden_folder, "compare", str(first), str(second))
    difference = float(auc_of(second)) - float(auc_of(first))
    assert auc_of(first) in shown
    assert auc_of(second) in shown
    assert any(abs(float(number) - difference) < 0.0021 for number in re.findall(r"[-+]?\d\.\d+", shown))


def test_ensemble_of_two_runs(golden_folder, golden_run):
    shown = asked(golden_folder, "ensemble", str(golden_run("demo")), str(golden_run("frozen")))
    assert compare("ensemble", {"numbers": re.findall(r"ROC AUC (\d\.\d+)", shown)[:1]}) == []


def test_dry_run_of_a_finished_run_repeats_nothing(golden_folder, golden_run):
    shown = asked(golden_folder, "--resume", str(golden_run("demo")), "--dry-run")
    assert shown.count("skip") >= 8


@needs_media
def test_predict_by_run_and_by_bundle_agree(golden_folder, golden_run, tmp_path):
    made, files = golden_run("demo"), [MEDIA / "decode/gradio__a.mp4", MEDIA / "broken/jcodec__7ae267_keyed.mp4"]
    bundle, tables = tmp_path / "bundle", []
    asked(golden_folder, "export", str(made), "--to", str(bundle))
    for model, name in ((made, "by_run"), (bundle, "by_bundle")):
        asked(golden_folder, "predict", str(model), *map(str, files), "--out", str(tmp_path / name), "--pages", "0")
        tables.append(pl.read_csv(tmp_path / name / "verdicts.csv"))
    assert tables[0]["score"].to_list() == tables[1]["score"].to_list()
    assert tables[0]["verdict"].to_list() == tables[1]["verdict"].to_list()
    scores = [None if score is None else round(score, 4) for score in tables[0]["score"].to_list()]
    assert compare("predict", {"scores": [str(score) for score in scores]}) == []


def test_robustness_of_one_level(golden_folder, golden_run):
    made = golden_run("demo")
    asked(golden_folder, "robustness", str(made), "--levels", "jpeg_50")
    assert pl.read_parquet(made / "tables/robustness.parquet").height >= 160


def test_audit_of_a_table_of_scores(golden_folder, tmp_path):
    rows = [
        f"v{number},{'real' if number % 2 else 'fake'},g{number // 2},{(number * 37 % 100) / 100}"
        for number in range(120)
    ]
    (tmp_path / "scores.csv").write_text("video,label,group,score\n" + "\n".join(rows) + "\n")
    shown = asked(golden_folder, "audit", str(tmp_path / "scores.csv"), "--out", str(tmp_path / "audit"))
    assert "120 videos" in shown
    assert "60 groups" in shown
    assert (tmp_path / "audit/audit.html").is_file()
    assert compare("audit", {"auc": re.findall(r"AUC (\d\.\d+)", shown)[:1]}) == []


@needs_media
def test_commands_that_look_at_files_and_machines(golden_folder):
    shown = asked(golden_folder, "corpora", str(MEDIA / "labelled"))
    assert {"41", "23", "18"} <= set(re.findall(r"\d+", shown))
    assert "FVC" in asked(golden_folder, "corpora")
    assert "11,937" in asked(golden_folder, "detectors", "frame_cnn")
    for name in ("efficientnet_lite0", "r3d_18", "timm:name", "clip", "x3d", "videomae"):
        assert name in asked(golden_folder, "detectors").lower(), name
    assert "noise_residual" in asked(golden_folder, "features")
    asked(golden_folder, "clean")
    assert "torch" in asked(golden_folder, "doctor")
