(() => {
  "use strict";
  const data = document.getElementById("videos-data");
  if (!data) return;
  const { rows, frames, page: size } = JSON.parse(data.textContent);
  const at = (id) => document.getElementById("videos-" + id);
  const [body, search, show, told, picture] = ["body", "search", "show", "told", "picture"].map(at);
  const heads = [...document.querySelectorAll("#videos th[data-column]")];
  const columns = { path: 0, label: 1, score: 2, spread: 3, threshold: 4, fold: 5, group: 6, right: 7 };
  let sorted = null, down = false, page = 0, found = [];
  const text = rows.map((row) => (row[columns.path] + " " + row[columns.group] + " " + row[columns.label]).toLowerCase());
  const find = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = show.value === "all" ? null : show.value === "right" ? 1 : 0;
    found = rows.map((_, place) => place).filter((place) =>
      (wanted === null || rows[place][columns.right] === wanted) && words.every((word) => text[place].includes(word)));
    if (sorted !== null) {
      const sign = down ? -1 : 1;
      const isText = sorted === columns.path || sorted === columns.label || sorted === columns.group;
      const compared = isText ? new Intl.Collator("en", { numeric: true }).compare : (a, b) => a - b;
      const value = (place) => rows[place][sorted];
      // What is not known comes last either way; among equals the order is that of the mistakes.
      found.sort((a, b) => (value(a) === null) - (value(b) === null)
        || (value(a) === null ? 0 : sign * compared(value(a), value(b))) || a - b);
    }
    page = 0;
    draw();
  };
  const number = (value) => (value === null ? "\u2013" : value.toFixed(3));
  const draw = () => {
    hide();
    const last = Math.max(0, Math.ceil(found.length / size) - 1);
    page = Math.min(Math.max(page, 0), last);
    body.replaceChildren(...found.slice(page * size, (page + 1) * size).map(line));
    const first = page * size + 1, end = Math.min(found.length, (page + 1) * size);
    told.textContent = found.length === 0 ? "No video is like that."
      : `${first.toLocaleString("en")} to ${end.toLocaleString("en")} of ${found.length.toLocaleString("en")} videos`;
    for (const [id, off] of [["first", page === 0], ["back", page === 0], ["next", page === last], ["last", page === last]]) {
      at(id).disabled = off;
    }
    for (const head of heads) {
      const own = columns[head.dataset.column] === sorted;
      head.setAttribute("aria-sort", own ? (down ? "descending" : "ascending") : "none");
    }
  };
  const line = (place) => {
    const row = rows[place], made = document.createElement("tr");
    const cell = (content, kind) => {
      const td = document.createElement("td");
      td.className = kind;
      td.append(content);
      made.append(td);
    };
    let name = row[columns.path];
    if (frames[place]) {
      name = document.createElement("button");
      name.textContent = row[columns.path];
      name.setAttribute("aria-label", row[columns.path] + ": show frames");
      name.addEventListener("focus", () => reveal(place, made));
      name.addEventListener("click", () => reveal(place, made));
      name.addEventListener("blur", hide);
      made.addEventListener("mouseenter", () => reveal(place, made));
      made.addEventListener("mouseleave", hide);
    }
    cell(name, "path");
    cell(row[columns.label], "label");
    const isRight = row[columns.right] === 1;
    cell(isRight ? "right" : "wrong", isRight ? "right" : "wrong");
    for (const column of ["score", "spread", "threshold"]) cell(number(row[columns[column]]), "number " + column);
    cell(String(row[columns.fold]), "number fold");
    cell(row[columns.group], "group");
    return made;
  };
  const reveal = (place, beside) => {
    const box = beside.getBoundingClientRect();
    picture.src = "data:image/jpeg;base64," + frames[place];
    picture.alt = "frames of " + rows[place][columns.path];
    picture.hidden = false;
    const above = box.bottom + 110 > window.innerHeight;
    picture.style.top = (above ? Math.max(0, box.top - 100) : box.bottom + 4) + "px";
    picture.style.left = Math.max(8, Math.min(box.left + 24, window.innerWidth - 460)) + "px";
  };
  const hide = () => { picture.hidden = true; };
  for (const head of heads) {
    head.querySelector("button").addEventListener("click", () => {
      const column = columns[head.dataset.column];
      // Once up, once down, then as it came: mistakes first.
      if (column !== sorted) [sorted, down] = [column, false];
      else if (!down) down = true;
      else [sorted, down] = [null, false];
      find();
    });
  }
  const turn = (to) => () => { page = to(); draw(); };
  at("first").addEventListener("click", turn(() => 0));
  at("back").addEventListener("click", turn(() => page - 1));
  at("next").addEventListener("click", turn(() => page + 1));
  at("last").addEventListener("click", turn(() => Infinity));
  search.addEventListener("input", find);
  show.addEventListener("change", find);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  document.addEventListener("scroll", hide, { passive: true });
  find();
})();
