"""``run.json``: what was asked, and that a resume elsewhere no longer claims to be bit for bit the same."""

import hashlib
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from fvc_lib.execution.run import record as run_record
from fvc_lib.execution.run.record import CodeState, begin_run, record_corpus, record_resumption, run_hash
from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.parameters import run_config
from fvc_lib.services.records.digests import run_damage, write_document
from fvc_lib.services.run_paths import RunPaths


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(runs_dir=str(tmp_path / "runs"))


@pytest.fixture
def run(config: RunConfig) -> RunPaths:
    return begin_run(config, command="first")


def record_of(run: RunPaths) -> dict[str, Any]:
    return json.loads(run.run_json.read_text())


@pytest.mark.fault(40)
@pytest.mark.parametrize("name", ["run.json", "params.yaml"])
def test_a_flipped_bit_of_the_record_or_the_parameters_is_refused_by_name(run, config, name):
    path, chance = run.root / name, random.Random(name)
    whole = path.read_bytes()
    assert run_damage(run.root) == []
    key = whole.find(b'"document_sha256"')  # under another name the digest checks nothing, and nothing else is wrong
    places = [place for place in range(len(whole)) if not key <= place < key + 17]
    for _ in range(10):
        place, bit = chance.choice(places), 1 << chance.randrange(8)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        with pytest.raises(DataError, match=re.escape(str(path))):
            run_config(run.params_yaml) if name == "params.yaml" else record_resumption(run, config, command="second")
        assert any(str(path) in each for each in run_damage(run.root))
    path.write_bytes(whole)
    assert run_damage(run.root) == []


@pytest.mark.fault(40)
def test_parameters_are_whole_whichever_file_a_kill_left_when_a_resumption_changed_them(run, config):
    before = run.params_yaml.read_bytes()
    record_resumption(run, config.model_copy(update={"num_workers": 1}), command="second")
    assert run_config(run.params_yaml).num_workers == 1
    run.params_yaml.write_bytes(before)  # killed before it was replaced
    assert run_damage(run.root) == []
    assert run_config(run.params_yaml).num_workers == config.num_workers


@pytest.mark.fault(29)
@pytest.mark.parametrize(
    ("path", "before", "name"),
    [
        ("versions.torch", "2.12.0", "torch"),
        ("hardware.cores", 999, "threads"),
        ("hardware.omp_num_threads", "7", "threads"),
        ("hardware.processor", "Pentium", "processor"),
    ],
)
def test_another_version_processor_or_number_of_threads_is_told_and_ends_the_claim(
    run, config, monkeypatch, path, before, name
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    record, (section, field) = record_of(run), path.split(".")
    record["attempts"][-1]["hardware"]["omp_num_threads"] = None
    record["attempts"][-1][section][field] = before  # it ran elsewhere
    write_document(run.run_json, record)
    clauses = record_resumption(run, config, command="second")
    assert [clause.split(" ")[0] for clause in clauses] == [name]
    assert f"{name} {before} -> " in clauses[0]
    record = record_of(run)
    assert record["bit_equal_resume"] is False
    assert list(record["attempts"][1]["differs"]) == [name]


@pytest.mark.fault(29)
def test_jobs_are_compared_with_jobs_and_not_with_the_login_node(config, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    run = begin_run(config, command="--executor slurm", state="waiting", submits=True)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    for number in range(2):  # a job, and the same one requeued
        assert record_resumption(run, config, command=f"--tasks, {number}") == []
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    assert record_resumption(run, config, command="--resume RUN --executor slurm", submits=True) == []
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert record_resumption(run, config, command="--tasks") == []
    record = record_of(run)
    assert "bit_equal_resume" not in record
    assert [attempt for attempt in record["attempts"] if "differs" in attempt] == []

    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert record_resumption(run, config, command="--tasks") == ["threads 4 -> 2"]
    assert record_of(run)["bit_equal_resume"] is False


@pytest.mark.parametrize("content", ["", "[]", '{"attempts": [{}]}'])
def test_a_broken_record_is_named(run, config, content):
    run.run_json.write_text(content)
    with pytest.raises(DataError, match=r"run\.json: not a run's record"):
        record_resumption(run, config, command="second")


def _corpus(folder, **files):
    for name, content in {"real/a.mp4": "a", "fake/b.mp4": "bb", **files}.items():
        write_text(folder / name, content)
    return folder


def _hash_of(config, corpus, **values):
    return run_hash(config.model_copy(update={"corpus": str(corpus), **values}))


def test_the_runs_hash_tells_corpora_apart_and_not_where_they_lie(config, tmp_path):
    first = _hash_of(config, _corpus(tmp_path / "one" / "clips"))
    run = begin_run(config.model_copy(update={"corpus": str(tmp_path / "one" / "clips")}), command="test")
    assert record_of(run)["config_hash"] == first
    assert run.run_id.endswith(first[:8])
    assert first == _hash_of(config, _corpus(tmp_path / "two" / "clips"))
    (tmp_path / "two/clips/.DS_Store").write_text("looked at")
    os.utime(tmp_path / "two/clips/real/a.mp4", (1, 1))
    assert first == _hash_of(config, tmp_path / "two" / "clips")
    others = [
        _hash_of(config, _corpus(tmp_path / "one" / "others")),
        _hash_of(config, _corpus(tmp_path / "three" / "clips", **{"real/c.mp4": "c"})),
        _hash_of(config, _corpus(tmp_path / "four" / "clips", **{"real/a.mp4": "longer"})),
        _hash_of(config, ""),
    ]
    others += [_hash_of(config, "", task=task) for task in ("image", "video_text")]
    assert len({first, *others}) == 1 + len(others)


def test_the_corpus_is_recorded_with_a_fingerprint_of_its_contents_once_it_is_indexed(config, tmp_path):
    run = begin_run(config.model_copy(update={"corpus": str(_corpus(tmp_path / "here" / "clips"))}), command="test")
    assert record_of(run)["corpus"].keys() == {"name", "listing_sha256"}
    run.tables.mkdir()
    for path in (run.images, run.video_texts, run.index):  # one table per kind of task; only the last names corpora
        found = []
        for contents in (["b" * 64, "a" * 64, "a" * 64], ["a" * 64, "b" * 64], ["c" * 64]):
            names = {"corpus": ["two", "one", "two"][: len(contents)]} if path == run.index else {}
            pl.DataFrame({"content_sha256": contents, **names}).write_parquet(path)
            record_corpus(run)
            found.append(record_of(run)["corpus"])
            assert found[-1].get("corpora", []) == sorted(set(names.get("corpus", [])))
        assert found[0] == found[1]
        assert found[0]["name"] == "clips"
        assert found[2]["fingerprint"] != found[0]["fingerprint"]
        path.unlink()


def test_changed_code_leaves_its_patch_and_other_code_on_resume_is_recorded(config, monkeypatch):
    """The checkout is git's business (test_code_state); here: what becomes of what git said."""
    codes = iter([CodeState("abc", True, b"one"), CodeState("abc", True, b"two")])
    monkeypatch.setattr(run_record, "code_state", lambda: next(codes))
    run = begin_run(config, command="first")
    assert run.code_patch.read_bytes() == b"one"
    assert record_resumption(run, config, command="second") == []
    record = record_of(run)
    digests = [hashlib.sha256(content).hexdigest() for content in (b"one", b"two")]
    assert [attempt["code"]["patch_sha256"] for attempt in record["attempts"]] == digests
    assert record["attempts"][1]["code_differs"] == {"patch_sha256": digests}
    assert record["repeat"][:2] == ["git checkout abc", f"git apply --whitespace=nowarn {run.code_patch}"]
