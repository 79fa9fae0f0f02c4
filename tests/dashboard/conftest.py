"""A real browser, and the servers it visits: a running demo, and `serve` with a hostile title.

A test fails if the browser reports an error: a script's error, a breach of the policy, a missing file.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from monitor.demo.media import Media
from reference_db.registration import register
from reference_db.store.catalog import Catalog
from tests.support.dashboard_browser import FORMULA, HOSTILE_TITLE, DemoProcess, Visit
from tests.support.recorded_channel import RecordedChannel
from tests.support.web_server import MonitorServer

# No network of its own, no GPU, and no sandbox: tests may run as root in a container.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")  # not longer than its tests: Playwright runs an event loop in this thread
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium, "The dashboard's tests need Chromium; on Debian: sudo apt-get install chromium"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    opened = Visit(browser)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def demo(demo_media: Media, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoProcess]:
    data_dir = tmp_path_factory.mktemp("demo-data")
    shutil.copytree(demo_media.folder, data_dir / "demo" / demo_media.folder.name)
    running = DemoProcess(data_dir)
    yield running
    running.process.send_signal(2)  # Ctrl-C
    assert running.process.wait(60) in (0, 1)  # 1: a busy machine missed a copy of the first broadcast


@pytest.fixture(scope="session")
def hostile(recorded: RecordedChannel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MonitorServer]:
    """`serve` with a copy of a film whose title is markup and whose owner is a formula, and an unreachable channel."""
    folder = tmp_path_factory.mktemp("hostile")
    with Catalog.open(folder / "data", write=True) as catalog:
        film = recorded.settings.data_dir.parent / "harbour.mp4"
        register(film, catalog, recorded.models.encoder, id="film", title=HOSTILE_TITLE, owner=FORMULA)
    running = MonitorServer(_config(folder, channels=recorded.recording))
    running.wait_for("the stream ended")
    yield running
    assert running.stop() == 0


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[[int], MonitorServer]]:
    """Starts an empty `serve` at a port."""
    started: list[MonitorServer] = []

    def start(port: int) -> MonitorServer:
        started.append(MonitorServer(_config(tmp_path, port=port)))
        return started[-1]

    yield start
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
