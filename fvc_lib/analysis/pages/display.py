"""How a notebook shows figures and tables: as data that its record keeps, small, and text stays text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import Any

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis import wording
from fvc_lib.analysis.figures.theme import STANDING_COLORS
from fvc_lib.metrics.declaration import declaration

PLOTLY = "application/vnd.plotly.v1+json"  # what a notebook stores of a figure
# How a column is shown is read from its name, which carries the unit.
_BY_SUFFIX: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("_bytes", "", wording.bytes_text),
    ("_seconds", "", wording.duration_text),
    ("_share", " (%)", lambda value: f"{100 * value:.1f}"),
    ("_percent", " (%)", lambda value: f"{value:.1f}"),
    ("_mb", " (MB)", lambda value: f"{value:,.0f}"),
)
_HEADINGS = {
    "run_id": "Run", "video_id": "Video", "group_id": "Group", "peak_rss_bytes": "Peak memory", "auc": "ROC AUC",
    "score_low": "from", "score_high": "to",
}  # fmt: skip
_TEXT_ROW_LIMIT = 30
# JupyterLab aligns every cell at its right edge; that rule gives way to nothing but a cell's own style.
TEXT_STYLE = ' style="text-align:left"'
_INTERVAL = r"^[-+]?[0-9.,]+ \[.*\]( [★☆])?$"
_ONE_WORD = r"^\w*$"  # such as what stands for the reference's own difference


@dataclass(frozen=True)
class HtmlTable:
    """A frame as a table: HTML where there is a browser, aligned text elsewhere.

    ``caption`` is one sentence above it, plain text; ``names`` are headings for columns whose own name does not read
    well; ``digits`` are decimals of fractional numbers without a unit; rows beyond ``max_rows`` are counted below;
    ``missing`` stands for null;
    ``links``: of a column, a row's address relative to the page, empty where it has none;
    ``stacks``: on a phone a row's cells stand one below the other, for tables of long texts.
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
        shown = self.frame.head(self.max_rows)
        headings = "".join(f"<th{self._look(name)}>{escape(self._heading(name))}</th>" for name in shown.columns)
        rows = "".join(
            f"<tr>{''.join(self._cell(*each, place) for each in row.items())}</tr>"
            for place, row in enumerate(shown.iter_rows(named=True))
        )
        caption = (
            f'<caption style="text-align:left">{escape(wording.clean_text(self.caption))}</caption>'
            if self.caption
            else ""
        )
        return (
            f'<table class="fvc-table{" stacks" * self.stacks}">{caption}'
            f"<thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table>"
            f"{self._remark(self.max_rows)}"
        )

    def __repr__(self) -> str:
        shown = self.frame.head(_TEXT_ROW_LIMIT)
        table = [[self._heading(name) for name in shown.columns]]
        table += [[self._shown(name, value) for name, value in row.items()] for row in shown.iter_rows(named=True)]
        widths = [max(len(row[i]) for row in table) for i in range(shown.width)]
        right = [self.frame.schema[name].is_numeric() for name in shown.columns]
        lines = [wording.clean_text(self.caption)] if self.caption else []
        for row in table:
            cells = (t.rjust(w) if r else t.ljust(w) for t, w, r in zip(row, widths, right, strict=True))
            lines.append("  ".join(cells).rstrip())
        if self.frame.is_empty():
            lines.append("none")
        if self.frame.height > _TEXT_ROW_LIMIT:
            lines.append(f"and {wording.count_text(self.frame.height - _TEXT_ROW_LIMIT, 'more row')}")
        return "\n".join(lines)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/html": self._repr_html_(), "text/plain": repr(self)}

    def _heading(self, name: str) -> str:
        if name in self.names:
            return wording.clean_text(self.names[name])
        if name in _HEADINGS:
            return _HEADINGS[name]
        for suffix, unit, _ in () if declaration(name) else _BY_SUFFIX:
            if name.endswith(suffix):
                return _words(name.removesuffix(suffix)) + unit
        return _words(name)

    @cached_property
    def _intervals(self) -> set[str]:
        """Columns of numbers with intervals, as text: ``0.994 [0.963, 1.000]`` stays on one line."""
        texts = [column.drop_nulls() for column in self.frame.get_columns() if column.dtype == pl.String]
        alike = ((column.name, column.str.contains(_INTERVAL), column.str.contains(_ONE_WORD)) for column in texts)
        return {name for name, is_interval, is_word in alike if is_interval.any() and (is_interval | is_word).all()}

    def _look(self, name: str, *, missing: bool = False) -> str:
        """Attributes of a heading or cell of column ``name``."""
        is_number = self.frame.schema[name].is_numeric() or name in self._intervals
        classes = " ".join(["number"] * is_number + ["missing"] * missing)
        return (f' class="{classes}"' if classes else "") + ("" if is_number else TEXT_STYLE)

    def _cell(self, name: str, value: object, place: int) -> str:
        text = escape(self._shown(name, value))
        if name in self.links and (address := self.links[name][place]):
            text = f'<a href="{escape(address)}">{text}</a>'
        color = STANDING_COLORS.get(str(value)) if name == "standing" else None
        if color is not None:  # the word says it too, for those who see no colour
            text = f'<span style="color:{color};font-weight:600">{text}</span>'
        title = f' title="{escape(self._heading(name))}"' if self.stacks else ""
        return f"<td{title}{self._look(name, missing=value is None)}>{text}</td>"

    def _shown(self, name: str, value: object) -> str:
        if value is None:
            return self.missing
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, int | float):
            for suffix, _, shown in () if declaration(name) else _BY_SUFFIX:
                if name.endswith(suffix):
                    return shown(float(value))
            return wording.number_text(value, self.digits) if isinstance(value, float) else _whole(name, value)
        return wording.clean_text(value)

    def _remark(self, limit: int) -> str:
        if self.frame.is_empty():
            return '<p class="fvc-remark">none</p>'
        more = self.frame.height - limit
        return f'<p class="fvc-remark">and {wording.count_text(more, "more row")}</p>' if more > 0 else ""


