"""A stage's memory samples and events, on one clock that only goes forward.

The wall clock may jump, and the sampler's own clock starts again whenever a killed stage is resumed. So time is summed
up from one line to the next: by the sampler's clock where it was written, else by the wall clock's steps forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from fvc_lib.analysis.read.logs import EVENT_LINES, MEMORY_LINES, read_log_lines
from fvc_lib.analysis.read.records import Answer, LogFile
from fvc_lib.analysis.read.sql import ask

_WALL_CLOCK = "coalesce(try_cast(timestamp AS DOUBLE), epoch(try_cast(timestamp AS TIMESTAMPTZ)))"
_EVENT_NUMBERS = (
    "asked_mb", "used_mb", "budget_mb", "predicted_peak_mb", "measured_step_mb", "baseline_mb", "usage_percent",
)  # fmt: skip
_EVENT_COUNTS = (
    "micro_batch", "micro_batch_before", "micro_batch_next", "micro_batch_planned", "to_step", "lost_steps",
)  # fmt: skip


def read_samples(files: Sequence[LogFile]) -> Answer:
    """The memory samples of ``files`` (``memory/<stage>.jsonl``) in file and line order.

    Returns:
        ``run_id stage fold attempt seconds line`` and the columns of the memory log, of which any but the time may be
        null. ``attempt`` counts from 1 how often the stage was started; ``seconds`` never decreases: time at work in
        this and all earlier attempts, without the pauses between them. A log from before there was a sampler's clock
        starts at its first sample and knows one attempt.
    """
    lines = read_log_lines(files, MEMORY_LINES)
    query = f"""
        WITH stamped AS (SELECT *, {_WALL_CLOCK} AS at_seconds FROM lines),
        beside AS (
            SELECT *, lag(elapsed_seconds) OVER written AS elapsed_before, lag(at_seconds) OVER written AS at_before,
                   lag(phase) OVER written AS phase_before, row_number() OVER written AS position
            FROM stamped WINDOW written AS (PARTITION BY file_number ORDER BY line)
        ), judged AS (
            -- A clock that began anew shows less than before; or, after an attempt that was over at once, another start
            -- in a phase that no training comes back to (after measuring beforehand a stage goes on setting up).
            SELECT *, elapsed_seconds IS NOT NULL AND (
                elapsed_before IS NULL OR elapsed_seconds < elapsed_before
                OR (phase = 'setup' AND phase_before NOT IN ('setup', 'fits', 'batch_size_sweep', 'preflight')
                    AND abs(at_seconds - elapsed_seconds - at_before + elapsed_before) > 0.005)
            ) AS clock_began
            FROM beside
        ), moved AS (
            SELECT *, CASE WHEN elapsed_seconds IS NULL THEN greatest(coalesce(at_seconds - at_before, 0), 0)
                           WHEN clock_began THEN elapsed_seconds ELSE elapsed_seconds - elapsed_before END AS moved
            FROM judged
        )
        SELECT run_id, stage, file_fold AS fold,
               CAST(1 + sum(CASE WHEN clock_began AND position > 1 THEN 1 ELSE 0 END) OVER so_far AS BIGINT) AS attempt,
               sum(moved) OVER so_far AS seconds,
               line, {", ".join(MEMORY_LINES.columns)}
        FROM moved WINDOW so_far AS (PARTITION BY file_number ORDER BY line)
        ORDER BY run_id, stage, fold, file_number, line
    """
    return Answer(ask(query, {"lines": lines.frame}), lines.notes)


def read_events(files: Sequence[LogFile], samples: pl.DataFrame) -> Answer:
    """The memory events of ``files`` (``memory/events/<stage>.jsonl``) on the clock of the stages' samples.

    An event's attempt is the one whose clock began at the same moment; without samples its own clock counts.

    Args:
        files: the event logs.
        samples: of the same stages, as ``read_samples`` gives them.

    Returns:
        ``run_id stage fold attempt seconds line phase epoch batch_idx global_step kind message details happened_in
        context_file device`` and, null where the event has none, the numbers of its details: megabytes, ``micro_batch``
        and the like. ``details`` is JSON text.
    """
    lines = read_log_lines(files, EVENT_LINES)
    texts = ", ".join(
        f"details->>'$.{name}' AS {column}"
        for name, column in (("where", "happened_in"), ("context_file", "context_file"), ("device", "device"))
    )
    numbers = [f"try_cast(details->>'$.{name}' AS DOUBLE) AS {name}" for name in _EVENT_NUMBERS]
    numbers += [f"try_cast(details->>'$.{name}' AS BIGINT) AS {name}" for name in _EVENT_COUNTS]
    query = f"""
        WITH stamped AS (SELECT *, {_WALL_CLOCK} AS at_seconds FROM lines),
        sampled AS (
            SELECT run_id, stage, fold, attempt, seconds - elapsed_seconds AS offset_seconds,
                   {_WALL_CLOCK} - elapsed_seconds AS began_at, {_WALL_CLOCK} - seconds AS stage_began_at FROM samples
        ), clocks AS (
            SELECT run_id, stage, fold, attempt, round(began_at, 3) AS began_at, min(offset_seconds) AS offset_seconds,
                   min(stage_began_at) AS stage_began_at
            FROM sampled GROUP BY ALL
        ), matched AS (
            SELECT stamped.*, clocks.attempt, offset_seconds, stage_began_at
            FROM stamped LEFT JOIN clocks ON stamped.run_id = clocks.run_id AND stamped.stage = clocks.stage
                                         AND stamped.file_fold IS NOT DISTINCT FROM clocks.fold
            QUALIFY row_number() OVER (
                PARTITION BY file_number, line
                ORDER BY abs(at_seconds - elapsed_seconds - began_at) NULLS LAST, clocks.attempt DESC
            ) = 1
        )
        SELECT run_id, stage, file_fold AS fold, coalesce(attempt, 1) AS attempt,
               coalesce(elapsed_seconds + coalesce(offset_seconds, 0), greatest(at_seconds - stage_began_at, 0), 0)
                   AS seconds,
               line, phase, epoch, batch_idx, global_step, kind, coalesce(message, '') AS message,
               CAST(details AS VARCHAR) AS details, {texts}, {", ".join(numbers)}
        FROM matched ORDER BY run_id, stage, fold, file_number, line
    """
    return Answer(ask(query, {"lines": lines.frame, "samples": samples}), lines.notes)
