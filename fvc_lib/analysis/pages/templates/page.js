(() => {
  "use strict";
  const draw = (div) => {
    if (div.dataset.drawn) return;
    div.dataset.drawn = "yes";
    if (typeof Plotly === "undefined") {
      div.style.height = "auto";
      if (!div.querySelector("img")) div.textContent = "This figure needs the file plotly.min.js, which is not where this page expects it.";
      return;
    }
    div.replaceChildren();
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
    });
  };
  // Named rows with their numbers in a column leave a phone no room for the plot: there the names stand in the plot,
  // above their points, and the numbers below or beside them.
  const phonePixels = 520;
  const arrangements = new WeakMap();
  const copied = (value) => (value === undefined ? null : JSON.parse(JSON.stringify(value)));
  const forPhone = ({ data, layout }) => {
    const beside = (note) => note.x === 1 && note.xref === "paper" && note.xanchor === "left";
    const rows = (layout.yaxis || {}).ticktext || [];
    if (!rows.length || rows.length !== data.length || !(layout.annotations || []).some(beside)) return broken(layout);
    const name = (text, y) => {
      const above = { y, yanchor: "bottom", yshift: 6, text: text.replace("<br>", " "), font: { size: 11 } };
      return { x: 0, xref: "paper", xanchor: "left", showarrow: false, bgcolor: "rgba(255,255,255,0.75)", ...above };
    };
    // A number below a low row would seem to be the next one's: it stands beside the name.
    const margin = { t: 84, b: 56, ...layout.margin };
    let rowPixels = (layout.height - margin.t - margin.b) / rows.length;
    // A long name and its number have no room on one line: higher rows have two.
    const isLong = (row, place) => row.length + layout.annotations.filter(beside)[place].text.length > mostLetters;
    const height = rowPixels < 42 && rows.some(isLong) ? layout.height + rows.length * (44 - rowPixels) : layout.height;
    if (height > layout.height) rowPixels = 44;
    const beyond = rowPixels < 42 ? { yanchor: "bottom", yshift: 6 } : { yanchor: "top", yshift: -5 };
    const numbers = layout.annotations.map((note) => (!beside(note) ? note : note.yref === "paper"
      ? { ...note, xanchor: "right", xshift: 0 }
      : { ...note, xanchor: "right", xshift: 0, ...beyond, font: { ...note.font, size: 11 } }));
    return copied({
      annotations: [...numbers, ...rows.map(name)], "margin.r": 12, "margin.l": 12,
      "yaxis.title": { text: "" }, "yaxis.showticklabels": false, "yaxis.ticks": "", "xaxis.tickangle": 0,
      height, autosize: true, ...broken(layout),  // a height alone would fix the width, too
    });
  };
  // A phone has no room for more letters below a plot: a longer title goes into two lines.
  const mostLetters = 42;
  const broken = (layout) => {
    const axes = Object.keys(layout).filter((name) => name.startsWith("xaxis"));
    const told = axes.map((name) => [`${name}.title.text`, (layout[name].title || {}).text || ""]);
    const long = told.filter(([, text]) => text.length > mostLetters && !text.includes("<"));
    const half = (text) => text.replace(new RegExp(`^(.{${Math.ceil(text.length / 2)}}\\S*) `), "$1<br>");
    return long.length === 0 ? null : Object.fromEntries(long.map(([key, text]) => [key, half(text)]));
  };
  const arrange = (div, width) => {
    const known = arrangements.get(div);
    const kind = width < phonePixels ? "phone" : "wide";
    if (!known || width <= 0 || (div.dataset.arranged || "wide") === kind) return;
    div.dataset.arranged = kind;
    if (known[kind].height) div.style.height = `${known[kind].height}px`;
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
  // One section is open at a time. Closing a long one moves the page, so the new one is brought into view.
  document.querySelectorAll("details.section > summary").forEach((head) =>
    head.addEventListener("click", () => setTimeout(() => head.scrollIntoView({ block: "nearest" }))));
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
  window.addEventListener("beforeprint", () => { document.querySelectorAll("details.section").forEach((item) => item.removeAttribute("name")); all("details.section", true); figures.forEach(draw); });
  reveal();
})();
