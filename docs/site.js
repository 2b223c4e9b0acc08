// The theme's search dialog has no name for screen readers.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
// Blocks of code and wide tables scroll in boxes: the keyboard must reach them.
addEventListener("load", () => document.querySelectorAll(".md-typeset pre, .md-typeset__scrollwrap").forEach((box) => { box.tabIndex = 0; }));
