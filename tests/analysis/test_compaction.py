import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fvc_lib.analysis.read import logs as compaction
from fvc_lib.analysis.read import queries
from fvc_lib.analysis.read.logs import compact_metrics, read_compacted
from fvc_lib.analysis.read.records import Answer, log_files
from fvc_lib.services.atomic_files import write_json
from fvc_lib.services.metric_log import MetricLog
from fvc_lib.services.run_paths import RunPaths


def is_believed(run: RunPaths) -> bool:
    return read_compacted(run, log_files(run, "metrics")).frame is not None


def from_logs(run: RunPaths, **wanted: list) -> Answer:
    content = run.compacted_metrics.read_bytes()
    run.compacted_metrics.unlink()
    answer = queries.learning_curves([run], **wanted)
    run.compacted_metrics.write_bytes(content)
    return answer


def tear(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"{torn")


def same(first: Answer, second: Answer) -> bool:
    return first.frame.equals(second.frame, null_equal=True) and first.notes == second.notes


def line(**changes: object) -> bytes:
    row = {"ts": 1.5, "step": 1, "epoch": 0, "phase": "train", "metric": "loss", "value": 0.25, "flag": None}
    return json.dumps({**row, "fold": None, "attempt": None, **changes}).encode()


LINES = st.one_of(
    st.builds(
        line,
        step=st.integers(-3, 5),
        phase=st.sampled_from(["train", "Test", "é'"]),
        metric=st.sampled_from(["loss", "a\"b'; DROP TABLE lines", "<script>", ""]),
        value=st.one_of(st.none(), st.floats(-1e300, 1e300), st.integers(-5, 5)),
        flag=st.sampled_from([None, "nan", "-inf", "foreign"]),
        fold=st.sampled_from([None, 0, 3]),
        attempt=st.sampled_from([None, 1, 2]),
    ),
    st.sampled_from([b"", b"{torn", b"\0\0", b"[1]", b"\xff", line(step=2) + line(step=3), b"   "]),
)


@given(
    st.dictionaries(
        st.sampled_from(["s_fold_0", "s_fold_10", "s_fold_2", "s", "t"]), st.lists(LINES, max_size=12), min_size=1
    )
)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_answers_are_the_same_with_and_without_it(tmp_path: Path, logs: dict[str, list[bytes]]) -> None:
    shutil.rmtree(tmp_path / "e", ignore_errors=True)
    run = RunPaths(tmp_path / "e" / "run_x")
    run.metrics("s").parent.mkdir(parents=True)
    for name, lines in logs.items():
        (run.root / "metrics" / f"{name}.jsonl").write_bytes(b"\n".join(lines))
    write_json(run.status_json, {"state": "done"})
    assert compact_metrics(run)
    assert is_believed(run)
    assert same(queries.learning_curves([run]), from_logs(run))
    narrow = {"metrics": ["loss", "<script>"], "folds": [0], "phases": ["train"]}
    assert same(queries.learning_curves([run], **narrow), from_logs(run, **narrow))


def test_runs_with_and_without_it_stand_in_one_answer_in_the_order_of_their_names(
    make_run: Callable[..., RunPaths],
) -> None:
    runs = [make_run(name=f"run_2025030{day}_000000_abcdef01", seed=day % 2) for day in range(4)]
    tear(runs[2].metrics("04_fold_training", 1))
    tear(runs[3].metrics("04_fold_training", 1))
    from_all_logs = queries.learning_curves(runs)
    assert compact_metrics(runs[1])
    assert compact_metrics(runs[3])
    assert same(queries.learning_curves(runs), from_all_logs)
    assert same(queries.learning_curves(runs[::-1]), from_all_logs)
    assert "2 lines of 2,802" in from_all_logs.notes[0]


@pytest.mark.parametrize("state", ["running", "interrupted", "requeue", "waiting", "by hand", "", None])
def test_a_run_that_is_not_finished_is_left_alone(run: RunPaths, state: str | None) -> None:
    write_json(run.status_json, {} if state is None else {"state": state})
    assert not compact_metrics(run)
    assert not run.compacted_metrics.exists()


def test_a_run_with_a_stage_at_work_is_left_alone_whatever_the_run_says(run: RunPaths) -> None:
    write_json(run.status_json, {"state": "failed", "stages": {}})
    run.task_lock("04_fold_training", 1).parent.mkdir()
    run.task_lock("04_fold_training", 1).write_text(json.dumps({"host": "elsewhere"}))
    run.task_status("04_fold_training", 1).parent.mkdir()
    write_json(run.task_status("04_fold_training", 1), {"state": "running"})
    assert not compact_metrics(run)
    write_json(run.task_status("04_fold_training", 1), {"state": "failed"})
    assert compact_metrics(run)


def test_a_run_without_logs_or_with_one_that_cannot_be_read_is_left_alone(run: RunPaths) -> None:
    (run.root / "metrics" / "gone.jsonl").symlink_to("nowhere")
    assert not compact_metrics(run)
    shutil.rmtree(run.root / "metrics")
    assert not compact_metrics(run)
    assert not run.compacted_metrics.exists()


def grow(path: Path) -> None:
    with MetricLog(path, run_id="r", fold=0, attempt=2) as log:
        log.log(step=60, epoch=10, phase="train", metrics={"loss": float("nan"), "new": 1.0})


