"""The pages are short and in short sentences, their commands exist, and the reference names all there is."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from fvc_lib import public
from fvc_lib.command_line.main import main
from fvc_lib.metrics.declaration import declarations
from fvc_lib.services import tables
from fvc_lib.services.config import RunConfig
from fvc_lib.services.registry import CORPORA, DETECTORS
from fvc_lib.video.features.family import families_named

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def test_sentences_are_short():
    lengths = []  # words of each sentence; code, tables and headings have none
    for page in PAGES:
        prose = re.sub(r"^ *(\||#).*$", "", FENCE.sub("\n\n", page.read_text()), flags=re.MULTILINE)
        prose = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", prose))
        blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose)
        sentences = [one for block in blocks for one in re.split(r"(?<=[.!?])[*)]*\s+", " ".join(block.split()))]
        lengths += [count for one in sentences if (count := len(re.findall(r"\w[\w'.,%-]*", one))) > 1]
    assert len(lengths) > 0
    assert sum(lengths) / len(lengths) <= 17
    assert sum(length > 30 for length in lengths) <= 0.02 * len(lengths)
    assert sum(len(page.read_text().split()) for page in PAGES) <= 16_000
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_the_pages_have_the_options_that_they_name(page):
    fenced = "\n".join(code for kind, code in FENCE.findall(page.read_text()) if kind in {"", "bash", "sh"})
    lines = fenced.replace("\\\n", " ").splitlines()
    for line in (line for line in lines if re.match(r"\s*fvc ", line)):
        words = shlex.split(line, comments=True)[1:]
        name = words[0] if words[0] in main.list_commands(click.Context(main)) else ""
        command = main.get_command(click.Context(main), name) if name else main
        arguments = command.parse_args(click.Context(command), words[bool(name) :])
        assert name or not arguments or arguments[0].startswith("-"), words
    assert RunConfig.model_fields.keys() | {"run_dir", "fold"} >= set(
        re.findall(r"(?:-p|--over) ([a-z]\w+)", "\n".join(lines))
    )
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(targets) >= set(re.findall(r"^\s*make ([a-z-]+)", fenced, re.MULTILINE))


def reference() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: page() for name, page in module.PAGES.items()}


@pytest.mark.slow
def test_the_reference_names_all_there_is():
    schemas = [value for value in vars(tables).values() if isinstance(value, tables.TableSchema)]
    wanted = {
        "commands": main.list_commands(click.Context(main)),
        "parameters": RunConfig.model_fields,
        "tables": [column for schema in schemas for column in schema.columns],
        "python": public.__all__,
        "detectors": DETECTORS.names(),
        "corpora": CORPORA.names(),
        "metrics": [one.name for one in declarations()],
        "features": [f"{family.name}_{one.name}" for family in families_named("all") for one in family.features],
    }
    pages = reference()
    missing = {page: [name for name in names if f"`{name}`" not in pages[page] and f"# {name}\n" not in pages[page]]
               for page, names in wanted.items()}  # fmt: skip
    assert set(wanted) == set(pages)
    assert not any(missing.values()), missing


@pytest.mark.slow
def test_the_site_loads_nothing_from_other_servers(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    pages = {page: page.read_text() for page in tmp_path.rglob("*.html")}
    assert len(pages) > len(PAGES)
    outside = re.compile(r"""<(?:script|img|iframe)\b[^>]*\bsrc=["']?https?:|<link\b[^>]*\bstylesheet\b[^>]*https?:""")
    assert not [page for page, text in pages.items() if outside.search(text)]
