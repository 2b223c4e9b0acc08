from pathlib import Path

from fvc_lib.execution.run.task import MemoryNews
from fvc_lib.services.stage_logs import MemorySampler


def test_what_a_stage_tells_of_its_memory_is_heard_once_and_as_it_comes(tmp_path: Path) -> None:
    told: set[str] = set()
    first, second = tmp_path / "events" / "a.jsonl", tmp_path / "events" / "b.jsonl"
    news = MemoryNews(first, told)
    assert list(news) == []  # no log yet
    with MemorySampler(tmp_path / "a.jsonl", events=first, interval_seconds=600) as memory:
        memory.event("policy", "memory policy: cpu", device="cpu")
        assert list(news) == ["memory policy: cpu"]
        memory.event("preflight", "micro-batch 8; lowered to 4")
        memory.event("preflight", "micro-batch 8; lowered to 4")
        assert list(news) == ["micro-batch 8; lowered to 4"]
    other = MemoryNews(second, told)
    with MemorySampler(tmp_path / "b.jsonl", events=second, interval_seconds=600) as memory:
        memory.event("policy", "memory policy: cpu", device="cpu")
        memory.event("near_limit", "at 93 %")
    assert list(other) == ["at 93 %"]
    assert list(news) == list(other) == []


def test_what_an_earlier_attempt_told_is_no_news_and_half_a_line_waits(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.write_bytes(b'{"message":"of yesterday"}\n')
    news = MemoryNews(log, set())
    with log.open("ab") as stream:
        stream.write(b'\0\0\n[1]\n{"message":3}\n{"message":"of ')
        stream.flush()
        assert list(news) == []
        stream.write(b'today"}\n')
    assert list(news) == ["of today"]
