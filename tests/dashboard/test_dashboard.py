"""The dashboard in a real browser against a running demo: an alert appears, is opened, is confirmed."""

from __future__ import annotations

import json
import re
import zipfile
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from playwright.sync_api import Page, expect

from monitor.demo.media import Media
from tests.support import media
from tests.support.dashboard_browser import PAGES, TIMEOUT_MS, DemoProcess, Visit
from tests.support.web_server import Client

expect.set_options(timeout=TIMEOUT_MS)


def first_alert(page: Page, client: Client) -> str:
    """Waits for an alert in the list; its id."""
    page.locator(".card").first.wait_for()
    id = page.locator(".card").last.get_attribute("data-id")
    assert id
    assert client.get(f"/alerts/{id}")["channel"] == "demo"
    return id


def test_an_alert_appears_is_opened_and_confirmed(demo: DemoProcess, visit: Visit, tmp_path: Path) -> None:
    page = visit(demo.link, "alerts")
    expect(page.get_by_role("heading", name="Alerts")).to_be_visible()
    page.evaluate("window.neverReloaded = true")
    id = first_alert(page, demo.client)
    card = page.locator(f'.card[data-id="{id}"]')
    expect(card.get_by_role("link")).to_have_text(re.compile("Harbour Nights|Clockwork Garden|Paper Planets"))
    expect(card.locator("img")).to_have_count(2)  # broadcast and reference, as soon as they exist
    for picture in card.locator("img").all():
        expect(picture).not_to_have_js_property("naturalWidth", 0)
    page.screenshot(path=tmp_path / "alerts.png")

    card.get_by_role("link").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(re.compile("Harbour Nights|Garden|Planets"))
    expect(page.locator(".timelines rect.matched").first).to_be_visible()
    expect(page.locator(".frames img").first).to_be_visible()
    expect(page.locator(".log li").first).to_contain_text("a copy is on air")

    page.get_by_role("button", name="Confirm").click()
    expect(page.locator(".review")).to_contain_text("Confirmed by")
    expect(page.get_by_role("button", name="Confirm")).to_have_attribute("aria-pressed", "true")
    review = demo.client.get(f"/alerts/{id}")["review"]
    assert (review["decision"], review["by"]) == ("confirmed", "this machine")
    page.screenshot(path=tmp_path / "alert.png", full_page=True)
    assert page.evaluate("window.neverReloaded")


def test_every_cell_of_the_matrix_can_be_read_by_keyboard(demo: DemoProcess, visit: Visit) -> None:
    page = visit(demo.link, "alerts")
    id = first_alert(page, demo.client)
    page.goto(f"{demo.address}/#/alerts/{id}")
    canvas = page.locator(".matrix canvas")
    canvas.focus()
    page.keyboard.press("ArrowRight")  # goes to the alignment's first cell
    readout = page.locator(".readout")
    expect(readout).to_have_text(
        re.compile(r"Broadcast \S+, reference \S+: similarity 0\.\d\d, mask [01]\.\d\d, on the alignment")
    )
    before = readout.text_content()
    page.keyboard.press("ArrowDown")
    expect(readout).not_to_have_text(before or "")
    tile = demo.client.get(f"/alerts/{id}/evidence")["tiles"][0]
    row, column = (int(index) for index in tile["path"][0])
    assert f"similarity {tile['similarity'][row][column]:.2f}, mask {tile['mask'][row][column]:.2f}" in (before or "")


