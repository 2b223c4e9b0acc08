from __future__ import annotations

import pytest

from benchmarks.decode.peers import DECORD, DEMUXING, FLOOR, OURS, TORCHCODEC
from benchmarks.decode.report import targets_table, whole_report
from benchmarks.decode.results import Case, CpuCost, FloorCount, Footprint, PeakMemory, Results, Throughput
from benchmarks.decode.targets import MEBIBYTE, cpu_ratios, verdicts

GOP_250 = Case("1080p h264 GOP 250", 6, 112)
SHORT, LONG = Case("360p h264 10 s", 8, 112), Case("360p h264 1 h", 8, 112)


def cost(case, peer, *seconds, difference=1.0, wrong_frames=0):
    return CpuCost(case, peer, seconds, difference, wrong_frames)


def results(**measured):
    return Results(absent={}, versions={"av": "1"}, **measured)


def verdict_of(measured, words):
    return next(verdict for verdict in verdicts(measured) if all(word in verdict.what for word in words))


def test_a_ratio_is_the_median_of_rounds_side_by_side_and_the_least_is_reported_beside_it():
    measured = results(cpu=[cost(GOP_250, OURS, 1.0, 9.0, 1.2), cost(GOP_250, TORCHCODEC, 4.0, 18.0, 1.5)])
    assert cpu_ratios(measured, TORCHCODEC, lambda case: True) == {GOP_250: pytest.approx(0.5)}
    row = next(line for line in whole_report(measured).splitlines() if f"| {TORCHCODEC} " in line)
    assert [cell.strip() for cell in row.split("|")][5:9] == ["4.000", "1.500", "0.50", "0.67"]


@pytest.mark.parametrize("flaw", [{"difference": 40.0}, {"wrong_frames": 1}])
def test_a_peer_that_gave_other_frames_is_no_measure_and_is_marked(flaw):
    measured = results(cpu=[cost(GOP_250, OURS, 1.0), cost(GOP_250, TORCHCODEC, 0.1, **flaw)])
    assert cpu_ratios(measured, TORCHCODEC, lambda case: True) == {}
    assert "other frames" in whole_report(measured)


def test_every_part_has_its_verdict():
    def passes(peer, how, workers, seconds):
        return Throughput(peer, how, workers, 60, (seconds,), (seconds,), 0.0, 0)

    measured = results(
        cpu=[
            cost(GOP_250, OURS, 1.0), cost(GOP_250, TORCHCODEC, 2.0),
            cost(GOP_250, DECORD, 2.0), cost(GOP_250, FLOOR, 0.9),
        ],
        floor=[FloorCount(GOP_250, 129, 250)],
        memory=[
            PeakMemory(GOP_250, OURS, 30 * MEBIBYTE), PeakMemory(GOP_250, TORCHCODEC, 50 * MEBIBYTE),
            PeakMemory(SHORT, OURS, 10 * MEBIBYTE), PeakMemory(SHORT, DEMUXING, 5 * MEBIBYTE),
            PeakMemory(LONG, OURS, 15 * MEBIBYTE), PeakMemory(LONG, DEMUXING, 9 * MEBIBYTE),
        ],
        throughput=[
            passes(OURS, "threads", 1, 10.0), passes(TORCHCODEC, "threads", 1, 16.0),
            passes(OURS, "threads", 2, 5.0), passes(TORCHCODEC, "threads", 2, 9.0),
        ],
        scaling=[passes(OURS, "threads", 1, 10.0), passes(OURS, "threads", 2, 5.0), passes(OURS, "processes", 2, 8.0)],
        footprint=Footprint(79 * MEBIBYTE, False, (1_000_000, 30_000_000, 22_000_000)),
    )  # fmt: skip
    found = [
        (["1080p h264", "any number"], 30, True),
        (["imports of torchcodec"], 0.6, False),
        (["necessary packets"], 1 / 0.9, False),
        ([f"CPU time of {DECORD}"], 0.5, True),
        (["mixed corpus", "on 1 thread"], 1.6, True),
        (["mixed corpus", "on 2 thread"], 1.8, False),
        (["per core, threads"], 1.0, True),
        (["per core, processes"], 0.625, False),
        (["10 s to 1 h"], 1, True),
        (["whole process"], 79, True),
        (["imports of torch by"], 0, True),
        (["200 decodes"], 21, False),
    ]
    for words, value, met in found:
        verdict = verdict_of(measured, words)
        assert (verdict.measured, verdict.met) == (pytest.approx(value), met), words
    table = targets_table(measured)
    assert table.count("**missed**") == sum(not met for *_, met in found)
    assert "129 of 250 packets" in whole_report(measured)
