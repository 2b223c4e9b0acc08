"""What a command asks to be done, beside parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fvc_lib.services.errors import UsageError

Executor = Literal["local", "slurm"]


@dataclass(frozen=True)
class Wanted:
    """The options of the command line that say what to do, by their names there (``start`` is ``--from``)."""

    experiment: str | None = None
    resume: str | None = None
    fork: bool = False
    only: str | None = None
    start: str | None = None
    force: tuple[str, ...] = ()
    tasks: tuple[str, ...] | None = None
    jobs: int = 1
    executor: Executor = "local"
    one_job: bool = False

    @property
    def of_a_run(self) -> bool:
        """Whether it is about a run that is there already."""
        return any(given is not None for given in (self.resume, self.only, self.start)) or bool(self.force)

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            UsageError: options that exclude or need each other.
        """
        for name, given in (("--resume", self.resume), ("--only", self.only), ("--from", self.start)):
            if given == "":  # an empty variable of a script, which must not begin a run of its own
                raise UsageError(f"{name}: got nothing, wanted {'a run' if name == '--resume' else 'a stage'}.")
        if self.tasks is not None and not self.tasks:
            raise UsageError("--tasks: got nothing, wanted keys or stages, for example 04_fold_training_fold_2.")
        chosen = [name for name, given in (("--only", self.only), ("--from", self.start)) if given]
        if len(chosen) > 1 or (self.only and self.force):
            raise UsageError(f"{' and '.join([*chosen, *(['--force'] * bool(self.force))])} exclude each other.")
        if self.fork and not self.resume:
            raise UsageError("--fork starts a new run from another one. Name that run: --resume RUN --fork.")
        if self.tasks and (not self.resume or self.fork or chosen or self.force):
            raise UsageError("--tasks works on a part of one run beside other jobs: --resume RUN --tasks KEY[,KEY].")
        if self.executor == "slurm" and self.tasks:
            raise UsageError("--tasks is what a submitted job itself is started with; leave --executor slurm out.")
        if self.one_job and self.executor != "slurm":
            raise UsageError("--one-job says how to submit: give --executor slurm as well.")
