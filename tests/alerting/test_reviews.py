"""A running monitor and its desk: changes are taken up, and reviews of what has ended are told, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import apsw
import pytest
from prometheus_client import CollectorRegistry

from monitor.alerting import reviews
from monitor.alerting.alerts import ENDED, RETRACTED, REVIEWED_FALSE, REVIEWED_TRUE, Alert, after_review
from monitor.alerting.dispatcher import AlertDispatcher
from monitor.alerting.outbox import History, Outbox, OutboxEntry
from monitor.alerting.reviews import watch_rights
from monitor.alerting.sinks import CallbackSink
from monitor.ops.metrics import Metrics
from monitor.rights.rules import REVIEWED
from monitor.rights.store import FILE, RightsStore
from monitor.runtime.active_library import ActiveLibrary
from tests.support.planted_channels import library
from tests.support.sample_alert import sample_events
from tests.support.waiting import wait_until

ENDED_ID, OPEN_ID = "a" * 24, "b" * 24


class House:
    """An outbox, its post and a desk that is followed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rights, self.history = folder, RightsStore(folder), History(folder)
        self.metrics, self.problems = Metrics(CollectorRegistry()), dict[str, str]()
        self.lent = ActiveLibrary(library().index)
        self.heard: list[Alert] = []

    async def live(self, test: Callable[[], None], while_it_runs: Callable[[], object] = lambda: None) -> None:
        """Runs until the test is passed by."""
        sinks = {"callback": CallbackSink(self.heard.append)}
        with Outbox.open(self.folder, sinks) as outbox:
            post = AlertDispatcher(outbox, sinks, self.metrics, timedelta(days=30))
            tasks = [
                asyncio.create_task(post.run()),
                asyncio.create_task(
                    watch_rights(self.rights, self.lent, self.metrics, self.problems, self.history, post)
                ),
            ]
            try:
                while_it_runs()
                await wait_until(lambda: _passes(test))
                assert await post.flush(10)
            finally:
                for task in tasks:
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
                post.close()

    def last(self, alert_id: str) -> Alert:
        return self.history.alert(alert_id)[-1].alert

    def settled(self) -> None:
        assert not self.rights.unapplied_reviews()


def _passes(test: Callable[[], None]) -> bool:
    try:
        test()
    except AssertionError:
        return False
    return True


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(reviews, "LOOK_S", 0.05)
    with Outbox.open(tmp_path, ()) as outbox:
        outbox.write([OutboxEntry("ch5", sample_events(ENDED_ID)), OutboxEntry("ch5", sample_events(OPEN_ID)[:2])])
    return House(tmp_path)


def test_a_review_made_while_no_monitor_runs_is_told_by_the_next_and_only_once(house: House) -> None:
    house.rights.review(ENDED_ID, "false", "Ann")
    asyncio.run(house.live(house.settled))
    told = house.last(ENDED_ID)
    assert (told.type, told.reason, told.seq) == (RETRACTED, REVIEWED_FALSE, 4)
    assert house.heard == [told]
    assert house.metrics.registry.get_sample_value("copywatch_reviews_total", {"decision": "false"}) == 1
    # A crash before the review was noted as settled: the next life tells nothing twice.
    apsw.Connection(str(house.folder / FILE)).execute("UPDATE review SET settled = 0")
    asyncio.run(house.live(house.settled))
    assert house.heard == [told]
    assert len(house.history.alert(ENDED_ID)) == 4


def test_an_open_alert_is_left_to_its_channel_until_it_has_ended(house: House) -> None:
    house.rights.review(OPEN_ID, "false", "Ann")
    house.rights.review(ENDED_ID, "confirmed", "Ann")

    def other_is_settled() -> None:
        assert [review.alert_id for review in house.rights.unapplied_reviews()] == [OPEN_ID]

    asyncio.run(house.live(other_is_settled))
    assert house.heard == []
    assert house.lent.rules.is_rejected(OPEN_ID)
    with Outbox.open(house.folder, ("callback",)) as outbox:
        outbox.write([OutboxEntry("ch5", sample_events(OPEN_ID)[2:])])
    asyncio.run(house.live(house.settled))
    assert [alert.type for alert in house.heard] == [ENDED, RETRACTED]


def test_what_is_still_on_air_comes_back_by_its_channel_not_from_here(house: House) -> None:
    house.rights.review(ENDED_ID, "false", "Ann")
    asyncio.run(house.live(house.settled))
    house.lent.retracted_open["ch5"] = frozenset({ENDED_ID})
    house.rights.review(ENDED_ID, "confirmed", "Ann")

    def heeded() -> None:
        assert not house.lent.rules.is_rejected(ENDED_ID)

    asyncio.run(house.live(heeded))
    assert house.last(ENDED_ID).type == RETRACTED
    house.lent.retracted_open.clear()
    asyncio.run(house.live(house.settled))
    assert (house.last(ENDED_ID).type, house.last(ENDED_ID).reason) == (ENDED, REVIEWED_TRUE)


def test_changes_are_taken_up_and_an_unreadable_desk_changes_nothing(house: House) -> None:
    def licensed() -> None:
        assert [one.owner for one in house.lent.rules.licences] == ["ACME"]

    asyncio.run(house.live(licensed, lambda: house.rights.add_licence(owner="ACME")))
    content = (house.folder / FILE).read_bytes()
    (house.folder / FILE).write_bytes(b"nothing " * 1000)

    def complains() -> None:
        assert "rights" in house.problems

    asyncio.run(house.live(complains))
    licensed()
    (house.folder / FILE).write_bytes(content)

    def is_well() -> None:
        assert not house.problems

    asyncio.run(house.live(is_well))


@pytest.mark.parametrize(
    ("decisions", "seq", "type_", "licence"),
    [
        (["confirmed"], 3, ENDED, None),
        (["false"], 4, RETRACTED, None),
        (["false", "false"], 4, RETRACTED, None),
        (["false", "confirmed"], 5, ENDED, None),
        (["licensed"], 4, ENDED, REVIEWED),
        (["licensed", "confirmed"], 5, ENDED, None),
        (["false", "licensed"], 5, ENDED, REVIEWED),
    ],
)
def test_what_reviews_of_an_ended_alert_lead_to(
    decisions: list[str], seq: int, type_: str, licence: str | None
) -> None:
    alert = sample_events(ENDED_ID)[-1]
    for decision in decisions:
        alert = after_review(alert, decision) or alert
    assert (alert.seq, alert.type, alert.licence) == (seq, type_, licence)
    assert alert.ended_at == sample_events(ENDED_ID)[-1].ended_at


def test_an_alert_retracted_by_the_matching_itself_stays_so() -> None:
    retracted = replace(sample_events(ENDED_ID)[-1], type=RETRACTED)
    assert [after_review(retracted, decision) for decision in ("confirmed", "false", "licensed")] == [None] * 3
