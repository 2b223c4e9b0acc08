"""A picture of any page, for people who review one: ``python -m tests.browser.look PAGE PICTURE.png``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.browser.chromium import CHROMIUM, open_chromium, open_page
from tests.browser.offline import draw_all, draw_open


def main() -> int:
    """Open the page, wait until it is quiet, and say what it complained about."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", help="a file or an address")
    parser.add_argument("picture", type=Path, help="a .png of the whole page, or a .pdf of it as printed")
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--open", action="store_true", help="open all sections")
    given = parser.parse_args()
    if CHROMIUM is None:
        parser.error("there is no chromium on this machine; on Debian: apt-get install chromium")
    address = Path(given.page).resolve().as_uri() if Path(given.page).exists() else given.page
    with open_chromium() as browser:
        watched = open_page(browser, home=address.split("?")[0], window=(given.width, given.height))
        watched.page.goto(address, wait_until="networkidle")
        # A figure is drawn when it is come near to, which a picture of the whole page and one on paper never do.
        (draw_all if given.open or given.picture.suffix == ".pdf" else draw_open)(watched.page)
        if given.picture.suffix == ".pdf":
            watched.page.pdf(path=given.picture, prefer_css_page_size=True)
        else:
            watched.save(given.picture)
        trouble = watched.trouble()
    print("\n".join(trouble) or "nothing to complain about", file=sys.stderr)
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main())
