import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from fvc_lib.analysis.figures.results import controls_figure
from fvc_lib.analysis.figures.roc_and_calibration import roc_figure
from fvc_lib.analysis.figures.training import learning_curves_figure
from fvc_lib.analysis.pages.display import figure_bundle
from fvc_lib.analysis.pages.report import write_report, write_run_report
from fvc_lib.analysis.pages.runs_index import write_runs_index
from fvc_lib.analysis.read import queries
from fvc_lib.analysis.read.headline import run_headline
from fvc_lib.services.atomic_files import write_json
from fvc_lib.services.run_paths import RunPaths

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Loads(HTMLParser):
    """Everything in a page that makes a browser fetch something, and its sections and buttons."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.styles = ""
        self.open_sections: list[bool] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        loading = ("src", "srcset", "poster", "data", "background", "xlink:href", "action")
        self.loads += [values[name] for name in loading if name in values]
        if tag in ("link", "base", "image", "use") and "href" in values:
            self.loads.append(values["href"])
        self.styles += values.get("style", "")
        self._in_style = tag == "style"
        if tag == "details" and values.get("class") == "section":
            self.open_sections.append("open" in values)

    def handle_data(self, data: str) -> None:
        self.styles += data if self._in_style else ""
        self._in_style = False


def parse(path: Path) -> Loads:
    parser = Loads()
    parser.feed(path.read_text(encoding="utf-8"))
    return parser


def assert_offline(path: Path) -> None:
    page = parse(path)
    assert [load for load in page.loads if not load.startswith("data:")] == []
    assert "@import" not in page.styles
    assert "url(" not in page.styles.replace("url(data:", "")


def save(path: Path, *cells: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nbformat.writes(new_notebook(cells=list(cells))), encoding="utf-8")
    return path


def shown(*bundles: dict) -> object:
    return new_code_cell("show()", outputs=[new_output("display_data", data=bundle) for bundle in bundles])


@pytest.fixture
def notebooks(run: RunPaths) -> list[Path]:
    predictions = queries.predictions([run]).frame
    results = [controls_figure(queries.results([run]).frame), roc_figure(predictions, replicates=20)]
    curves = learning_curves_figure(queries.learning_curves([run]).frame)
    return [
        save(
            run.executed_notebook("05_kfold_results"),
            new_markdown_cell("# Results <b>\n\n$a<b$"),
            shown(*map(figure_bundle, results)),
        ),
        save(
            run.executed_notebook("06_analysis_dashboard"), new_markdown_cell("# Curves"), shown(figure_bundle(curves))
        ),
        save(run.executed_notebook("02_folds"), new_markdown_cell("# Folds\n\n[a link](https://example.org/x)")),
    ]


def test_the_report_holds_everything_and_loads_nothing(run: RunPaths, notebooks: list[Path]) -> None:
    write_report(notebooks, run.report_html, title="T <script>alert(1)</script>", headline=run_headline(run))
    html = run.report_html.read_text(encoding="utf-8")
    assert_offline(run.report_html)
    assert html.count("* plotly.js v") == 1
    assert html.count('<div class="figure"') == 3
    assert "T &lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<script>alert" not in html
    assert parse(run.report_html).open_sections == [True, False, False]
    score = run_headline(run).model_score
    for text in (f"{score.value:.3f}", f"{score.low:.3f}, {score.high:.3f}", "above control", "795 MB", "3 min 05 s"):
        assert text in html, text


def test_the_same_notebooks_give_the_same_bytes(run: RunPaths, notebooks: list[Path]) -> None:
    write_report(notebooks, run.report_html, title="T", headline=run_headline(run))
    first = run.report_html.read_bytes()
    write_report(notebooks, run.report_html, title="T", headline=run_headline(run))
    assert run.report_html.read_bytes() == first


def test_one_notebook_alone_without_figures_is_small(run: RunPaths, notebooks: list[Path]) -> None:
    output = run.reports / "02_folds.html"
    write_report(notebooks[2:], output, title="Folds")
    assert_offline(output)
    assert output.stat().st_size < 60_000
    assert "https://example.org/x" in output.read_text(encoding="utf-8")  # a link to follow is no load


def test_a_failed_run_says_so_first_and_opens_the_failed_section(run: RunPaths, notebooks: list[Path]) -> None:
    error = new_output("error", ename="ValueError", evalue="<no> codec", traceback=["\x1b[31mValueError\x1b[0m"])
    failed = save(
        run.partial_notebook("03_augmentation"), new_markdown_cell("# A"), new_code_cell("x", outputs=[error])
    )
    stages = {"03_augmentation": {"state": "failed", "error": {"name": "ValueError", "message": "<no> codec"}}}
    write_json(run.status_json, {"state": "failed", "stages": stages})
    write_report([*notebooks, failed], run.report_html, title="T", headline=run_headline(run))
    html = run.report_html.read_text(encoding="utf-8")
    assert "The run is not complete (state: failed)." in html
    assert html.count("ValueError: &lt;no&gt; codec") == 3  # the alarm, the section's, and the output itself
    assert parse(run.report_html).open_sections == [True, False, False, True]


def test_the_index_lists_every_run_and_links_what_is_there(make_run: Callable[..., RunPaths]) -> None:
    runs = [
        make_run(),
        make_run(experiment="a b#<i>'%", name="run_20250401_000000_?x", seed=4, skill=0.1),
        make_run(name="run_20250402_000000_new"),
    ]
    for path in (runs[2].results, runs[2].status_json):
        path.unlink()
    for run in runs[:2]:
        run.report_html.write_text("<p>here</p>")
    index = write_runs_index(runs[0].root.parent.parent)
    html = index.read_text(encoding="utf-8")
    assert_offline(index)
    links = re.findall(r'<a href="([^"]+)"', html)
    assert links == ["a%20b%23%3Ci%3E%27%25/run_20250401_000000_%3Fx/report.html", f"demo/{runs[0].run_id}/report.html"]
    assert html.index("_new") < html.index("_?x") < html.index(runs[0].run_id)
    assert "a b#&lt;i&gt;&#39;%" in html
    assert html.count("not above control</span>") == 1
    assert "<script" not in html


def test_the_index_of_an_empty_folder_says_so(tmp_path: Path) -> None:
    assert "No run has been started here yet" in write_runs_index(tmp_path).read_text(encoding="utf-8")


class Browser:
    """Chromium without a window: the page after its scripts have run, and what it had to complain about."""

    def __init__(self, profile: Path) -> None:
        self._profile = profile

    def open(
        self, path: Path, size: str = "1300,2600", until: Callable[[str], bool] = lambda dom: True
    ) -> tuple[str, list[str]]:
        """On a busy machine a page's time may be over before the last frame was drawn: ``until`` gives it more."""
        for budget_ms in (8000, 60_000, 240_000):
            dom, complaints = self._opened(path, size, budget_ms)
            if until(dom):
                break
        return dom, complaints

    def _opened(self, path: Path, size: str, budget_ms: int) -> tuple[str, list[str]]:
        command = [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-dev-shm-usage", f"--user-data-dir={self._profile}", f"--window-size={size}",
            f"--virtual-time-budget={budget_ms}", "--enable-logging=stderr", "--dump-dom", path.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, timeout=120, check=True)
        log = done.stderr.decode("utf-8", "replace")
        return done.stdout.decode("utf-8", "replace"), [line for line in log.splitlines() if "CONSOLE" in line]


