"""Calls of SLURM's own commands, and what a failing one said."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from fvc_lib.services.errors import FvcError

_SECONDS = 60


class SlurmError(FvcError):
    """A command of SLURM's is missing, failed or does not answer; the message holds what it said. Exit code 2."""

    exit_code = 2


def has_command(name: str) -> bool:
    """Whether this machine has SLURM's command ``name``."""
    return shutil.which(name) is not None


def _stays(name: str) -> bool:
    """Not SQUEUE_FORMAT and the like, which change how a command answers, nor what a surrounding job was told."""
    if name.startswith("SLURM_"):
        return name in {"SLURM_CONF", "SLURM_CLUSTERS"}
    return not name.startswith(("SQUEUE_", "SACCT_"))


def output_of(command: Sequence[str]) -> str:
    """What ``command`` printed, without the last line's end.

    Raises:
        SlurmError: it is missing, failed, or gave no answer within a minute.
    """
    environ = {name: value for name, value in os.environ.items() if _stays(name)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=environ, timeout=_SECONDS, check=False
        )
    except FileNotFoundError as error:
        raise SlurmError(
            f"{command[0]}: not found. Run this where SLURM's commands are, or without --executor slurm."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{command[0]}: no answer within {_SECONDS} s. Is the cluster well? Try `sinfo`.") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or "nothing"
        raise SlurmError(f"{command[0]} failed with exit code {done.returncode} and said: {said}")
    return done.stdout.rstrip("\n")
