"""The page on which anybody drops a video: two visitors, a hostile name, a broken file, a closed tab, a killed server.

What is dropped is judged, its page is read and downloaded, nothing of it stays, and the network is asked nothing.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from fvc_lib.services.records.digests import write_document
from tests.browser.chromium import SENTINEL, Watched
from tests.kits.scored_run import trained_run, write_video
from tests.kits.training import draw_clip

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
HOSTILE = f"<img src=x onerror=window.{SENTINEL}=1>.mp4"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verdict_page")
    write_document(trained_run(folder).run_json, {})
    (folder / "inbox").mkdir()
    write_video(folder / "inbox" / HOSTILE, draw_clip("new", 0, True))
    write_video(folder / "inbox" / "holiday.mp4", np.flip(draw_clip("other", 0, False), -1))
    (folder / "inbox" / "broken.mp4").write_bytes(b"no video" * 1000)
    return folder


def start(home: Path) -> tuple[subprocess.Popen[str], str]:
    """Start the command; return its process and the page's address as it prints it."""
    command = [sys.executable, str(ROOT / "run_notebooks.py"), "app", "latest", "--port", "0"]
    command += ["--limit-mb", "1", "--map-minutes", "0"]
    environment = {**os.environ, "FVC_RUNS_DIR": str(home / "runs"), "HOME": str(home), "JUPYTER_CONFIG_DIR": str(home)}
    with (home / "page.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.fullmatch(r"address\s+(\S+)\n", line):
            return process, found.group(1)
    raise AssertionError((home / "page.log").read_text())


def uploads(home: Path) -> list[Path]:
    return list((home / "cache" / "scoring").glob("*/*"))


@pytest.fixture(scope="module")
def address(home: Path) -> Iterator[str]:
    process, found = start(home)
    yield found
    process.terminate()
    process.communicate(timeout=120)
    assert not list((home / "cache" / "scoring").glob("*")), "nothing that was dropped stays"


def drop(watched: Watched, *files: Path) -> None:
    watched.page.wait_for_selector(".drop")
    watched.page.set_input_files(".drop input", [str(file) for file in files])


def answer(watched: Watched, name: str) -> str:
    """Return the text of a file's card once it is judged."""
    card = watched.page.locator("article", has=watched.page.get_by_role("heading", name=name, exact=True))
    card.locator(".badge", has_text=re.compile("^(It looks fake|It looks real|We cannot tell|Not judged)$")).wait_for()
    return card.inner_text()


def test_two_visitors_drop_videos_read_their_pages_and_ask_nothing_of_the_network(open_page, address, home):
    own = address.partition("?")[0]
    one, other = (open_page(address, own, window) for window in ((1240, 900), (390, 800)))
    drop(one, home / "inbox" / HOSTILE, home / "inbox" / "broken.mp4")
    drop(other, home / "inbox" / "holiday.mp4")
    assert "Score" in answer(other, "holiday.mp4")
    assert "Score" in answer(one, HOSTILE)
    broken = answer(one, "broken.mp4")
    assert "We cannot tell" in broken
    assert "unreadable" in broken
    assert one.page.locator("article").count() == 2, "a visitor sees nobody else's videos"

    with other.page.context.expect_page() as opening:
        other.page.get_by_text("Read the page").click()
    page = opening.value
    page.wait_for_load_state()
    assert "holiday.mp4" in page.title()
    assert page.get_by_text("all verdicts").count() == 0
    one.page.get_by_text("Keep the page").wait_for()
    with one.page.expect_download() as kept:
        one.page.get_by_text("Keep the page").click()
    html = Path(kept.value.path()).read_text()
    assert kept.value.suggested_filename.endswith(".verdict.html")
    assert "<img src=x" not in html
    assert str(home) not in html, "a page that is sent around names no place of this machine"
    page.close()
    for watched in (one, other):
        assert watched.trouble() == []
        assert watched.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_file_beyond_the_limit_is_refused_and_nobody_enters_without_the_token(chromium, open_page, address, home):
    large = home / "inbox" / "large.mp4"
    large.write_bytes(b"\0" * 1_000_001)
    watched = open_page(address, address.partition("?")[0])
    drop(watched, large)
    assert "larger than this page takes" in answer(watched, "large.mp4")
    stranger = chromium.new_context()
    got = stranger.request.get(address.partition("?")[0])
    assert got.status == 403
    assert "Drop videos" not in got.text()


def test_a_closed_tab_and_a_killed_server_leave_nothing(open_page, home):
    process, address = start(home)
    watched = open_page(address, address.partition("?")[0])
    drop(watched, *[home / "inbox" / "holiday.mp4"] * 3)
    watched.page.locator("article", has_text="judging").first.wait_for()
    watched.page.close()
    while uploads(home):
        time.sleep(0.05)
    other = open_page(address, address.partition("?")[0])
    drop(other, *[home / "inbox" / "holiday.mp4"] * 3)
    other.page.locator("article", has_text="judging").first.wait_for()
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(children, timeout=120)
    assert alive == []
    other.page.get_by_text("lost its server").wait_for()
    second, _ = start(home)  # it deletes what the killed one left
    assert uploads(home) == []
    second.terminate()
    second.communicate(timeout=120)
