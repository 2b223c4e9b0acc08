import csv
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fvc_lib.corpus.samples import videos as sample
from fvc_lib.corpus.samples.videos import generate_sample_corpus, plan_events


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows_of(manifest: Path) -> list[dict[str, str]]:
    with manifest.open(encoding="utf-8", newline="") as text:
        return list(csv.DictReader(text))


@pytest.fixture
def few_events(monkeypatch):
    """Two short events, so that writing and reuse are tested without generating everything."""
    events = sorted(plan_events(), key=lambda e: (e.label, len(e.clips) * e.num_frames * e.width))
    chosen = (events[0], next(event for event in events if event.label == "real" and len(event.clips) == 2))
    monkeypatch.setattr(sample, "plan_events", lambda: chosen)
    return chosen


@pytest.fixture
def made(monkeypatch):
    """The names of the events that were really made."""
    names = []

    def counting(event, make=sample.make_event):
        names.append(event.name)
        return make(event)

    monkeypatch.setattr(sample, "make_event", counting)
    return names


def test_missing_and_damaged_clips_are_made_again(few_events, made, tmp_path):
    manifest = generate_sample_corpus(tmp_path)
    whole = contents(tmp_path)
    damaged = tmp_path / few_events[1].clips[-1].path
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    manifest.write_text("path,label\n")
    (tmp_path / "note.txt").write_text("mine")
    made.clear()
    generate_sample_corpus(tmp_path)
    assert made == [few_events[1].name]
    assert contents(tmp_path) == {**whole, "note.txt": b"mine"}


def test_bytes_depend_neither_on_place_nor_on_threads_nor_on_hash_seed(few_events, tmp_path):
    here = [hashlib.sha256(content).hexdigest() for content in sample.make_event(few_events[1])]
    program = (
        "import hashlib, sys\n"
        "from fvc_lib.corpus.samples.videos import make_event\n"
        "from fvc_lib.corpus.samples.videos import plan_events\n"
        "event = next(e for e in plan_events() if e.name == sys.argv[1])\n"
        "print([hashlib.sha256(c).hexdigest() for c in make_event(event)])\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "2", "TZ": "Asia/Tokyo"}
    there = subprocess.run(
        [sys.executable, "-c", program, few_events[1].name],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert there.stdout.strip() == str(here)


def test_the_manifest_lists_every_clip_with_its_group_and_says_what_was_done(few_events, tmp_path):
    rows = rows_of(generate_sample_corpus(tmp_path))
    fake, real = few_events
    assert [row["path"] for row in rows] == [clip.path for event in few_events for clip in event.clips]
    assert {row["group"] for row in rows if row["label"] == "fake"} == {fake.name}
    assert {row["manipulation"] for row in rows} == {fake.manipulation, ""}
    assert [row["variant_of"] for row in rows if row["group"] == real.name] == ["", real.clips[0].path]
    assert "synthetic" in (tmp_path / "NOTICE.txt").read_text()
