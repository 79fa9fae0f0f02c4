"""A browser that visits the dashboard, and a demo process to look at."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

from playwright.sync_api import Browser, BrowserContext, Page

from tests.support.serve_process import die_with_parent
from tests.support.web_server import Client

PAGES = ("live", "alerts", "references", "licences", "system")
TIMEOUT_MS = 60_000  # for a busy machine; usually a few seconds suffice
HOSTILE_TITLE = """<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'">{{7*7}}"""
FORMULA = "=HYPERLINK(1)"


class Visit:
    """Opens pages of the dashboard and collects the errors and warnings of their browser."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self.errors: list[str] = []
        self.expected: tuple[str, ...] = ()  # parts of errors that the test provokes

    def __call__(self, address: str, page_name: str = "live", *, width: int = 1280, **options: object) -> Page:
        """Opens this page of the dashboard in a new browser context, logged in if the address is a printed link."""
        address, _, secret = address.partition("/#secret=")
        context = self._browser.new_context(viewport={"width": width, "height": 900}, **options)  # type: ignore[arg-type]
        context.set_default_timeout(TIMEOUT_MS)
        self._contexts.append(context)
        if secret:
            data = {"token": secret}
            assert context.request.post(f"{address}/api/v1/session", data=data, headers={"Origin": address}).ok
        page = context.new_page()
        page.on(
            "console",
            lambda message: self.errors.append(message.text) if message.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", lambda dialog: self.errors.append(f"dialog: {dialog.message}"))
        self._page, self._address = page, address
        page.goto(f"{address}/#/{page_name}")
        return page

    def show(self, page_name: str) -> None:
        """Goes to another page and waits until it is completely drawn."""
        self._page.goto(f"{self._address}/#/{page_name}")
        self._page.locator(".page[data-shown]").wait_for()

    def close(self) -> None:
        """Fails the test if the browser reported an unexpected error."""
        for context in self._contexts:
            context.close()
        unexpected = [error for error in self.errors if not any(words in error for words in self.expected)]
        assert unexpected == []


class DemoProcess:
    """`copywatch demo` as a user runs it, until Ctrl-C."""

    def __init__(self, data_dir: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "monitor.cli", "demo", "--data-dir", str(data_dir)],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
            env={name: value for name, value in os.environ.items() if not name.startswith("COPYWATCH_")},
        )
        assert self.process.stdout
        line = ""
        for line in self.process.stdout:
            if "dashboard" in line:
                break
        found = re.search(r"dashboard (http://127\.0\.0\.1:\d+)/#secret=([\w-]+)", line)
        assert found, line
        self.address, self.secret = found.groups()
        self.link = f"{self.address}/#secret={self.secret}"
        self._rest = threading.Thread(target=self.process.stdout.read, daemon=True)  # so that it never blocks
        self._rest.start()
        self.client = Client(self.address, {"Authorization": f"Bearer {self.secret}"})
