"""What must be known of a number because of its protocol: what it is a mean of, and what an official split leaks."""

from collections.abc import Mapping, Sequence

import polars as pl

from fvc_lib.analysis.wording import clean_text, count_text, number_text
from fvc_lib.services.errors import command_text
from fvc_lib.services.tasks import KFOLD, OFFICIAL, PROTOCOLS

_MOST_TARGETS = 12  # named in a sentence
OFFICIAL_LEAKS = "official_split_leaks"  # of tables.LEAKAGE_AUDIT
TARGET_SCOPE = "target:"  # of tables.RESULTS


def protocol_name(parameters: Mapping[str, object]) -> str:
    """The protocol of a run by its parameters; what older runs do not say is ``kfold``."""
    name = parameters.get("protocol")
    return name if isinstance(name, str) and name in PROTOCOLS else KFOLD


def protocol_text(parameters: Mapping[str, object], corpora: Sequence[str] = ()) -> str:
    """The protocol of a run, for a line that names it; empty for ``kfold``.

    Of ``cross_corpus`` also what was trained on, where the run's ``corpora`` are known, and what was tested on.
    """
    name, targets = protocol_name(parameters), parameters.get("target_corpora")
    if name == KFOLD:
        return ""
    tested = [str(each) for each in targets] if isinstance(targets, list | tuple) else []
    trained = [each for each in corpora if _plain(each) not in set(map(_plain, tested))]
    said = [f"{what} {', '.join(map(clean_text, of))}" for what, of in (("trained on", trained), ("tested on", tested))]
    return ", ".join([name, *said[not trained :]] if tested else [name])


def _plain(name: str) -> str:
    """As ``cross_corpus`` takes a target's name: letters and digits in one case."""
    return "".join(filter(str.isalnum, name.lower())) or name


def protocol_cautions(
    parameters: Mapping[str, object], results: pl.DataFrame, metric: str, corpora: Sequence[str] = ()
) -> tuple[str, ...]:
    """What the number is of, with each target's own, the worst first; nothing for ``kfold``."""
    name = protocol_name(parameters)
    if name == KFOLD:
        return ()
    rows = results.filter(pl.col("scope").str.starts_with(TARGET_SCOPE), source="model", metric=metric)
    known = rows.sort("value", "scope", nulls_last=True).select("scope", "value").rows()
    told = [f"{clean_text(scope.removeprefix(TARGET_SCOPE))} {number_text(value)}" for scope, value in known]
    more = f" and {len(told) - _MOST_TARGETS} more" if len(told) > _MOST_TARGETS else ""
    mean = (
        f" The number is the plain mean over {count_text(len(told), 'target')}, the worst first: "
        f"{', '.join(told[:_MOST_TARGETS])}{more}."
        if len(told) > 1
        else "".join(f" Target: {each}." for each in told)
    )
    said = protocol_text(parameters, corpora)
    return (f"Protocol {said if ' trained on ' in said else f'{name}: {PROTOCOLS[name].meaning}'}.{mean}",)


def official_leaks(parameters: Mapping[str, object], audit: pl.DataFrame) -> str:
    """What the official split that a run trained on leaks, a sentence; empty where it leaks nothing, or is not used."""
    if protocol_name(parameters) != OFFICIAL:
        return ""
    found = audit.filter(check=OFFICIAL_LEAKS).select("count", "finding").rows()
    if not found:
        return "What the official split leaks is not recorded."
    return found[0][1] if found[0][0] else ""


def strict_command(run: str) -> str:
    """How the same is had without what the official split leaks."""
    return command_text("--resume", run, "--fork", "-p", "protocol", "official_strict")
