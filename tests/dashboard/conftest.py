"""A real browser, and what it looks at: a running demo, and `serve` with titles that are made to do harm.

A page whose browser complained (a script's error, a breach of the policy, an address that is not there) fails its test.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from monitor.demo.media import Media
from reference_db.registration import register
from reference_db.store.catalog import Catalog
from tests.support.recorded_channel import RecordedChannel
from tests.support.serve_process import dies_with_us
from tests.support.web_server import Client, Serving

PLACES = ("live", "alerts", "references", "licences", "system")
PATIENCE_MS = 60_000  # a busy machine; what is waited for comes in a few seconds
HOSTILE = """<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'">{{7*7}}"""
FORMULA = "=HYPERLINK(1)"
# No network but ours, no GPU, and no sandbox: tests may run as root in a container.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")  # no longer than its tests: Playwright has an event loop run in this thread
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium, "The dashboard's tests need Chromium; on Debian: sudo apt-get install chromium"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield started
        started.close()


class Visit:
    """Opens pages and hears what their browser complains of."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self.complaints: list[str] = []
        self.expected: tuple[str, ...] = ()  # words of complaints that belong to the test

    def __call__(self, address: str, place: str = "live", *, width: int = 1280, **options: object) -> Page:
        """The page at this place of the dashboard, shown."""
        context = self._browser.new_context(viewport={"width": width, "height": 900}, **options)  # type: ignore[arg-type]
        context.set_default_timeout(PATIENCE_MS)
        self._contexts.append(context)
        page = context.new_page()
        page.on(
            "console", lambda said: self.complaints.append(said.text) if said.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        self._page, self._address = page, address
        page.goto(f"{address}/#/{place}")
        return page

    def show(self, place: str) -> None:
        """Goes to another place and waits until all of it is there."""
        self._page.goto(f"{self._address}/#/{place}")
        self._page.locator(".page[data-shown]").wait_for()

    def close(self) -> None:
        for context in self._contexts:
            context.close()
        unexpected = [said for said in self.complaints if not any(words in said for words in self.expected)]
        assert unexpected == []


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    made = Visit(browser)
    yield made
    made.close()


class Demo:
    """`copywatch demo` as a user runs it, until Ctrl-C."""

    def __init__(self, data_dir: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "monitor.cli", "demo", "--data-dir", str(data_dir)],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=dies_with_us,
            env={name: value for name, value in os.environ.items() if not name.startswith("COPYWATCH_")},
        )
        assert self.process.stdout
        said = ""
        for said in self.process.stdout:
            if "dashboard" in said:
                break
        found = re.search(r"dashboard (http://127\.0\.0\.1:\d+)", said)
        assert found, said
        self.address = found.group(1)
        self._rest = threading.Thread(target=self.process.stdout.read, daemon=True)  # so that it never waits for us
        self._rest.start()
        self.client = Client(self.address)


@pytest.fixture(scope="session")
def demo(made: Media, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    data_dir = tmp_path_factory.mktemp("shown")
    shutil.copytree(made.folder, data_dir / "demo" / made.folder.name)
    running = Demo(data_dir)
    yield running
    running.process.send_signal(2)  # Ctrl-C
    assert running.process.wait(60) in (0, 1)  # 1: a busy machine missed something of the first airing


@pytest.fixture(scope="session")
def hostile(recorded: RecordedChannel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A channel that aired a film whose title is markup and whose owner is a formula, one that cannot be reached."""
    folder = tmp_path_factory.mktemp("hostile")
    with Catalog.open(folder / "data", write=True) as catalog:
        film = recorded.settings.data_dir.parent / "harbour.mp4"
        register(film, catalog, recorded.models.encoder, id="film", title=HOSTILE, owner=FORMULA)
    running = Serving(_config(folder, channels=recorded.recording))
    running.wait_for("the stream ended")
    yield running
    assert running.stop() == 0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], Serving]]:
    """Starts `serve` with nothing in it at a port, as often as asked."""
    started: list[Serving] = []

    def begin(port: int) -> Serving:
        started.append(Serving(_config(tmp_path, port=port)))
        return started[-1]

    yield begin
    for one in started:
        one.kill()


def _config(folder: Path, *, port: int = 0, channels: Path | None = None) -> Path:
    config = folder / "copywatch.yaml"
    config.write_text(f"data_dir: data\nweb: {{port: {port}}}\n")
    if channels:
        with config.open("a") as more:
            more.write(f'channels:\n  - {{name: works, url: "{channels}", mode: exact}}\n')
            more.write('  - {name: broken, url: "http://127.0.0.1:9/nothing.m3u8"}\n')
    return config
