"""The dashboard with a hostile title, a lost connection, a login and an empty library; accessibility of all pages."""

from __future__ import annotations

import csv
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from monitor.config.settings import ChannelSettings
from monitor.web.auth.tokens import Tokens
from tests.support.dashboard_browser import FORMULA, HOSTILE_TITLE, PAGES, TIMEOUT_MS, Visit
from tests.support.web_only import WebAppServer
from tests.support.web_server import MonitorServer

expect.set_options(timeout=TIMEOUT_MS)

READABLE = (Path(__file__).parents[1] / "support/readable.js").read_text()


def test_markup_in_a_title_stays_text(hostile: MonitorServer, visit: Visit) -> None:
    page = visit(hostile.link, "alerts")
    expect(page.locator(".card .title").first).to_have_text(HOSTILE_TITLE)
    page.locator(".card .title").first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(HOSTILE_TITLE)
    expect(page.locator(".timelines .lane").last).to_have_text(f"Reference: {HOSTILE_TITLE}")
    page.goto(f"{hostile.address}/#/references")
    expect(page.locator(".ref-name strong")).to_have_text(HOSTILE_TITLE)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img[src=x]").count() == 0


def test_a_formula_in_a_table_stays_text(hostile: MonitorServer, visit: Visit) -> None:
    page = visit(hostile.link, "alerts")
    with page.expect_download() as downloading:
        page.get_by_role("button", name="CSV").click()
    (line,) = csv.DictReader(downloading.value.path().read_text().splitlines())
    assert (line["owner"], line["title"]) == (f"'{FORMULA}", HOSTILE_TITLE)


def test_the_policy_stops_injected_scripts(hostile: MonitorServer, visit: Visit) -> None:
    visit.expected = ("This document requires 'Trusted", "Content Security Policy")
    page = visit(hostile.link)
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    for attempt in (
        "document.body.innerHTML = '<b>x</b>'",
        "document.body.setAttribute('onclick', 'window.hacked = 1')",
        "document.body.append(Object.assign(document.createElement('script'), { text: 'window.hacked = 1' }))",
    ):
        assert (
            page.evaluate(f"() => {{ try {{ {attempt}; return 'done' }} catch {{ return 'refused' }} }}") == "refused"
        )
    assert page.evaluate("window.hacked") is None


def test_channels_that_need_attention_come_first(hostile: MonitorServer, visit: Visit) -> None:
    page = visit(hostile.link)
    expect(page.locator(".tile .state")).to_have_text(["Failed", "Ended"])
    expect(page.locator(".lead")).to_contain_text("1 needs attention")
    expect(page.locator(".tile").first).to_contain_text("refuses the connection; check host and port")


def test_a_channel_with_nothing_behind_its_address_is_not_found(tmp_path: Path, visit: Visit) -> None:
    with WebAppServer(tmp_path) as server:
        server.channels = [ChannelSettings(name="five", url="http://192.0.2.1/x.m3u8")]
        reason = "http://192.0.2.1 has nothing at this address (404); check the path"
        server.context.metrics.channels.of("five").enter("denied", reason, "missing")
        page = visit(server.context.local_secret.link(f"http://127.0.0.1:{server.port}"))
        expect(page.locator(".tile .state")).to_have_text("Not found")
        expect(page.locator(".tile")).to_contain_text(reason)
        page.goto("about:blank")  # ends its stream of events before the server ends


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_and_controls_have_names(hostile: MonitorServer, visit: Visit, scheme: str) -> None:
    page = visit(hostile.link, color_scheme=scheme)
    alert = hostile.client().get("/alerts")["items"][0]["id"]
    for name in (*PAGES, f"alerts/{alert}"):
        visit.show(name)
        assert (name, page.evaluate(READABLE)) == (name, [])


def test_pictures_are_shown_whole_and_never_cropped(hostile: MonitorServer, visit: Visit) -> None:
    page = visit(hostile.link)
    alert = hostile.client().get("/alerts")["items"][0]["id"]
    n_pictures = 0
    for name in ("live", "alerts", f"alerts/{alert}", "references"):
        visit.show(name)
        if name == "references":
            page.locator(".ref summary").first.click()
            expect(page.locator(".strip img").first).to_be_visible()
        elif name != "live":  # the only channel that had a picture has ended
            expect(page.locator(".frame img").first).to_be_visible()
        fits = page.evaluate("[...document.querySelectorAll('main img')].map((img) => getComputedStyle(img).objectFit)")
        assert set(fits) <= {"contain"}, (name, fits)
        n_pictures += len(fits)
    assert n_pictures > 10


def test_the_captions_of_a_pair_state_the_times_of_both_sides(hostile: MonitorServer, visit: Visit) -> None:
    client = hostile.client()
    alert = client.get("/alerts")["items"][0]
    pairs = client.get(f"/alerts/{alert['id']}/evidence")["frames"]
    assert pairs
    page = visit(hostile.link, f"alerts/{alert['id']}")
    captions = page.locator(".frames figcaption")
    expect(captions).to_have_count(2 * len(pairs))
    assert captions.all_inner_texts() == [
        f"{side} {int(pair[name] // 60)}:{pair[name] % 60:04.1f}"
        for pair in pairs
        for side, name in (("On air", "stream_s"), ("Reference", "ref_s"))
    ]  # a file has no wall clock
    assert {pair["aired_at"] for pair in pairs} == {None}


