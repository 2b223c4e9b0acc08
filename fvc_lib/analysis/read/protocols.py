"""Protocols in words: what a number is the mean of, and the leaks of an official split."""

from collections.abc import Mapping, Sequence

import polars as pl

from fvc_lib.analysis.wording import clean_text, count_text, number_text
from fvc_lib.services.errors import command_text
from fvc_lib.services.tasks import KFOLD, OFFICIAL, PROTOCOLS

_MOST_TARGETS = 12  # named in a sentence
OFFICIAL_LEAKS = "official_split_leaks"  # of tables.LEAKAGE_AUDIT
TARGET_SCOPE = "target:"  # of tables.RESULTS


def protocol_name(parameters: Mapping[str, object]) -> str:
    """Return the protocol of a run; ``kfold`` if its parameters name none."""
    name = parameters.get("protocol")
    return name if isinstance(name, str) and name in PROTOCOLS else KFOLD


def protocol_text(parameters: Mapping[str, object], corpora: Sequence[str] = ()) -> str:
    """Return the protocol of a run as text; empty for ``kfold``.

    ``cross_corpus`` is followed by its targets and, if ``corpora`` are given, the corpora of the training.
    """
    name, targets = protocol_name(parameters), parameters.get("target_corpora")
    if name == KFOLD:
        return ""
    tested = [str(target) for target in targets] if isinstance(targets, list | tuple) else []
    if not tested:
        return name
    trained = [corpus for corpus in corpora if _plain(corpus) not in set(map(_plain, tested))]
    parts = ((trained, "trained on"), (tested, "tested on"))
    return ", ".join([name, *(f"{use} {', '.join(map(clean_text, names))}" for names, use in parts if names)])


def _plain(name: str) -> str:
    """Return the letters and digits of a corpus's name in lower case, by which ``cross_corpus`` compares names."""
    return "".join(filter(str.isalnum, name.lower())) or name


def protocol_cautions(
    parameters: Mapping[str, object], results: pl.DataFrame, metric: str, corpora: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the caution that explains the protocol and gives each target's number; nothing for ``kfold``."""
    name = protocol_name(parameters)
    if name == KFOLD:
        return ()
    rows = results.filter(pl.col("scope").str.starts_with(TARGET_SCOPE), source="model", metric=metric)
    known = rows.sort("value", "scope", nulls_last=True).select("scope", "value").rows()
    numbers = [f"{clean_text(scope.removeprefix(TARGET_SCOPE))} {number_text(value)}" for scope, value in known]
    more = f" and {len(numbers) - _MOST_TARGETS} more" if len(numbers) > _MOST_TARGETS else ""
    mean = "".join(f" Target: {number}." for number in numbers)
    if len(numbers) > 1:
        counted = f"The number is the plain mean over {count_text(len(numbers), 'target')}, the worst first"
        mean = f" {counted}: {', '.join(numbers[:_MOST_TARGETS])}{more}."
    text = protocol_text(parameters, corpora)
    return (f"Protocol {text if ' trained on ' in text else f'{name}: {PROTOCOLS[name].meaning}'}.{mean}",)


def official_leaks(parameters: Mapping[str, object], audit: pl.DataFrame) -> str:
    """Return a sentence on the leaks of the official split that a run trained on; empty if there are none."""
    if protocol_name(parameters) != OFFICIAL:
        return ""
    rows = audit.filter(check=OFFICIAL_LEAKS).select("count", "finding").rows()
    if not rows:
        return "What the official split leaks is not recorded."
    return rows[0][1] if rows[0][0] else ""


def strict_command(run: str) -> str:
    """Return the command that repeats a run without the groups that the official split leaks."""
    return command_text("--resume", run, "--fork", "-p", "protocol", "official_strict")
