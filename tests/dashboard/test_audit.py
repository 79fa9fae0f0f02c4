"""The audit log on the system page: entries, filters, older ones, export; only for admins."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page, expect

from monitor.audit.chain import record_of, verify_chain
from monitor.audit.log import Actor, AuditLog, Change
from monitor.web.auth.tokens import Tokens
from tests.support.dashboard_browser import Visit
from tests.support.web_only import WebAppServer


def log_in(page: Page, token: str) -> None:
    page.locator("input[name=token]").fill(token)
    page.get_by_role("button", name="Log in").click()
    page.locator(".page[data-shown]").wait_for()


def test_an_admin_reads_filters_and_exports_the_log(visit: Visit, tmp_path: Path) -> None:
    token = Tokens(tmp_path).add("eve", "admin")
    log = AuditLog(tmp_path)
    for n in range(30):
        actor = Actor("<b>ada</b>", "192.0.2.1", "api")
        log.append(Change(action="licences add", actor=actor, object=f"L{n}", status=201, details={"owner": "ACME"}))
    log.append(Change(action="licences add", actor=Actor("bob", None, "cli"), object="L99", result="failed"))
    visit.expected = ("401",)
    with WebAppServer(tmp_path) as server:
        page = visit(f"http://127.0.0.1:{server.port}", "system")
        log_in(page, token)
        panel = page.locator("section.panel", has=page.get_by_role("heading", name="Audit log"))
        rows = panel.locator("tbody tr")
        assert "sign in" in rows.nth(0).inner_text()  # our own
        assert "refused 401" in rows.nth(1).inner_text()  # the page before we logged in
        assert "L99" in rows.nth(2).inner_text()
        assert "<b>ada</b>" in rows.nth(3).inner_text()
        assert rows.count() == 25
        panel.get_by_role("button", name="Older entries").click()
        expect(rows).to_have_count(33)
        panel.get_by_label("Who").fill("bob")
        panel.get_by_role("button", name="Show").click()
        expect(rows).to_have_count(1)
        assert "failed" in rows.nth(0).inner_text()
        with page.expect_download() as download:
            panel.get_by_role("link", name="Export").click()
        lines = Path(download.value.path()).read_text().splitlines()
        assert verify_chain(map(record_of, lines)).n_entries == 33
        page.set_viewport_size({"width": 360, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.context.close()  # before the server, whose end the page would report


def test_others_do_not_see_it(visit: Visit, tmp_path: Path) -> None:
    token = Tokens(tmp_path).add("ada", "write")
    visit.expected = ("401",)
    with WebAppServer(tmp_path) as server:
        page = visit(f"http://127.0.0.1:{server.port}", "system")
        log_in(page, token)
        assert page.get_by_role("heading", name="Audit log").count() == 0
        page.context.close()