def test_the_live_page_shows_a_channel_its_latest_frame_and_its_copy(demo: DemoProcess, visit: Visit) -> None:
    page = visit(demo.link)
    tile = page.get_by_role("article", name="demo")
    expect(tile.locator(".state")).to_have_text("On air")
    picture = tile.get_by_role("img")
    expect(picture).to_be_visible()
    assert picture.evaluate("image => image.naturalWidth") > 0
    before = picture.get_attribute("src")
    expect(picture).not_to_have_attribute("src", before or "")  # a newer one replaces it
    expect(tile.locator(".ribbon")).to_be_visible()  # the broadcast loops, so a copy comes on air
    tile.locator(".ribbon").first.click()
    expect(page.get_by_role("heading", name="Time lines")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_has_no_sideways_scroll(demo: DemoProcess, visit: Visit, tmp_path: Path, scheme: str) -> None:
    page = visit(demo.link, "alerts", width=360, color_scheme=scheme)
    id = first_alert(page, demo.client)
    for name in (*PAGES, f"alerts/{id}"):
        visit.show(name)
        page.screenshot(path=tmp_path / f"{name.replace('/', '-')}.png", full_page=True)
        assert (name, page.evaluate("document.documentElement.scrollWidth")) == (name, 360)


def test_times_are_in_the_viewer_s_zone_and_name_it(demo: DemoProcess, visit: Visit) -> None:
    page = visit(demo.link, "alerts", timezone_id="Asia/Tokyo")
    expect(page.locator("#zone")).to_have_text("Asia/Tokyo, UTC+09:00")
    id = first_alert(page, demo.client)
    page.locator(f'.card[data-id="{id}"]').get_by_role("link").click()
    shown = page.locator(".lead time")
    utc = datetime.fromisoformat(demo.client.get(f"/alerts/{id}")["started_at"])
    expect(shown).to_have_text(re.compile(rf"{utc.astimezone(ZoneInfo('Asia/Tokyo')):%H:%M:%S} (JST|GMT\+9)$"))
    expect(shown).to_have_attribute("title", re.compile(r"Z \(UTC\)$"))
    expect(page.get_by_role("button", name="Export as zip")).to_be_visible()
    with page.expect_download() as downloading:
        page.keyboard.press("e")
    with zipfile.ZipFile(downloading.value.path()) as archive:
        manifest = json.loads(archive.read(f"{id}/manifest.json"))
    assert manifest["viewer"]["time_zone"] == "Asia/Tokyo"
    assert manifest["viewer"]["started_at"] == utc.astimezone(ZoneInfo("Asia/Tokyo")).isoformat()


def test_all_work_can_be_done_by_keyboard(demo: DemoProcess, visit: Visit) -> None:
    page = visit(demo.link, "live")
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)  # until then the dialog takes the keys
    page.keyboard.press("g")
    page.keyboard.press("a")
    expect(page.get_by_role("heading", name="Alerts", level=1)).to_be_visible()
    page.locator(".card").first.wait_for()
    page.keyboard.press("j")
    focused = page.locator(".card:focus-within")
    id = focused.get_attribute("data-id")
    assert focused.locator(".title").evaluate("title => getComputedStyle(title).outlineStyle") == "solid"
    page.keyboard.press("l")
    expect(page.locator(f'.card[data-id="{id}"]').get_by_text("Licensed by review")).to_be_visible()
    assert demo.client.get(f"/alerts/{id}")["review"]["decision"] == "licensed"
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Similarity matrix")).to_be_visible()
    page.keyboard.press("f")
    expect(page.locator(".review")).to_contain_text("False positive by")
    expect(page.locator(".head .chips")).to_contain_text("Retracted")
    page.keyboard.press("c")
    expect(page.locator(".review")).to_contain_text("Confirmed by")


def test_many_alerts_are_reviewed_together(demo: DemoProcess, visit: Visit) -> None:
    page = visit(demo.link, "alerts")
    expect(page.locator(".card").nth(1)).to_be_visible()  # two alerts exist
    ids = [page.locator(".card").nth(n).get_attribute("data-id") for n in range(2)]
    first, second = (page.locator(f'.card[data-id="{id}"]') for id in ids)
    bar = page.get_by_role("group", name="Selected alerts")
    expect(bar).to_be_hidden()
    first.get_by_role("checkbox").check()
    second.get_by_role("link").focus()
    page.keyboard.press("x")
    expect(second.get_by_role("checkbox")).to_be_checked()
    expect(bar).to_contain_text("2 selected")
    page.keyboard.press("l")
    for card in (first, second):
        expect(card.get_by_text("Licensed by review")).to_be_visible()
    expect(bar).to_be_hidden()
    assert {demo.client.get(f"/alerts/{id}")["review"]["decision"] for id in ids} == {"licensed"}
    second.get_by_role("checkbox").check()
    bar.get_by_role("button", name="Confirm").click()
    expect(second.get_by_text("Confirmed")).to_be_visible()
    expect(first.get_by_text("Licensed by review")).to_be_visible()


