"""Write the reference pages of the site from the program itself: a hook of MkDocs (``make docs``).

No page lies in the repository, so none can be out of date. The hook also gives pages a copy of the one script that the
theme would load from another server.
"""

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import click

import fvc_lib
from fvc_lib import public
from fvc_lib.command_line.main import main
from fvc_lib.detectors.facts import facts_of_all
from fvc_lib.metrics.declaration import declarations
from fvc_lib.services import tables
from fvc_lib.services.config import DECLARED, RunConfig
from fvc_lib.services.home import CHECKOUT
from fvc_lib.services.registry import CORPORA
from fvc_lib.video.features.family import POOLS, families_named


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table. A bar in a cell is escaped, and a line break becomes a blank."""
    cells = [[re.sub(r"\s+", " ", str(cell)).replace("|", "\\|") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in [list(head), ["---"] * len(head), *cells])


def code(value: object) -> str:
    """Return ``value`` as code; empty for an empty text. A path in the checkout is shown relative to it."""
    text = value.removeprefix(f"{CHECKOUT}/") if isinstance(value, str) else json.dumps(value, default=str)
    return f"`{text}`" if text else ""


def commands() -> str:
    """Return the ``--help`` of the program and of each of its commands."""
    top = click.Context(main, info_name="fvc", terminal_width=100, max_content_width=100)
    parts = [f"# Commands\n\n```text\n{main.get_help(top)}\n```\n"]
    for name in main.list_commands(top):
        command = main.get_command(top, name)
        assert command is not None
        text = command.get_help(click.Context(command, parent=top, info_name=name))
        parts.append(f"\n## {name}\n\n```text\n{text}\n```\n")
    return "".join(parts)


def parameters() -> str:
    """Return a table of the parameters of a run, by what they may change."""
    how = "Set a parameter with `-p NAME VALUE`, or in a YAML file with `-f FILE`."
    parts = [f"# Parameters\n\n{how} The headings say what another value may change.\n"]
    for changes in dict.fromkeys(declared.changes for declared in DECLARED.values()):
        rows = [
            (code(name), code(field.default), field.description, ", ".join(DECLARED[name].tasks))
            for name, field in RunConfig.model_fields.items()
            if DECLARED[name].changes == changes
        ]
        parts.append(f"\n## {changes.capitalize()}\n\n{table(['name', 'default', 'meaning', 'tasks'], rows)}")
    return "".join(parts)


def columns() -> str:
    """Return a table of columns for each table that stages write."""
    parts = ["# Tables\n\nStages check a table whenever they write or read it.\n"]
    for schema in [value for value in vars(tables).values() if isinstance(value, tables.TableSchema)]:
        rows = [
            (
                code(name),
                column.dtype,
                column.wanted,
                "yes" if column.has_nulls else "",
                "yes" if column.is_unique else "",
            )
            for name, column in schema.columns.items()
        ]
        parts.append(f"\n## {schema.name}\n\n{table(['column', 'type', 'values', 'may be missing', 'unique'], rows)}")
    return "".join(parts)


def documented(name: str, item: Any, level: int = 2) -> Iterator[str]:
    """Yield the heading, signature and docstring of ``item``, then those of its public methods."""
    is_called = callable(item) and not (inspect.isclass(item) and issubclass(item, Exception))
    signature = str(inspect.signature(item)) if is_called else ""
    yield f"\n{'#' * level} {name}\n\n```text\n{name}{signature}\n\n{inspect.getdoc(item)}\n```\n"
    for member, value in vars(item).items() if inspect.isclass(item) else ():
        if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            yield from documented(f"{name}.{member}", value, level + 1)


def functions() -> str:
    """Return the public names of ``fvc_lib`` with their signatures and docstrings."""
    head = f"# Python\n\n`import fvc_lib as fvc`, version {fvc_lib.__version__}.\n"
    return head + "".join(text for name in public.__all__ for text in documented(name, getattr(public, name)))


def detectors() -> str:
    """Return a table of the detectors for ``-p model``."""
    rows = [
        (
            code(fact.spec.name), f"{fact.spec.num_frames} x {fact.spec.side}", fact.num_parameters or "",
            "come with FVC" if fact.spec.brings_weights else fact.spec.weights, fact.spec.weights_licence,
            ", ".join(fact.spec.packages), fact.spec.paper,
        )
        for fact in facts_of_all()
    ]  # fmt: skip
    head = ["name", "frames x side", "parameters", "weights", "licence of them", "packages", "paper"]
    return f"# Detectors\n\nSet one with `-p model NAME`.\n\n{table(head, rows)}"


def corpora() -> str:
    """Return a table of the layouts of corpora that a run reads."""
    rows = [(code(name), one.title, one.accepted, one.licence, one.fetch, one.paper) for name, one in CORPORA.items()]
    return f"# Corpora\n\n{table(['name', 'corpus', 'layout', 'terms', 'from', 'paper'], rows)}"


def metrics() -> str:
    """Return a table of all metrics."""
    rows = [(code(one.name), one.title, one.says, one.unit, one.better or "") for one in declarations()]
    return f"# Metrics\n\n{table(['name', 'title', 'meaning', 'unit', 'better'], rows)}"


def features() -> str:
    """Return a table of forensic features for each family."""
    pools = "".join(f"- `_{pool}`: {meaning}\n" for pool, meaning in POOLS.items())
    parts = [f"# Forensic features\n\nA column's name ends with how its values are pooled over a video:\n\n{pools}"]
    for family in families_named("all"):
        rows = [
            (code(f"{family.name}_{one.name}"), one.unit, one.meaning, "yes" * one.size_proxy)
            for one in family.features
        ]
        head = ["column", "unit", "meaning", "follows size or codec"]
        parts.append(f"\n## {family.name}\n\nPaper: {family.paper}. Of {family.of}.\n\n{table(head, rows)}")
    return "".join(parts)


PAGES = {
    "commands": commands, "parameters": parameters, "tables": columns, "python": functions, "detectors": detectors,
    "corpora": corpora, "metrics": metrics, "features": features,
}  # fmt: skip


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to the files of the site; MkDocs calls this hook."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=page()))
    return files


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Say that the headers of tables are of columns; MkDocs calls this hook."""
    return re.sub("<th(?=[ >])", '<th scope="col"', html)


_SHIM = "https://unpkg.com/iframe-worker/shim"  # the theme's search needs it where a page is opened from a disk


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Let a page load ``iframe_worker.js`` of the site, so that search works offline; MkDocs calls this hook."""
    return output.replace(_SHIM, "../" * page.url.count("/") + "iframe_worker.js")


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """Do the same for ``404.html``; MkDocs calls this hook."""
    return output_content.replace(_SHIM, "iframe_worker.js")
