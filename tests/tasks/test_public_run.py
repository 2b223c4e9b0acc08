"""A finished run and its detector, as a script reads and asks them."""

from pathlib import Path

import pytest

import fvc_lib as fvc
from fvc_lib.services.tables import INDEX, read_table


def test_a_script_reads_a_run_and_asks_its_detector(scored_run, tmp_path: Path) -> None:
    run = fvc.open_run(scored_run.root)
    assert run.id == scored_run.run_id
    assert run.parameters["num_folds"] == run.tables.predictions["fold"].n_unique()
    counted = run.sql("SELECT count(*) AS n FROM predictions WHERE label = $label", label="fake")
    assert counted.item() == run.tables.predictions.filter(label="fake").height
    assert "predictions" in dir(run.tables)
    with pytest.raises(AttributeError, match="Did you mean 'predictions'"):
        _ = run.tables.prediction
    with pytest.raises(fvc.UsageError, match="nowhere"):
        run.sql("SELECT * FROM nowhere")

    detector = fvc.load_detector(scored_run.root)
    corpus = Path(str(run.parameters["corpus"]))
    video = corpus / read_table(scored_run.index, INDEX)["path"][0]
    missing = tmp_path / "missing.mp4"
    found = detector.predict([missing, video, missing])
    assert found["path"].to_list() == [str(missing), str(video), str(missing)]
    assert found["failure"].is_not_null().to_list() == [True, False, True]
    stored = run.tables.predictions.join(read_table(scored_run.index, INDEX).select("video_id", "path"), on="video_id")
    assert found["score"][1] == pytest.approx(stored.filter(path=str(video.relative_to(corpus)))["score"].item())
    assert found["verdict"][1] in {"real", "fake", "undecided"}
    assert found["reasons"][1].len() > 0
    assert detector.worth
