"""A record that tells its own end: a banner at its top, and at the cell that ran what ended it."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from papermill.execute import ERROR_MARKER_TAG

from fvc_lib.execution.status import StageStatus
from fvc_lib.services.atomic_files import write_bytes

_STYLE = "border-left: 6px solid {color}; padding: 0.5em 1em; background: {ground}; color: #222"
_COLORS = {"failed": ("#b71c1c", "#fdecea"), "interrupted": ("#b26a00", "#fff4e0")}
KERNEL_DIED = "KernelDied"


def tell_end(record: Path, stage: StageStatus, lines: Sequence[str], log_tail: str = "") -> None:
    """Write into ``record`` how its execution ended.

    A cell that ran when the kernel died gets an error output that says so. One that was asked to stop is ``stopped``
    and no failure. The banner carries papermill's tag, so that a repetition removes it.

    Args:
        record: the notebook, as the engine left it.
        stage: how it ended.
        lines: what happened, where it was and what to do next.
        log_tail: the end of the kernel's log, where that is all there is to read.
    """
    notebook = json.loads(record.read_text(encoding="utf-8", errors="replace"))
    states = [cell["metadata"].get("papermill", {}).get("status") for cell in notebook["cells"]]
    where = ""
    if "failed" in states:
        place = states.index("failed")
        where = f"cell {place + 1} of {len(states)}"
        _tell_in_cell(notebook["cells"][place], stage, lines)
    if stage.state == "interrupted":
        notebook["metadata"]["papermill"]["exception"] = None
    notebook["cells"].insert(0, _banner(stage, lines, where, log_tail, with_id=notebook.get("nbformat_minor", 0) >= 5))
    write_bytes(record, (json.dumps(notebook, ensure_ascii=False) + "\n").encode("utf-8", "replace"))


def _tell_in_cell(cell: dict[str, Any], stage: StageStatus, lines: Sequence[str]) -> None:
    if stage.state == "interrupted":
        cell["metadata"]["papermill"].update(status="stopped", exception=False)
    if stage.error is not None or any(output["output_type"] == "error" for output in cell["outputs"]):
        return
    name = "Stopped" if stage.state == "interrupted" else KERNEL_DIED
    traceback = [f"{name}: {lines[0]}", *lines[1:]]
    cell["outputs"].append(dict(nbformat.v4.new_output("error", ename=name, evalue=lines[0], traceback=traceback)))


def _banner(stage: StageStatus, lines: Sequence[str], where: str, log_tail: str, *, with_id: bool) -> dict[str, Any]:
    color, ground = _COLORS.get(stage.state, _COLORS["failed"])
    title = "Stopped" if stage.state == "interrupted" else "Failed"
    parts = [f"<b>{title}{', at ' + where if where else ''}</b>", *map(html.escape, lines)]
    body = "<br>\n".join(parts)
    if log_tail:
        body += f"<pre>{html.escape(log_tail)}</pre>"
    # No blank line within, which would end the HTML block in Markdown.
    body = "\n".join(line or "&nbsp;" for line in body.splitlines())
    source = f'<div style="{_STYLE.format(color=color, ground=ground)}">\n{body}\n</div>'
    cell = dict(nbformat.v4.new_markdown_cell(source, metadata={"tags": [ERROR_MARKER_TAG]}))
    if not with_id:
        del cell["id"]
    return cell