def test_a_note_is_not_lost_when_the_alert_is_updated(demo: DemoProcess, visit: Visit) -> None:
    page = visit(demo.link, "alerts")
    id = first_alert(page, demo.client)
    visit.show(f"alerts/{id}")
    page.get_by_label("Note").fill("a word")
    assert (
        demo.client("POST", f"/api/v1/alerts/{id}/review", {"decision": "licensed"}).status == 200
    )  # by another reviewer
    expect(page.locator(".review")).to_contain_text("Licensed by review by")
    expect(page.get_by_label("Note")).to_have_value("a word")
    expect(page.get_by_label("Note")).to_be_focused()
    page.get_by_role("button", name="Confirm").click()
    expect(page.locator(".review")).to_contain_text("a word")
    expect(page.get_by_label("Note")).to_have_value("")


def test_filters_are_in_the_address_and_select_matching_alerts(demo: DemoProcess, visit: Visit) -> None:
    page = visit(demo.link, "alerts?min_confidence=1")
    expect(page.get_by_role("heading", name="No alert matches these filters")).to_be_visible()
    page.get_by_role("button", name="Clear").click()
    page.locator(".card").first.wait_for()
    page.get_by_label("Channel").select_option("demo")
    expect(page).to_have_url(re.compile("channel=demo"))
    page.locator(".card").first.wait_for()
    with page.expect_download() as downloading:
        page.get_by_role("button", name="CSV").click()
    head, *lines = Path(downloading.value.path()).read_text().splitlines()
    assert "started_at_utc,ended_at_utc,started_at_local,ended_at_local,time_zone" in head
    assert len(lines) == len(demo.client.get("/alerts?channel=demo&limit=200")["items"])


def test_a_reference_is_uploaded_examined_excluded_in_part_and_removed(
    demo: DemoProcess, visit: Visit, demo_media: Media, tmp_path: Path
) -> None:
    still = media.write_clip(
        tmp_path / "still.mp4", ((n / 5, media.picture(3, 0.0, 160, 90)) for n in range(200)), fps=5
    )
    page = visit(demo.link, "references")
    expect(page.locator(".ref")).to_have_count(3)
    page.get_by_label("Choose a video").set_input_files(still)
    page.get_by_label("Title").fill("One long still")
    page.get_by_role("button", name="Register").click()
    row = page.locator(".ref", has_text="One long still")
    row.wait_for()
    expect(row).to_contain_text("40 s")
    row.locator("summary").click()
    expect(row.locator(".warnings")).to_contain_text("One picture stands still for 40 s")
    expect(row.locator(".warnings")).to_contain_text("It is nearly still: 100% of its seconds")
    row.get_by_label("From").fill("5")
    row.get_by_label("To").fill("12.5")
    row.get_by_role("button", name="Exclude").click()
    expect(row.locator(".plain-list")).to_contain_text(re.compile("0:05.0:12"))
    assert row.locator(".strip .shade").count() == 1
    page.screenshot(path=tmp_path / "reference.png")
    (id,) = {one["id"] for one in demo.client.get("/references?q=still")["items"]}
    assert [(one["start_s"], one["end_s"]) for one in demo.client.get(f"/references/{id}/exclusions")["items"]] == [
        (5.0, 12.5)
    ]
    row.get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(page.locator(".ref")).to_have_count(3)


def test_an_open_row_stays_unchanged_when_another_is_added_or_removed(
    demo: DemoProcess, visit: Visit, tmp_path: Path
) -> None:
    page = visit(demo.link, "references")
    row = page.locator(".ref", has_text="harbour-nights")
    row.locator("summary").click()
    row.get_by_label("From").fill("7")
    short = media.write_clip(
        tmp_path / "short.mp4", ((n / 5, media.picture(4, n / 5, 160, 90)) for n in range(20)), fps=5
    )
    page.get_by_label("Choose a video").set_input_files(short)
    page.get_by_role("button", name="Register").click()
    other = page.locator(".ref", has_text="short")
    other.locator("summary").click()
    expect(row.get_by_label("From")).to_have_value("7")
    other.get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(page.locator(".ref")).to_have_count(3)
    expect(row.get_by_label("From")).to_have_value("7")
    expect(row.get_by_label("From")).to_be_visible()
