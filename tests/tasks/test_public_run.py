"""A finished run and its detector, as a script reads and asks them."""

import doctest
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import fvc_lib as fvc
from fvc_lib import public
from fvc_lib.services.tables import INDEX, read_table

ROOT = Path(__file__).parents[2]
# Those of docs/architecture.md run in test_adding.
PAGES = [ROOT / "README.md", *(page for page in (ROOT / "docs").glob("*.md") if page.stem != "architecture")]


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


@pytest.mark.slow
def test_every_example_gives_what_it_says(scored_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but that of ``train``, which tests of whole runs show; those of the pages, too."""
    corpus = Path(str(fvc.open_run(scored_run.root).parameters["corpus"]))
    (tmp_path / "corpus").symlink_to(corpus)
    for name in ("video.mp4", "a.mp4", "b.mp4", "one.mp4", "two.mp4", "suspicious.mp4"):
        shutil.copy(corpus / read_table(scored_run.index, INDEX)["path"][0], tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FVC_RUNS_DIR", str(scored_run.root.parent.parent))
    monkeypatch.setenv("FVC_CACHE_DIR", str(tmp_path / "cache"))
    examples = doctest.DocTestFinder().find(public, globs={"fvc": fvc})
    tried = [doctest.DocTestRunner().run(example) for example in examples if example.examples]
    assert len(tried) >= 9
    assert sum(result.failed for result in tried) == 0

    blocks = [code for page in PAGES for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)]
    trained = 'fvc.train("my_videos", model="probe:efficientnet_lite0")'
    same = np.eye(12, dtype=np.float32)
    for code in blocks:
        names = {"video_embeddings": same, "text_embeddings": same, "pairs": np.arange(24).reshape(12, 2) // 2}
        exec(code.replace("bundle_RUN", str(scored_run.root)).replace(trained, "fvc.open_run('latest')"), names)
    assert len(blocks) >= 6
