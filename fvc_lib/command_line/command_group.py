"""A group of commands whose failures are one clear line and the exit code that README's table explains."""

from __future__ import annotations

from typing import Any

import click

from fvc_lib.services.errors import FvcError

EXIT_CODES = (
    "Exit codes: 0 ok, 1 a cell failed, 2 usage, 3 data or leakage gate, 75 stopped and resumable, "
    "130/143 interrupted, 137 killed for memory, 138 the kernel died otherwise."
)


class Commands(click.Group):
    """Turns FVC's errors, and those of a disk, into a message; everything else is a bug and shows its traceback."""

    def invoke(self, context: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(context)
        except FvcError as error:
            click.echo(f"error: {error}", err=True)
            context.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            context.exit(130)
        except BrokenPipeError:  # who read this has seen enough (`status | head`); click knows what to do
            raise
        except OSError as error:
            where = error.filename or "a file"
            click.echo(f"error: {where}: {error.strerror}. Is there space, and may it be written?", err=True)
            for note in getattr(error, "__notes__", ()):
                click.echo(note, err=True)
            context.exit(1)