def is_drawn(html: str) -> bool:
    """Whether plotly has drawn a figure in it."""
    return 'class="main-svg"' in html


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: the page is not looked at in a browser")
    return Browser(tmp_path / "profile")


@pytest.fixture
def canary() -> Iterator[tuple[str, list[str]]]:
    """The address of a server, and every path it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.long
def test_a_browser_draws_every_figure_without_complaint(run: RunPaths, notebooks: list[Path], browser: Browser) -> None:
    write_report(notebooks, run.report_html, title="T", headline=run_headline(run))
    shut, complaints = browser.open(run.report_html, until=lambda dom: dom.count('<svg class="main-svg"') >= 2)
    assert complaints == []
    assert shut.count('<svg class="main-svg"') >= 2
    assert 'id="s2-figure-1-data"' in shut
    assert not re.search(r'id="s2-figure-1" [^>]*data-drawn', shut)  # its section is closed
    opened = run.root / "opened.html"
    html = run.report_html.read_text(encoding="utf-8")
    opened.write_text(html.replace('<details class="section"', '<details open class="section"'), encoding="utf-8")

    def figures(dom: str) -> list[str]:
        names = ("s1-figure-1", "s1-figure-2", "s2-figure-1")
        return [dom.split(f'id="{name}"', 1)[1].split(f'id="{name}-data"', 1)[0] for name in names]

    dom, complaints = browser.open(opened, "1300,5000", until=lambda dom: all(map(is_drawn, figures(dom))))
    assert complaints == []
    for figure in figures(dom):
        assert is_drawn(figure)
        width = re.search(r'class="main-svg"[^>]* width="(\d+)', figure)
        assert width
        assert 700 < int(width[1]) < 1300


def test_a_browser_runs_and_fetches_nothing_that_a_notebook_smuggled_in(
    run: RunPaths, browser: Browser, canary: tuple[str, list[str]]
) -> None:
    address, asked = canary
    smuggled = (
        f"<img src='{address}/img.png'><script>document.title='owned'</script><script src='{address}/x.js'></script>"
        f"<link rel=stylesheet href='{address}/x.css'><style>@import '{address}/y.css';</style>"
        f"<p style=\"background:url('{address}/bg.png')\">x</p><iframe src='{address}/frame'></iframe>"
    )
    figure = {
        "data": [{"y": [1, 2]}],
        "layout": {"images": [{"source": f"{address}/plot.png", "x": 0, "y": 1, "sizex": 1, "sizey": 1}]},
    }
    cells = [
        new_markdown_cell(f"# N\n\n{smuggled}\n\n![x]({address}/md.png)"),
        shown({"text/html": smuggled}, {"application/javascript": "document.title='owned'"}),
        shown({"image/svg+xml": f"<svg xmlns='http://www.w3.org/2000/svg'><image href='{address}/svg.png'/></svg>"}),
        shown({"application/vnd.plotly.v1+json": figure}),
    ]
    write_report([save(run.executed_notebook("05_kfold_results"), *cells)], run.report_html, title="honest")
    dom, _ = browser.open(run.report_html, until=is_drawn)
    assert asked == []
    assert "<title>honest</title>" in dom
    assert is_drawn(dom)


@pytest.mark.long
def test_a_browser_shows_a_record_and_the_index_from_files_and_asks_nobody_for_anything(
    run: RunPaths, notebooks: list[Path], browser: Browser, canary: tuple[str, list[str]]
) -> None:
    address, asked = canary
    with_image = new_markdown_cell(f"# Curves\n\n![x]({address}/md.png)\n\n[a link]({address}/link)")
    curves = learning_curves_figure(queries.learning_curves([run]).frame)
    save(run.executed_notebook("06_analysis_dashboard"), with_image, shown(figure_bundle(curves)))
    write_run_report(run)
    write_runs_index(run.root.parent.parent)
    record, complaints = browser.open(run.record_html("06_analysis_dashboard"), until=is_drawn)
    assert complaints == []
    assert record.count('<svg class="main-svg"') >= 1
    assert '<a href="../../report.html">' in record
    index, complaints = browser.open(run.root.parent.parent / "index.html")
    assert complaints == []
    assert run.run_id in index
    for key in ("02_folds", "05_kfold_results", "06_analysis_dashboard"):
        assert f'href="demo/{run.run_id}/notebooks/reports/{key}.html">{key[:2]}</a>' in index
    assert asked == []
