"""The look and the small script of the offline pages. Both are embedded: a page loads nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib

from pygments.formatters.html import HtmlFormatter

CODE_CLASS = "highlight"

_CSS = """
:root { --ink:#22262b; --soft:#5b626b; --faint:#8a8f98; --line:#e3e6ea; --wash:#f6f7f9; --accent:#0072b2;
  --above:#00735c; --below:#b3261e; --model:#1b2a41; --control:#8a8f98;
  --sans:Inter,"Segoe UI","Helvetica Neue",Arial,"DejaVu Sans",sans-serif;
  --mono:"JetBrains Mono","SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace; }
* { box-sizing:border-box; }
html { scroll-padding-top:76px; -webkit-text-size-adjust:100%; }
body { margin:0; color:var(--ink); background:#fff; font:15px/1.6 var(--sans); font-variant-numeric:tabular-nums; }
a { color:var(--accent); text-decoration:none; } a:hover { text-decoration:underline; }
h1,h2,h3,h4 { line-height:1.25; font-weight:600; letter-spacing:-.01em; margin:1.5em 0 .5em; }
h1 { font-size:26px; } h2 { font-size:20px; } h3 { font-size:17px; } h4 { font-size:15px; }
code,pre,kbd { font-family:var(--mono); font-size:12.5px; }
:not(pre) > code { background:var(--wash); border-radius:3px; padding:1px 4px; overflow-wrap:anywhere; }
pre { margin:0; white-space:pre-wrap; overflow-wrap:anywhere; }
img, svg { max-width:100%; }
.top { position:sticky; top:0; z-index:20; background:rgba(255,255,255,.96); border-bottom:1px solid var(--line);
  padding:11px 32px; display:flex; align-items:baseline; gap:20px; }
.top .title { font-weight:600; font-size:16px; margin:0; overflow:hidden; text-overflow:ellipsis;
  white-space:nowrap; }
.top .number { margin-left:auto; white-space:nowrap; color:var(--soft); } .top .number b { color:var(--ink); }
.badge { display:inline-block; border:1.5px solid currentColor; border-radius:4px; padding:0 8px; font-size:13px;
  font-weight:600; white-space:nowrap; color:var(--soft); }
.badge.above { color:var(--above); } .badge.below { color:var(--below); }
.page { display:grid; grid-template-columns:212px minmax(0,1fr); max-width:1320px; margin:0 auto; }
nav.sections { position:sticky; top:50px; align-self:start; max-height:calc(100vh - 50px); overflow-y:auto;
  padding:32px 12px 32px 32px; font-size:13.5px; }
nav.sections ol { list-style:none; margin:0 0 20px; padding:0; }
nav.sections a { display:block; padding:4px 0 4px 12px; border-left:2px solid var(--line); color:var(--soft);
  line-height:1.35; }
nav.sections a:hover { color:var(--ink); border-color:var(--faint); text-decoration:none; }
nav.sections .failed { color:var(--below); }
nav.sections button { display:block; font:inherit; color:var(--soft); background:none; border:0;
  padding:3px 0 3px 14px; cursor:pointer; text-align:left; }
nav.sections button:hover { color:var(--ink); }
main { padding:28px 32px 96px; min-width:0; }
.lead { font-size:21px; line-height:1.35; font-weight:600; letter-spacing:-.01em; margin:4px 0 4px; max-width:44em; }
.lead.above { color:var(--above); } .lead.below { color:var(--below); }
.under { color:var(--soft); margin:0 0 24px; overflow-wrap:anywhere; }
.alarm { border-left:4px solid var(--below); background:#fdf3f2; padding:10px 14px; margin:0 0 20px;
  overflow-wrap:anywhere; }
.hero { display:grid; grid-template-columns:minmax(0,2fr) minmax(312px,1fr); gap:32px; align-items:start;
  border-bottom:1px solid var(--line); padding-bottom:28px; margin-bottom:20px; }
table { border-collapse:collapse; font-size:13.5px; line-height:1.45; margin:0 0 12px; }
caption { text-align:left; color:var(--soft); padding:0 0 6px; caption-side:top; }
@media (min-width:641px) { caption { white-space:nowrap; } }
th { text-align:left; font-weight:600; color:var(--soft); border-bottom:1.5px solid #c9cdd2;
  padding:5px 16px 5px 0; vertical-align:bottom; }
td { border-bottom:1px solid var(--line); padding:5px 16px 5px 0; vertical-align:top; overflow-wrap:break-word;
  max-width:60ch; }
th.number, td.number { text-align:right; } td.number { white-space:nowrap; } td.missing { color:var(--faint); }
.scores { width:100%; }
.scores td { vertical-align:middle; overflow-wrap:normal; }
.scores td.name, .scores th { white-space:nowrap; }
.scores tr.model td { font-weight:600; } .scores .aside td { color:var(--faint); }
.scores td.bar { width:30%; padding-right:0; } .scores svg { display:block; width:100%; height:20px; }
.facts { margin:0; display:grid; grid-template-columns:auto 1fr; gap:3px 12px; font-size:13.5px; }
.facts dt { color:var(--soft); } .facts dd { margin:0; text-align:right; overflow-wrap:anywhere; }
details.section { border-bottom:1px solid var(--line); }
details.section > summary { cursor:pointer; list-style:none; padding:16px 0; display:flex; gap:12px;
  align-items:baseline; }
details.section > summary::-webkit-details-marker { display:none; }
details.section > summary::before { content:"+"; color:var(--faint); font:400 18px/1 var(--mono); width:12px; }
details.section[open] > summary::before { content:"\\2212"; }
details.section > summary h2 { margin:0; }
details.section > summary .file { margin-left:auto; color:var(--faint); font-size:12.5px; }
details.section > summary:hover h2 { color:var(--accent); }
.cells { padding:0 0 28px 24px; } .cells > :first-child { margin-top:0; }
.prose { max-width:46em; }
.prose p, .prose ul, .prose ol { margin:.5em 0; }
.prose pre { background:var(--wash); padding:10px 12px; border-radius:4px; }
.prose blockquote { margin:.8em 0; padding-left:14px; border-left:3px solid var(--line); color:var(--soft); }
.output { margin:8px 0 14px; overflow-x:auto; }
.output.text pre { color:#3a4149; background:var(--wash); border-radius:4px; padding:9px 12px; max-height:420px;
  overflow:auto; line-height:1.5; }
.output.stderr pre { background:#fbf8ef; } .fvc-remark { color:var(--soft); font-size:12.5px; margin:2px 0 10px; }
.output.error { border-left:4px solid var(--below); background:#fdf3f2; padding:10px 14px; }
.output.error strong { color:var(--below); overflow-wrap:anywhere; }
.output.error pre { max-height:420px; overflow:auto; margin-top:6px; }
.figure { width:100%; margin:6px 0 16px; }
.finding { font-size:16px; font-weight:600; line-height:1.35; margin:18px 0 2px; max-width:60em; break-after:avoid; }
.basis { font-size:12.5px; line-height:1.45; color:var(--soft); margin:0 0 4px; max-width:76em; break-after:avoid; }
details.code { margin:4px 0; font-size:12.5px; }
details.code > summary { cursor:pointer; color:var(--faint); list-style-position:outside; width:max-content; }
details.code > summary:hover { color:var(--ink); }
details.code .highlight { border:1px solid var(--line); border-radius:4px; padding:9px 12px; margin:4px 0 10px;
  background:#fff; }
.badge.state-failed, .badge.state-interrupted, .badge.state-stopped { color:var(--below); }
.badge.state-running { color:var(--accent); } .badge.state-done { color:var(--above); }
.never { color:var(--below); } .warning { color:var(--below); }
.records a { white-space:nowrap; margin-right:6px; } .records { font-size:12.5px; }
.back { font-size:13.5px; white-space:nowrap; }
.record { max-width:1080px; margin:0 auto; padding:20px 32px 96px; }
.record .facts { grid-template-columns:max-content 1fr; margin-bottom:20px; } .record .facts dd { text-align:left; }
.fvc-cards { margin:4px 0 14px; }
.fvc-card { display:inline-block; vertical-align:top; max-width:100%; margin:0 14px 14px 0; font-size:12.5px;
  line-height:1.4; color:var(--soft); overflow-wrap:anywhere; }
.fvc-card img { display:block; max-width:100%; margin-bottom:4px; border-radius:3px; }
.fvc-card b { color:var(--ink); }
.fvc-card.gone { border:1px dashed var(--line); padding:8px; }
.copyable { position:relative; max-width:60em; }
.copyable pre { background:var(--wash); border-radius:4px; padding:12px 76px 12px 14px; line-height:1.6; }
.copyable button { position:absolute; top:8px; right:8px; font:inherit; font-size:12.5px; color:var(--accent);
  background:#fff; border:1px solid var(--line); border-radius:4px; padding:1px 10px; cursor:pointer; }
.two { display:grid; grid-template-columns:repeat(auto-fit,minmax(320px,1fr)); gap:12px 48px; }
.two .facts { align-content:start; } .two .facts dd { text-align:left; }
.runs { width:100%; }
.runs td { vertical-align:middle; }
.runs td.bar { width:150px; }
.runs td:nth-child(6), .runs td:nth-child(7), .runs td:nth-child(8) { white-space:nowrap; }
.runs svg { display:block; width:140px; height:18px; }
.runs .run { font-weight:600; } .runs .sub { font-weight:400; color:var(--soft); font-size:12.5px; }
.plain:not(.output) { max-width:1320px; margin:0 auto; padding:32px; overflow-x:auto; }
footer { color:var(--faint); font-size:12.5px; margin-top:28px; }
@media (max-width:1180px) { .hero { grid-template-columns:minmax(0,1fr); gap:20px; } }
@media (max-width:640px) {
  .scores td.bar, .scores th:last-child { display:none; }
  .scores td.name { white-space:normal; }
  .fvc-table td.sentence { min-width:12em; }
  .fvc-table td.broken { min-width:7em; overflow-wrap:anywhere; }
  .fvc-table td, .fvc-table th { padding-right:10px; }
  details.section > summary { flex-wrap:wrap; gap:4px 12px; }
  details.section > summary h2 { flex:1 1 calc(100% - 24px); }
  details.section > summary .file { margin-left:24px; }
}
@media (max-width:900px) {
  .page { grid-template-columns:minmax(0,1fr); }
  .plain:not(.output) { padding:20px; }
  nav.sections { position:static; max-height:none; padding:20px 20px 0; }
  main { padding:20px; }
.hero { grid-template-columns:minmax(0,1fr); gap:20px; }
.top { padding:10px 20px; flex-wrap:wrap; gap:4px 14px; }
.cells { padding-left:0; } }
@media print {
  .top { position:static; }
  nav.sections, details.code, noscript { display:none; }
  .page { display:block; }
  main { padding:0; }
  body { font-size:11pt; }
.output.text pre { max-height:none; }
.output table { font-size:8pt; } caption { white-space:normal; }
.output th, .output td { padding:3px 8px 3px 0; overflow-wrap:anywhere; white-space:normal; }
.figure, tr, .output.error { break-inside:avoid; }
details.section { break-before:auto; }
  details.section > summary::before { content:""; } .cells { padding-left:0; } @page { margin:16mm 14mm; } }
"""

SCRIPT = """
(() => {
  "use strict";
  const draw = (div) => {
    if (div.dataset.drawn) return;
    div.dataset.drawn = "yes";
    const spec = JSON.parse(document.getElementById(div.id + "-data").textContent);
    const buttons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]];
    const options = { displaylogo: false, responsive: false, modeBarButtons: buttons };
    const rearranged = forPhone(spec);
    const given = (key) => key.split(".").reduce((at, name) => (at || {})[name], spec.layout);
    const asItCame = rearranged && Object.fromEntries(Object.keys(rearranged).map((key) => [key, copied(given(key))]));
    Plotly.newPlot(div, spec.data, spec.layout, options).then(() => {
      if (rearranged) arrangements.set(div, { phone: rearranged, wide: asItCame });
      arrange(div, div.clientWidth);
      sizes.observe(div);
      div.on("plotly_click", (event) => choose(foldOf(event.points[0].data)));
      emphasise(div);
    });
  };
  // A click on a fold's curve or bar makes that fold stand out in every figure; a second click undoes it.
  let chosen = null;
  const foldOf = (trace) => (trace.meta && Number.isInteger(trace.meta.fold) ? trace.meta.fold : null);
  const emphasise = (div) => {
    const numbers = (div.data || []).map((trace, number) => (foldOf(trace) === null ? -1 : number))
      .filter((number) => number >= 0);
    if (numbers.length === 0 || (chosen === null && div.dataset.emphasised !== "yes")) return;
    div.dataset.emphasised = chosen === null ? "no" : "yes";
    const opacity = numbers.map((number) => (chosen === null || foldOf(div.data[number]) === chosen ? 1 : 0.15));
    Plotly.restyle(div, { opacity }, numbers);
  };
  const choose = (fold) => {
    if (fold === null) return;
    chosen = fold === chosen ? null : fold;
    figures.forEach(emphasise);
  };
  // Named rows with their numbers in a column leave a phone no room for the plot: there the names stand in the plot,
  // above their points, and the numbers below them.
  const phonePixels = 520;
  const arrangements = new WeakMap();
  const copied = (value) => (value === undefined ? null : JSON.parse(JSON.stringify(value)));
  const forPhone = ({ data, layout }) => {
    const beside = (note) => note.x === 1 && note.xref === "paper" && note.xanchor === "left";
    const isName = (y) => typeof (Array.isArray(y[0]) ? y[1][0] : y[0]) === "string";
    const rows = data.map((trace) => trace.y || []).filter(isName);
    if (rows.length === 0 || rows.length < data.length || !(layout.annotations || []).some(beside)) return null;
    const name = (y, row) => {
      const [place, text] = Array.isArray(y[0]) ? [row, y[1][0]] : [y[0], y[0]];
      const above = { y: place, yanchor: "bottom", yshift: 6, text: text.replace("<br>", " "), font: { size: 11 } };
      return { x: 0, xref: "paper", xanchor: "left", showarrow: false, bgcolor: "rgba(255,255,255,0.75)", ...above };
    };
    // Rows of two levels (slices) are low: a number below one would seem to be the next one's.
    const beyond = Array.isArray(rows[0][0]) ? { yanchor: "bottom", yshift: 6 } : { yanchor: "top", yshift: -5 };
    const numbers = layout.annotations.map((note) => (!beside(note) ? note : note.yref === "paper"
      ? { ...note, xanchor: "right", xshift: 0 }
      : { ...note, xanchor: "right", xshift: 0, ...beyond, font: { ...note.font, size: 11 } }));
    return copied({
      annotations: [...numbers, ...rows.map(name)], "margin.r": 12, "margin.l": 12,
      "yaxis.title": { text: "" }, "yaxis.showticklabels": false, "yaxis.ticks": "",
    });
  };
  const arrange = (div, width) => {
    const known = arrangements.get(div);
    const kind = width < phonePixels ? "phone" : "wide";
    if (!known || width <= 0 || (div.dataset.arranged || "wide") === kind) return;
    div.dataset.arranged = kind;
    Plotly.relayout(div, copied(known[kind]));
  };
  const widths = new WeakMap();
  const sizes = new ResizeObserver((entries) => entries.forEach(({ target, contentRect }) => {
    const width = Math.round(contentRect.width);
    if (width <= 0 || widths.get(target) === width) return;
    widths.set(target, width);
    Plotly.Plots.resize(target);
    arrange(target, width);
  }));
  const figures = [...document.querySelectorAll("div.figure")];
  // A figure is drawn when it comes near the window, which a figure in a closed section never does.
  const near = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (!entry.isIntersecting || entry.boundingClientRect.width === 0) return;
    near.unobserve(entry.target);
    draw(entry.target);
  }), { rootMargin: "600px" });
  figures.forEach((div) => near.observe(div));
  const all = (selector, open) => document.querySelectorAll(selector).forEach((item) => { item.open = open; });
  const reveal = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && target.tagName === "DETAILS") { target.open = true; target.scrollIntoView(); }
  };
  window.addEventListener("hashchange", reveal);
  document.querySelectorAll("nav.sections a").forEach((link) =>
    link.addEventListener("click", () => setTimeout(reveal)));
  document.querySelectorAll("button[data-toggle]").forEach((button) => button.addEventListener("click", () => {
    const open = button.dataset.open !== "yes";
    button.dataset.open = open ? "yes" : "no";
    button.textContent = (open ? button.dataset.on : button.dataset.off);
    all(button.dataset.toggle, open);
  }));
  // A page from a file may not write to the clipboard itself; copying what is selected it may.
  document.querySelectorAll("button[data-copy]").forEach((button) => button.addEventListener("click", () => {
    const range = document.createRange();
    range.selectNodeContents(document.getElementById(button.dataset.copy));
    const selection = getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
    button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
  }));
  window.addEventListener("beforeprint", () => { all("details.section", true); figures.forEach(draw); });
  reveal();
})();
"""


def style_sheet() -> str:
    """The whole style sheet, syntax colours included."""
    return _CSS + str(HtmlFormatter(style="default").get_style_defs(f".{CODE_CLASS}"))


def content_policy(scripts: tuple[str, ...]) -> str:
    """A Content-Security-Policy that runs exactly ``scripts`` and lets the page load nothing from any network.

    So a script that hides in a notebook's output is never run, and no image or font is fetched, whatever the HTML says.
    """
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes or chr(39) + 'none' + chr(39)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
    )