def test_a_webhook_is_added_tested_and_its_failure_explained(hostile: MonitorServer, visit: Visit) -> None:
    page = visit(hostile.link, "system")
    expect(page.get_by_role("heading", name="Ready")).to_be_visible()
    page.get_by_role("button", name="Add a webhook").click()
    page.get_by_role("dialog").get_by_label("Address").fill("http://127.0.0.1:9/hook")
    page.get_by_role("dialog").get_by_role("button", name="Add").click()
    secret = page.get_by_role("dialog", name="Webhook secret")
    expect(secret).to_contain_text("whsec_")
    secret.get_by_role("button").click()
    hook = page.locator(".hook")
    hook.get_by_role("button", name="Send a test").click()
    expect(page.locator(".toast")).to_contain_text("the address is private")
    sent = hook.locator("tbody tr", has_text="test.ping")  # next to the outage of the unreachable channel
    expect(sent).to_contain_text("Failed")
    sent.get_by_role("button", name="Replay").click()
    expect(page.locator(".toast").last).to_contain_text("The delivery is queued again")
    hook.get_by_role("button", name="New secret").click()
    page.get_by_role("dialog").get_by_role("button", name="New secret").click()
    expect(secret).to_contain_text("whsec_")
    secret.get_by_role("button").click()
    expect(hook).to_contain_text("the old secret is valid until")
    hook.get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(page.locator(".hook")).to_have_count(0)


def test_dark_follows_the_system_until_the_viewer_chooses(hostile: MonitorServer, visit: Visit) -> None:
    page = visit(hostile.link, color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.get_by_role("button", name="Light colours").click()
    light = page.evaluate(background)
    assert light != dark
    page.reload()
    expect(page.get_by_role("button", name="Dark colours")).to_be_visible()
    assert page.evaluate(background) == light
    page.emulate_media(color_scheme="light")
    assert page.evaluate(background) == light


EMPTY = {
    "live": ("No channel is monitored yet", "copywatch channels add"),
    "alerts": ("No alert yet", "copywatch refs add"),
    "references": ("No reference is registered yet", "copywatch refs add"),
    "licences": ("No licence is registered", "copywatch licences add"),
}


def test_empty_pages_name_commands_and_a_lost_connection_is_announced(
    start_server: Callable[[int], MonitorServer], visit: Visit, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = Tokens(tmp_path / "data").add("ada", "admin")  # its session survives a restart
    server = start_server(port)
    page = visit(f"{server.address}/#secret={token}", "system")
    expect(page.get_by_role("heading", name="Ready")).to_be_visible()
    for name, (title, command) in EMPTY.items():
        page.goto(f"{server.address}/#/{name}")
        expect(page.get_by_role("heading", name=title)).to_be_visible()
        expect(page.locator(".commands")).to_contain_text(command)

    visit.expected = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET")
    server.kill()
    banner = page.locator("#banner")
    expect(banner).to_contain_text("Connection lost since")
    start_server(port)
    expect(banner).to_be_hidden()
    expect(page.locator("#connection-text")).to_have_text("Live")


def test_the_printed_link_logs_in_and_does_not_stay_in_the_address(
    start_server: Callable[[int], MonitorServer], visit: Visit
) -> None:
    server = start_server(0)
    assert server.secret
    visit.expected = ("401 (Unauthorized)",)
    page = visit(server.address)  # without the secret
    dialog = page.get_by_role("dialog", name="Log in")
    expect(dialog).to_contain_text("open the link that `copywatch serve` printed")
    page.goto(server.link)
    expect(page.get_by_role("heading", name="No channel is monitored yet")).to_be_visible()
    expect(dialog).to_have_count(0)
    assert server.secret not in page.url
    stored = "document.cookie + JSON.stringify(localStorage) + JSON.stringify(sessionStorage)"
    assert server.secret not in page.evaluate(stored)
    page.go_back()
    assert server.secret not in page.url
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("dialog", name="Log in")).to_be_visible()


def test_a_token_is_required_if_tokens_exist(
    start_server: Callable[[int], MonitorServer], visit: Visit, tmp_path: Path
) -> None:
    server = start_server(0)
    command = [
        sys.executable,
        "-m",
        "monitor.cli",
        "tokens",
        "add",
        "ada",
        "--scope",
        "read",
        "--data-dir",
        str(tmp_path / "data"),
    ]
    token = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
    visit.expected = ("401 (Unauthorized)",)
    page = visit(server.address)
    dialog = page.get_by_role("dialog", name="Log in")
    dialog.get_by_label("Token").fill("cw_wrong")
    dialog.get_by_role("button", name="Log in").click()
    expect(dialog.get_by_role("alert")).to_contain_text("Unknown or expired token")
    dialog.get_by_label("Token").fill(token)
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("heading", name="No channel is monitored yet")).to_be_visible()
    expect(page.get_by_role("button", name="Add a channel")).to_have_count(0)  # ada has the scope read
    assert token not in page.evaluate("document.cookie + JSON.stringify(localStorage) + JSON.stringify(sessionStorage)")
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("dialog", name="Log in")).to_be_visible()