def edit_in_place(path: Path) -> None:
    times = path.stat()
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"step":7,', b'"step":8,', 1))
    assert path.stat().st_size == times.st_size
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def remove(path: Path) -> None:
    path.unlink()


def add(path: Path) -> None:
    grow(path.with_name("another_stage.jsonl"))


def rename(path: Path) -> None:
    path.rename(path.with_name("04_fold_training_fold_9.jsonl"))


@pytest.mark.parametrize("change", [grow, edit_in_place, remove, add, rename])
@pytest.mark.parametrize("settled", [True, False])
def test_it_is_not_believed_once_a_log_is_not_what_it_was(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], settled: bool
) -> None:
    if settled:
        monkeypatch.setattr(compaction, "_SETTLED_NS", -(10**12))
    assert compact_metrics(run)
    before = queries.learning_curves([run]).frame
    change(run.metrics("04_fold_training", 0))
    assert not is_believed(run)
    after = queries.learning_curves([run])
    assert same(after, from_logs(run))
    assert change is rename or not after.frame.equals(before)  # its lines say which fold they are of
    assert compact_metrics(run)
    assert is_believed(run)
    assert same(queries.learning_curves([run]), after)


def test_a_copied_run_is_believed_by_content_and_has_its_own_name(run: RunPaths) -> None:
    assert compact_metrics(run)
    copy = RunPaths(run.root.with_name("run_20260101_000000_copy"))
    shutil.copytree(run.root, copy.root, copy_function=shutil.copyfile)
    assert is_believed(copy)
    assert queries.learning_curves([copy]).frame["run_id"].unique().to_list() == [copy.run_id]
    foreign = RunPaths(run.root.with_name("run_20260101_000001_other"))
    shutil.copytree(run.root, foreign.root)
    grow(foreign.metrics("04_fold_training", 3))
    assert not is_believed(foreign)


def test_logs_that_nobody_touched_are_believed_without_being_read(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = time.time_ns() + 3_000_000_000
    monkeypatch.setattr(compaction.time, "time_ns", lambda: old)
    assert compact_metrics(run)
    monkeypatch.setattr(compaction, "sha256_of_file", lambda path: pytest.fail(f"{path} was read"))
    assert is_believed(run)


def test_a_log_written_a_moment_before_is_told_by_its_content(run: RunPaths) -> None:
    grow(run.metrics("04_fold_training", 0))
    assert compact_metrics(run)
    read: list[Path] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compaction, "sha256_of_file", lambda path: read.append(path) or "")
        assert not is_believed(run)
    assert read


@pytest.mark.fault(24)
def test_no_flipped_bit_changes_an_answer(run: RunPaths) -> None:
    for fold in range(1, 5):
        run.metrics("04_fold_training", fold).unlink()
    tear(run.metrics("04_fold_training", 0))
    assert compact_metrics(run)
    truth = from_logs(run)
    content = run.compacted_metrics.read_bytes()
    for position in range(0, len(content), len(content) // 12):
        flipped = bytearray(content)
        flipped[position] ^= 1 << (position % 8)
        run.compacted_metrics.write_bytes(flipped)
        answer = queries.learning_curves([run])
        assert answer.frame.equals(truth.frame, null_equal=True), position
        assert answer.notes[1:] == truth.notes, position
        assert "damaged or foreign" in answer.notes[0], position


def test_one_of_other_columns_is_not_mixed_with_logs_however_well_it_is_sealed(
    run: RunPaths, make_run: Callable[..., RunPaths]
) -> None:
    assert compact_metrics(run)
    found = read_compacted(run, log_files(run, "metrics")).frame
    assert found is not None
    told = json.loads(parquet.read_metadata(run.compacted_metrics).metadata[compaction._KEY.encode()])
    compaction._write(run, found.drop("ts"), told["sources"])
    answer = queries.learning_curves([run, make_run(name="run_of_logs")])
    assert answer.frame.height == 1400
    assert "damaged or foreign (its columns are not those of curves)" in answer.notes[0]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1PAR1", b"\0" * 5000, None])
def test_a_damaged_or_foreign_one_is_noted_and_the_logs_are_read(run: RunPaths, content: bytes | None) -> None:
    truth = queries.learning_curves([run]).frame
    if content is None:
        parquet.write_table(truth.to_arrow(), run.compacted_metrics)
    else:
        run.compacted_metrics.write_bytes(content)
    answer = queries.learning_curves([run])
    assert answer.frame.equals(truth, null_equal=True)
    assert "compacted.parquet is damaged or foreign" in answer.notes[0]
    assert compact_metrics(run)
    assert queries.learning_curves([run]).notes == ()


def test_a_disk_that_does_not_take_it_costs_nothing_but_the_time(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compaction, "write_bytes", full)
    assert not compact_metrics(run)
    assert sorted(path.suffix for path in (run.root / "metrics").iterdir()) == [".jsonl"] * 5


def test_the_logs_stay(run: RunPaths) -> None:
    before = {path.name: path.read_bytes() for path in (run.root / "metrics").iterdir()}
    assert compact_metrics(run)
    after = {path.name: path.read_bytes() for path in (run.root / "metrics").iterdir()}
    assert {name: content for name, content in after.items() if name != run.compacted_metrics.name} == before
