"""Checks of an offline page: its figures are drawn, and its body is no wider than the window."""

from typing import Any

# A figure is drawn when it comes near the window, and only in an open section.
_OPEN_SECTIONS = (
    'document.querySelectorAll("details.section").forEach(section => { section.name = ""; section.open = true; })'
)
_DRAW_NEXT = """() => {
  const waiting = [...document.querySelectorAll("div.figure")]
    .filter(div => div.checkVisibility() && !div.querySelector("svg.main-svg"));
  if (waiting.length) waiting[0].scrollIntoView();
  return waiting.length === 0;
}"""
_AS_WIDE_AS_THEIR_PLACE = """() => [...document.querySelectorAll("div.figure")].every(div => {
  const svg = div.querySelector("svg.main-svg");
  return !svg || Math.abs(svg.clientWidth - div.clientWidth) <= 1;
})"""
# Marks are what carries data: lines, points, bars, areas, cells of a heatmap. A figure without any has to say why.
_FIGURES = """() => [...document.querySelectorAll("div.figure")].map(div => {
  const marks = ".js-line, .point, .points path, .js-fill, .heatmaplayer image, .box, .errorbar, .boxlayer path";
  const [svg, box] = [div.querySelector("svg.main-svg"), div.getBoundingClientRect()];
  const edges = [...div.querySelectorAll("svg.main-svg")].map(one => one.getBoundingClientRect().right);
  const texts = [...div.querySelectorAll("svg.main-svg text")].filter(text => text.textContent.trim())
    .map(text => [text.textContent, text.getBoundingClientRect()]);
  return {
    id: div.id,
    marks: div.querySelectorAll(marks).length,
    says_why: /nothing to show|cannot be/.test(div.textContent),
    width: svg ? svg.getBoundingClientRect().width : 0,
    drawn_beyond: Math.max(0, ...edges) - box.right,
    room_beyond: box.right - document.documentElement.clientWidth,
    cut_texts: texts.filter(([, r]) => r.right > box.right + 1 || r.left < box.left - 1 || r.bottom > box.bottom + 1
      || r.top < box.top - 1).map(([text]) => text),
  };
})"""
_CUT_TABLES = """() => [...document.querySelectorAll("table")].filter(table =>
  table.parentElement.scrollWidth > table.parentElement.clientWidth + 1).map(table => table.innerText.slice(0, 60))"""
_OVERFLOW = """() => {
  const room = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= room) return [];
  const clipped = element => {
    for (let up = element.parentElement; up && up !== document.body; up = up.parentElement)
      if (getComputedStyle(up).overflowX !== "visible") return true;
    return false;
  };
  const found = [...document.querySelectorAll("body *")]
    .filter(element => element.getBoundingClientRect().right > room + 0.5 && !clipped(element))
    .map(element => `${element.tagName}.${element.className.baseVal ?? element.className} reaches to `
      + `${Math.round(element.getBoundingClientRect().right)} of ${room}: ${element.textContent.slice(0, 60)}`);
  return found.length ? found : [`a text reaches to ${document.documentElement.scrollWidth} of ${room}`];
}"""


def draw_all(page: Any) -> None:
    """Open every section and look at every figure, as a reader who scrolls through the page."""
    page.evaluate(_OPEN_SECTIONS)
    page.wait_for_function(_DRAW_NEXT)
    settle(page)
    page.evaluate("scrollTo(0, 0)")


def settle(page: Any) -> None:
    """Wait until every figure is as wide as its place: a figure follows its window a frame later."""
    page.wait_for_function(_AS_WIDE_AS_THEIR_PLACE)


def figures(page: Any) -> list[dict[str, Any]]:
    """Return the marks that carry data, the widths in CSS pixels and the texts cut at the edge, by figure."""
    return page.evaluate(_FIGURES)


def flaws(page: Any, *, on_paper: bool = False) -> list[str]:
    """Return what is wrong with a page in its window: too wide, figures empty or past their place, texts cut.

    On paper, where nobody scrolls, tables wider than their place are flaws too.
    """
    found = page.evaluate(_OVERFLOW) + (page.evaluate(_CUT_TABLES) if on_paper else [])
    for figure in figures(page):
        if not (figure["marks"] or figure["says_why"]):
            found.append(f"nothing is drawn: {figure}")
        if figure["drawn_beyond"] > 0.5 or figure["room_beyond"] > 0.5 or figure["cut_texts"]:
            found.append(f"drawn past its place: {figure}")
    return found
