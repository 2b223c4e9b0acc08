"""How many samples are in memory at once, step by step: backing off, climbing back, and repeating an earlier training.

Every change is recorded with its step. Rounding depends on how a batch was split, so a training repeats to the bit
only under the same changes; given them, it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class MicroBatchChange:
    """From here on ``micro_batch`` samples at once.

    Attributes:
        step: effective batches consumed before it.
        validation_sample: None in training; in the validation pass after ``step``, from this sample (0-based) to the
            end of that pass.
    """

    step: int
    micro_batch: int
    validation_sample: int | None = None


@dataclass
class MicroBatchPlan:
    """The micro-batch of every step. It begins as planned, is lowered by shortages of memory, and may climb back.

    Attributes:
        planned: what a training without shortage uses throughout.
        recovery_steps: after so many steps without shortage a lowered one is doubled; 0: never. A climb that fails
            doubles the wait, so that trying costs less and less.
        replay: the changes of an earlier training, to be made at the same places.
        current: of the next step.
        changes: all changes so far, the plan itself first.
        quiet_steps: steps since the last change.
        wait_steps: quiet steps before the next climb.
        climbed: whether the last change was a climb.
    """

    planned: int
    recovery_steps: int = 0
    replay: Sequence[MicroBatchChange] = ()
    current: int = 0
    changes: list[MicroBatchChange] = field(default_factory=list)
    quiet_steps: int = 0
    wait_steps: int = 0
    climbed: bool = False

    def __post_init__(self) -> None:
        if not self.changes:
            self.current, self.wait_steps = self.planned, self.recovery_steps
            self.changes = [MicroBatchChange(0, self.planned)]

    def at_step(self, step: int) -> int:
        """What step ``step`` begins with; climbs where that is due."""
        if self.replay:
            due = [change for change in self.replay if change.validation_sample is None and change.step <= step]
            if due and due[-1].micro_batch != self.current:
                self._change(step, due[-1].micro_batch)
        elif self.recovery_steps and self.current < self.planned and self.quiet_steps >= self.wait_steps:
            self._change(step, min(2 * self.current, self.planned))
            self.climbed = True
        return self.current

    def fitted(self, step: int, micro_batch: int) -> bool:
        """Step ``step`` was done with ``micro_batch``; returns whether that was a back-off."""
        if micro_batch >= self.current:
            self.quiet_steps += 1
            if self.climbed and self.quiet_steps >= self.wait_steps:
                self.climbed, self.wait_steps = False, self.recovery_steps
            return False
        if self.climbed:
            self.wait_steps *= 2
        self._change(step, micro_batch)
        return True

    def in_validation(self, step: int, sample: int) -> int:
        """What the validation pass after ``step`` uses from ``sample`` on, at most."""
        changes = self.replay or self.changes
        here = [change for change in changes if change.step == step and change.validation_sample is not None]
        due = [change for change in here if (change.validation_sample or 0) <= sample]
        return due[-1].micro_batch if due else self.current

    def fitted_in_validation(self, step: int, sample: int, micro_batch: int) -> None:
        """In the validation pass after ``step`` memory sufficed only for ``micro_batch`` from ``sample`` on."""
        self.changes.append(MicroBatchChange(step, micro_batch, sample))

    def to_document(self) -> dict[str, Any]:
        """Numbers and lists, for a checkpoint."""
        return {
            "planned": self.planned,
            "recovery_steps": self.recovery_steps,
            "current": self.current,
            "changes": [[c.step, c.micro_batch, c.validation_sample] for c in self.changes],
            "quiet_steps": self.quiet_steps,
            "wait_steps": self.wait_steps,
            "climbed": self.climbed,
        }

    def resumed(self, document: dict[str, Any], step: int) -> str | None:
        """Go on from ``to_document`` at ``step``; returns what was planned otherwise then, if it was.

        A lower plan than then is a remedy for memory that ended, and takes effect; a higher one would undo a back-off.
        """
        self.current = document["current"]
        self.changes = [MicroBatchChange(*change) for change in document["changes"]]
        self.quiet_steps, self.climbed = document["quiet_steps"], document["climbed"]
        same = document["recovery_steps"] == self.recovery_steps
        self.wait_steps = document["wait_steps"] if same else self.recovery_steps
        if self.current > self.planned:
            self._change(step, self.planned)
        then = document["planned"]
        return f"micro-batch {then} -> {self.planned} planned" if then != self.planned else None

    def _change(self, step: int, micro_batch: int) -> None:
        self.current = micro_batch
        self.changes.append(MicroBatchChange(step, micro_batch))
        self.quiet_steps, self.climbed = 0, False
