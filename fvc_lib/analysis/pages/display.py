"""Displays of tables, sentences and figures in a notebook. Text is escaped, and figures are stored as plotly's JSON."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import Any

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis import wording
from fvc_lib.analysis.figures.still import still_picture
from fvc_lib.analysis.figures.theme import STANDING_COLORS
from fvc_lib.metrics.declaration import declaration

LEAD = '<p class="lead">'  # begins the answer of a notebook
PLOTLY = "application/vnd.plotly.v1+json"  # mimetype of a figure that a notebook stores
# Each entry: suffix of a column's name, unit for the heading, and the function that formats a value.
_BY_SUFFIX: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("_bytes", "", wording.bytes_text),
    ("_seconds", "", wording.duration_text),
    ("_share", " (%)", lambda value: f"{100 * value:.1f}"),
    ("_percent", " (%)", lambda value: f"{value:.1f}"),
    ("_mb", " (MB)", lambda value: f"{value:,.0f}"),
)
_HEADINGS = {
    "run_id": "Run", "video_id": "Video", "group_id": "Group", "peak_rss_bytes": "Peak memory", "auc": "ROC AUC",
    "score_low": "from", "score_high": "to", "std": "Standard deviation",
}  # fmt: skip
# JupyterLab aligns every cell to the right. Only a style attribute of the cell overrides it.
_LEFT = ' style="text-align:left"'
_INTERVAL = r"^[-+]?[0-9.,]+ \[.*\]( [★☆])?$"


class Displayed:
    """Mixin that displays an object as HTML (``_repr_html_``), or as text (``repr``) where there is no browser."""

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/html": self._repr_html_(), "text/plain": repr(self)}

    def _repr_html_(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class HtmlTable(Displayed):
    """A frame displayed as a table: HTML in a browser, tab-separated text elsewhere.

    Attributes:
        frame: the rows.
        caption: one sentence above the table, plain text.
        names: maps a column to its heading. Other headings are made from the names of the columns.
        digits: decimals of fractional numbers without a unit.
        max_rows: the most rows that are shown. Further rows are only counted below the table.
        missing: text that stands for null.
        links: maps a column to the addresses, relative to the page, that its cells link to. An empty address makes no
            link.
        stacks: whether a phone shows the cells of a row one below the other, for long texts.
    """

    frame: pl.DataFrame
    caption: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    digits: int = 3
    max_rows: int = 200
    missing: str = wording.NOT_RECORDED
    links: Mapping[str, Sequence[str]] = field(default_factory=dict)
    stacks: bool = False

    def _repr_html_(self) -> str:
        heads = [f'<th scope="col"{self._look(name)}>{escape(self._heading(name))}</th>' for name in self.frame.columns]
        lines = [f"<thead><tr>{''.join(heads)}</tr></thead><tbody>"]
        for place, row in enumerate(self.frame.head(self.max_rows).iter_rows(named=True)):
            cells = [self._cell(name, value, place) for name, value in row.items()]
            lines.append(f"<tr>{''.join(cells)}</tr>")
        caption = f"<caption{_LEFT}>{escape(wording.clean_text(self.caption))}</caption>" if self.caption else ""
        more = self._more()
        remark = f'</tbody></table><p class="fvc-remark">{more}</p>' if more else "</tbody></table>"
        kinds = "fvc-table stacks" if self.stacks else "fvc-table"
        return f'<table class="{kinds}">{caption}{"".join(lines)}{remark}'

    def __repr__(self) -> str:
        heads = map(self._heading, self.frame.columns)
        lines = [wording.clean_text(self.caption), "\t".join(heads)]
        for row in self.frame.head(self.max_rows).iter_rows(named=True):
            cells = [self._shown(name, value) for name, value in row.items()]
            lines.append("\t".join(cells))
        return "\n".join(filter(None, [*lines, self._more()]))

    def _more(self) -> str:
        more = self.frame.height - self.max_rows
        return f"and {wording.count_text(more, 'more row')}" if more > 0 else "none" * self.frame.is_empty()

    def _heading(self, name: str) -> str:
        if known := self.names.get(name, _HEADINGS.get(name)):
            return wording.clean_text(known)
        if declaration(name):
            return wording.metric_name(name)
        suffix, unit, _ = _unit_of(name)
        words = name.removesuffix(suffix).removeprefix("num_").replace("_", " ")
        return wording.clean_text(words[:1].upper() + words[1:]) + unit

    def _look(self, name: str, text: str = "") -> str:
        """Return the HTML attribute that aligns a cell with the content ``text`` in column ``name``.

        Numbers are aligned to the right and stay on one line, and other text is aligned to the left. For a heading,
        ``text`` is empty.
        """
        is_number = self.frame.schema[name].is_numeric() or re.match(_INTERVAL, text)
        return ' class="number"' if is_number else _LEFT

    def _cell(self, name: str, value: object, place: int) -> str:
        shown = self._shown(name, value)
        # Meanings of parameters name commands.
        text = wording.with_commands(shown) if name == "meaning" else escape(shown)
        if name in self.links and (address := self.links[name][place]):
            text = f'<a href="{escape(address)}">{text}</a>'
        if name == "standing" and value in STANDING_COLORS:
            text = f'<span style="color:{STANDING_COLORS[str(value)]};font-weight:600">{text}</span>'
        title = f' title="{escape(self._heading(name))}"' if self.stacks else ""
        return f"<td{title}{self._look(name, shown)}>{text}</td>"

    def _shown(self, name: str, value: object) -> str:
        if value is None:
            return self.missing
        if isinstance(value, bool):
            return "yes" if value else "no"
        suffix, _, written = _unit_of(name)
        if suffix and isinstance(value, int | float):
            return written(float(value))
        if isinstance(value, float):
            return wording.number_text(value, self.digits)
        # Counts get thousands separators. Other integers, such as a fold, step or seed, do not.
        return f"{value:,}" if isinstance(value, int) and name.startswith("num_") else wording.clean_text(value)


def _unit_of(name: str) -> tuple[str, str, Callable[[float], str]]:
    """Return ``(suffix, unit for the heading, function)`` of the column ``name``, from ``_BY_SUFFIX``.

    The suffix of a column name tells the unit. The function formats a value as text. Metrics and names without a known
    suffix give ``("", "", str)``.
    """
    units = () if declaration(name) else _BY_SUFFIX
    return next((unit for unit in units if name.endswith(unit[0])), ("", "", str))


@dataclass(frozen=True, repr=False)
class HtmlSentences(Displayed):
    """Plain sentences displayed as paragraphs. If ``has_lead`` is True, the first sentence is emphasised."""

    sentences: Sequence[str]
    has_lead: bool = False

    def _repr_html_(self) -> str:
        lines = "".join(f"<p>{escape(line)}</p>" for line in repr(self).splitlines())
        return lines.replace("<p>", LEAD, 1) if self.has_lead else lines

    def __repr__(self) -> str:
        return "\n".join(map(wording.clean_text, self.sentences)) or "none"


# --- Figures


def figure_bundle(figure: go.Figure, *, with_still: bool = True) -> dict[str, Any]:
    """Return ``figure`` as a dict from mimetype to content: plotly's JSON, a PNG and the title as plain text.

    The PNG is for readers without plotly. It takes about 0.2 s. ``with_still`` False: there is no PNG.
    """
    spec = figure.to_plotly_json()
    title = figure.layout.title.text or "figure"
    content = {"data": spec["data"], "layout": spec["layout"], "config": {"displaylogo": False}}
    still = {"image/png": still_picture(figure)} if with_still else {}
    return {PLOTLY: content, **still, "text/plain": title.replace("<br>", " ")}


def show_figures(figures: Sequence[go.Figure]) -> None:
    """Display ``figures`` in a notebook with plotly's mimetype, regardless of plotly's default renderer."""
    for figure in figures:
        show_bundle(figure_bundle(figure))


@contextmanager
def only_shows() -> Iterator[None]:
    """Catch any error within the ``with`` block and display it as a message.

    So a display that fails does not end a notebook whose results are already written.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001  # the results are on record
        message = wording.clean_text(f"This cannot be shown: {type(error).__name__}: {error}")
        text = f"{message}. What the stage computes and writes does not depend on it."
        show_bundle({"text/plain": text, "text/html": f'<p class="alarm">{escape(text)}</p>'})


def show_bundle(bundle: dict[str, Any]) -> Any:
    """Display ``bundle`` in the notebook, and return a handle that can update the display.

    ``bundle`` maps mimetypes to content.
    """
    from IPython.display import display  # only a notebook needs it

    return display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]  # IPython is half typed
