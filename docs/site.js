// The theme's search dialog has no name for screen readers.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
// The theme puts wide tables into boxes that scroll: the keyboard must reach them.
addEventListener("load", () => document.querySelectorAll(".md-typeset__scrollwrap").forEach((box) => { box.tabIndex = 0; }));
