"""The common parts of all offline pages: templates, style sheet, scripts, and the content security policy.

Templates print a value as one escaped line without control characters, unless it is HTML (``Markup``).
"""

import base64
import functools
import hashlib
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup
from pygments.formatters.html import HtmlFormatter

from fvc_lib.analysis import wording
from fvc_lib.analysis.read.headline import DISHONEST_CONTROLS, Score
from fvc_lib.services.atomic_files import write_text

TEMPLATES = Path(__file__).with_name("templates")
PLOTLY_FILE = "plotly.min.js"  # one file of 4.8 MB for all pages


def render(template: str, **values: object) -> Markup:
    """Return the HTML of a template that is filled with ``values``. ``template`` is its file name in ``TEMPLATES``."""
    return Markup(_environment().get_template(template).render(**values))


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if hasattr(value, "__html__") else wording.clean_text(value),
    )
    environment.filters |= {
        "interval": lambda score: wording.interval_text(score.value, score.low, score.high),
        "number": wording.number_text, "bytes": wording.bytes_text, "duration": wording.duration_text,
        "source_name": wording.source_name, "count": wording.count_text,
        "commands": lambda text: Markup(wording.with_commands(wording.clean_text(text))),
        # ``Fold training: can a network ...?, fold 2`` becomes ``Fold training, fold 2``.
        "short": lambda title: re.sub(r": .*?(, fold \d+)?$", r"\1", title),
    }  # fmt: skip
    classes = {"above control": "above", "not above control": "below"}  # CSS classes for the colour of a verdict
    environment.globals |= {
        "interval_bar": interval_bar,
        "dishonest": DISHONEST_CONTROLS,
        "standing_class": lambda verdict: classes.get(verdict.standing, ""),
    }
    return environment


def interval_bar(score: Score, control: float | None = None, color: str = "#1b2a41") -> Markup:
    """Return HTML that draws a score with its interval on a scale from 0 to 1.

    Args:
        score: the score. If its value is missing or not finite, the HTML is empty.
        control: value of a control (a simple predictor) to mark on the scale. None: no mark.
        color: CSS colour of the bar.
    """
    if score.value is None or not math.isfinite(score.value):
        return Markup()
    ends = (score.value, score.low, score.high, control)
    places = (f"{min(max(score.value if end is None else end, 0.0), 1.0):.2%}" for end in ends)
    at = dict(zip(("middle", "low", "high", "mark"), places, strict=True))
    return render("interval_bar.html", **at, has_control=control is not None, color=color, score=score)


def write_page(
    path: Path, title: str, body: Markup, scripts: Sequence[str] = (), *, stamp: str = "", plotly: Path | None = None
) -> None:
    """Write an HTML page that works offline. The file is never left half written.

    Args:
        path: path of the page.
        title: title of the document, plain text.
        body: HTML of the content.
        scripts: JavaScript that is embedded and runs after the body.
        stamp: text that identifies the content. ``stamp_of`` reads it back.
        plotly: path of plotly.js, which is written if it is missing or differs. None: the page has no figures.

    Raises:
        OSError: a file cannot be written.
    """
    style = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    style += str(HtmlFormatter(style="default").get_style_defs(".highlight"))
    # The policy allows only these scripts and plotly.js, a file on the same disk.
    digests = [hashlib.sha256(text.encode()).digest() for text in scripts]
    allowed = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    allowed += ["'self'", "file:"] if plotly else []
    script_sources = " ".join(allowed) or "'none'"
    policy = (
        f"default-src 'none'; script-src {script_sources}; style-src 'unsafe-inline'; "
        "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
    )
    source = Path(os.path.relpath(plotly, path.parent)).as_posix() if plotly else ""
    page = render(
        "page.html", title=title, body=body, scripts=[Markup(text) for text in scripts], stamp=stamp,
        plotly=source, policy=policy, style=Markup(style),
    )  # fmt: skip
    write_text(path, page)
    if plotly:
        from plotly.offline import get_plotlyjs  # a third of a second to load

        script = get_plotlyjs()
        if not plotly.is_file() or plotly.stat().st_size != len(script.encode()):
            write_text(plotly, script)


def stamp_of(path: Path) -> str | None:
    """Return the stamp of a page: the text with which ``write_page`` identified its content.

    Return None if there is no page at ``path``, or the page has no stamp.
    """
    head = path.read_text(encoding="utf-8", errors="replace")[:4000] if path.is_file() else ""
    found = re.search(r'<meta name="fvc-stamp" content="([^"]*)"', head)
    return found[1] if found else None