@dataclass(frozen=True)
class HtmlSentences:
    """Sentences as paragraphs, plain text; with ``has_lead`` the first stands out as the answer."""

    sentences: Sequence[str]
    has_lead: bool = False

    def _repr_html_(self) -> str:
        lines = [escape(wording.clean_text(line)) for line in self.sentences] or ["none"]
        lead = f'<p class="lead">{lines.pop(0)}</p>' if self.has_lead else ""
        return lead + "".join(f"<p>{line}</p>" for line in lines)

    def __repr__(self) -> str:
        return "\n".join(map(wording.clean_text, self.sentences)) or "none"

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/html": self._repr_html_(), "text/plain": repr(self)}


def _words(name: str) -> str:
    known = wording.metric_name(name)
    if known != name.replace("_", " "):
        return known
    words = name.removeprefix("num_").replace("_", " ")
    return wording.clean_text(words[:1].upper() + words[1:])


def _whole(name: str, value: int) -> str:
    """Counts get thousands separators; a fold, step or seed is a name."""
    return f"{value:,}" if name.startswith("num_") else str(value)


# --- Figures


def figure_bundle(figure: go.Figure) -> dict[str, Any]:
    """What a notebook stores of a figure: plotly's small mimetype and the title as plain text, nothing else."""
    spec = {key: value for key, value in figure.to_plotly_json().items() if key in {"data", "layout"}}
    title = figure.layout.title.text or "figure"
    return {PLOTLY: {**spec, "config": {"displaylogo": False}}, "text/plain": title.replace("<br>", " ")}


def show_figures(figures: Sequence[go.Figure]) -> None:
    """Display ``figures`` in a notebook, each as its plotly mimetype, whatever plotly's default renderer is."""
    for figure in figures:
        show_bundle(figure_bundle(figure))


@contextmanager
def only_shows() -> Iterator[None]:
    """For a cell's part that only shows what is finished: an error is displayed in its place and fails no stage."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # whatever it is, what it was to show is on record
        message = wording.clean_text(f"This cannot be shown: {type(error).__name__}: {error}")
        what = "What the stage computes and writes does not depend on it."
        html = f'<p class="alarm"><b>{escape(message)}</b> {what}</p>'
        show_bundle({"text/plain": f"{message}\n{what}", "text/html": html})


def show_bundle(bundle: dict[str, Any]) -> Any:
    """Send ``bundle`` to the front end, if any, and into the record; the handle returned can update it."""
    from IPython.display import display  # only a notebook has it at hand, and only a notebook comes here

    return display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]  # IPython is half typed
