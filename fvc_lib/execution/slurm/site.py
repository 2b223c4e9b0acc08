"""``slurm/site.conf``: what one cluster wants to know. Read as text, never executed; the jobs' bash reads it too."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fvc_lib import CHECKOUT
from fvc_lib.services.errors import UsageError, did_you_mean

SITE_VARIABLE = "FVC_SITE"
_ASSIGNMENT = re.compile(r"([A-Z_]+)=(.*)", re.DOTALL)
_TIME = r"(\d+-)?\d+(:\d+){0,2}"


class Site(BaseModel):
    """The settings of ``site.conf``, which explains each. Memory in MiB; empty text and None: not asked for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    account: str = ""
    partition: str = ""
    partition_training: str = ""
    qos: str = ""
    time: str = Field("04:00:00", pattern=rf"^{_TIME}$")
    signal_seconds: int = Field(180, ge=1, le=65535)
    max_requeues: int = Field(20, ge=0)
    cpus: int = Field(2, ge=1)
    gpus: int = Field(0, ge=0)
    gpu_type: str = Field("", pattern=r"^[\w.-]*$")
    memory_headroom_percent: float = Field(25, ge=0, le=1000)
    memory_least: int = Field(1024, ge=1)
    memory_unknown: int = Field(4096, ge=1)
    memory: int | None = Field(None, ge=1)
    max_array_tasks: int | None = Field(None, ge=1)
    extra: tuple[str, ...] = ()
    setup: str = ""
    python: str = ""
    path: Path = CHECKOUT / "slurm" / "site.conf"

    @field_validator(
        "signal_seconds", "max_requeues", "cpus", "gpus", "memory_least", "memory_unknown", "memory",
        "max_array_tasks", mode="before",
    )  # fmt: skip
    @classmethod
    def _plain_digits(cls, value: object) -> object:
        """``1_0`` and ``20.0`` are whole numbers to Python, and to the jobs' bash they are errors."""
        if isinstance(value, str) and not re.fullmatch(r"\d+", value, flags=re.ASCII):
            raise ValueError("wanted a whole number in digits")
        return value

    @model_validator(mode="after")
    def _time_is_longer_than_the_warning(self) -> Site:
        if self.time_seconds <= self.signal_seconds:
            raise ValueError(
                f"TIME={self.time} is over before the signal that comes SIGNAL_SECONDS={self.signal_seconds} before "
                "its end: a job would requeue itself again and again. Give more time, or a later signal"
            )
        return self

    @property
    def time_seconds(self) -> int:
        """TIME, which SLURM reads as MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS."""
        days, dash, rest = self.time.rpartition("-")
        parts = [int(part) for part in rest.split(":")]
        if dash:
            hours, minutes, seconds = [*parts, 0, 0][:3]
        elif len(parts) == 3:
            hours, minutes, seconds = parts
        else:
            hours, (minutes, seconds) = 0, [*parts, 0][:2]
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def site_path(environ: Mapping[str, str] | None = None) -> Path:
    """The site file that counts: ``FVC_SITE``'s, else the checkout's."""
    environ = os.environ if environ is None else environ
    return Path(environ.get(SITE_VARIABLE) or CHECKOUT / "slurm" / "site.conf").absolute()


def read_site(path: Path | None = None) -> Site:
    """The settings in ``path``, else in the file that ``site_path`` finds.

    Raises:
        UsageError: the file is missing, a line is no plain ``KEY=value``, a key is unknown or a value out of range.
    """
    path = site_path() if path is None else path.absolute()
    try:
        text = path.read_bytes().decode()  # line ends as they are
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as a site file: {error}. See slurm/site.conf.") from error
    if "\r" in text:
        raise UsageError(f"{path}: has line ends of Windows, which bash takes for a part of each value. Take them out.")
    assigned = {key.lower(): value for key, value in _assignments(text, path).items()}
    for name in assigned:
        if name not in Site.model_fields or name == "path":
            known = [field.upper() for field in Site.model_fields if field != "path"]
            raise UsageError(f"{path}: unknown setting {name.upper()}.{did_you_mean(name.upper(), known)}")
    values = {name: value for name, value in assigned.items() if value}
    try:
        extra = _options(values.pop("extra", ""), path)
        return Site(**values, extra=extra, path=path)
    except ValidationError as error:
        problems = "; ".join(
            f"{str(item['loc'][0]).upper()}: got {item['input']!r}, {item['msg'].lower()}"
            if item["loc"]
            else item["msg"]
            for item in error.errors()
        )
        raise UsageError(f"{path}: {problems}.") from error


def _assignments(text: str, path: Path) -> dict[str, str]:
    """The ``KEY=value`` words of ``text`` as bash would assign them; whatever bash would do besides is refused."""
    if match := re.search(r"^\s*[A-Z_]+=[^\s'\"#]+#.*$", text, flags=re.MULTILINE):
        raise UsageError(f"{path}: got {match[0].strip()!r}; a value with # in it stands in single quotes.")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: dict[str, str] = {}
    try:
        for word in lexer:
            match = _ASSIGNMENT.fullmatch(word)
            if match is None:
                raise UsageError(
                    f"{path}: got {word!r}, wanted KEY=value; a value with spaces stands in single quotes."
                )
            found[match[1]] = match[2]
    except ValueError as error:
        raise UsageError(f"{path}: {error}: a quote is not closed before line {lexer.lineno}.") from error
    for key, value in found.items():
        if key != "SETUP" and re.search(r"[$`\n]|^~", value):  # bash might make something else of these
            raise UsageError(f"{path}: {key}: got {value!r}; only SETUP may hold $, `, ~ or several lines.")
    return found


def _options(text: str, path: Path) -> tuple[str, ...]:
    """Options of sbatch as ``--name`` or ``--name=value``, one each."""
    try:
        options = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{path}: EXTRA: {error} in {text!r}.") from error
    for option in options:
        if not re.match(r"--[a-z]", option):
            raise UsageError(f"{path}: EXTRA: got {option!r}, wanted long options of sbatch like --constraint=avx512.")
    return options
