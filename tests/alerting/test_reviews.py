"""A running monitor applies changes of the rights, and reviews of alerts that are over, each once."""

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
from monitor.ops.change_signal import watch
from monitor.ops.metrics import Metrics
from monitor.rights.rules import REVIEWED
from monitor.rights.store import FILE, RightsStore
from monitor.runtime.active_library import ActiveLibrary
from tests.support.planted_channels import library
from tests.support.sample_alert import sample_events
from tests.support.waiting import wait_until

ENDED_ID, OPEN_ID = "a" * 24, "b" * 24


class Monitor:
    """An outbox, its dispatcher and `watch_rights`, without channels."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir, self.rights, self.history = data_dir, RightsStore(data_dir), History(data_dir)
        self.metrics, self.problems = Metrics(CollectorRegistry()), dict[str, str]()
        self.library = ActiveLibrary(library().index)
        self.sent: list[Alert] = []

    def run_until(self, condition: Callable[[], bool], started: Callable[[], object] = lambda: None) -> None:
        """Runs until the condition holds and every event is sent; calls `started` once it runs."""
        asyncio.run(self._run_until(condition, started))

    async def _run_until(self, condition: Callable[[], bool], started: Callable[[], object]) -> None:
        sinks = {"callback": CallbackSink(self.sent.append)}
        with Outbox.open(self.data_dir, sinks) as outbox:
            dispatcher = AlertDispatcher(outbox, sinks, self.metrics, timedelta(days=30))
            watching = watch_rights(self.rights, self.library, self.metrics, self.problems, self.history, dispatcher)
            tasks = [asyncio.create_task(dispatcher.run()), asyncio.create_task(watching)]
            try:
                await asyncio.sleep(0)
                started()
                await wait_until(condition)
                assert await dispatcher.flush(10)
            finally:
                for task in tasks:
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
                dispatcher.close()

    def last(self, alert_id: str) -> Alert:
        return self.history.alert(alert_id)[-1].alert

    def is_all_applied(self) -> bool:
        return not self.rights.unapplied_reviews()


@pytest.fixture
def monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Monitor:
    monkeypatch.setattr(reviews, "LOOK_S", 0.05)
    with Outbox.open(tmp_path, ()) as outbox:
        outbox.write([OutboxEntry("ch5", sample_events(ENDED_ID)), OutboxEntry("ch5", sample_events(OPEN_ID)[:2])])
    return Monitor(tmp_path)


def test_a_review_made_while_no_monitor_runs_is_applied_by_the_next_and_only_once(monitor: Monitor) -> None:
    monitor.rights.review(ENDED_ID, "false", "Ann")
    monitor.run_until(monitor.is_all_applied)
    last = monitor.last(ENDED_ID)
    assert (last.type, last.reason, last.seq) == (RETRACTED, REVIEWED_FALSE, 4)
    assert monitor.sent == [last]
    assert monitor.metrics.registry.get_sample_value("copywatch_reviews_total", {"decision": "false"}) == 1
    # A crash before the review was marked as applied: the next run emits nothing twice.
    apsw.Connection(str(monitor.data_dir / FILE)).execute("UPDATE review SET settled = 0")
    monitor.run_until(monitor.is_all_applied)
    assert monitor.sent == [last]
    assert len(monitor.history.alert(ENDED_ID)) == 4


def test_an_open_alert_is_left_to_its_channel_until_it_has_ended(monitor: Monitor) -> None:
    monitor.rights.review(OPEN_ID, "false", "Ann")
    monitor.rights.review(ENDED_ID, "confirmed", "Ann")
    monitor.run_until(lambda: [review.alert_id for review in monitor.rights.unapplied_reviews()] == [OPEN_ID])
    assert monitor.sent == []
    assert monitor.library.rules.is_rejected(OPEN_ID)
    with Outbox.open(monitor.data_dir, ("callback",)) as outbox:
        outbox.write([OutboxEntry("ch5", sample_events(OPEN_ID)[2:])])
    monitor.run_until(monitor.is_all_applied)
    assert [alert.type for alert in monitor.sent] == [ENDED, RETRACTED]


def test_a_retracted_alert_whose_segment_is_open_is_resumed_by_its_channel(monitor: Monitor) -> None:
    monitor.rights.review(ENDED_ID, "false", "Ann")
    monitor.run_until(monitor.is_all_applied)
    monitor.library.retracted_open["ch5"] = frozenset({ENDED_ID})
    monitor.rights.review(ENDED_ID, "confirmed", "Ann")
    monitor.run_until(lambda: not monitor.library.rules.is_rejected(ENDED_ID))
    assert monitor.last(ENDED_ID).type == RETRACTED
    monitor.library.retracted_open.clear()
    monitor.run_until(monitor.is_all_applied)
    assert (monitor.last(ENDED_ID).type, monitor.last(ENDED_ID).reason) == (ENDED, REVIEWED_TRUE)


def test_rules_stay_in_force_while_the_file_cannot_be_read(monitor: Monitor) -> None:
    def is_licensed() -> bool:
        return [licence.owner for licence in monitor.library.rules.licences] == ["ACME"]

    monitor.run_until(is_licensed, lambda: monitor.rights.add_licence(owner="ACME"))
    content = (monitor.data_dir / FILE).read_bytes()
    (monitor.data_dir / FILE).write_bytes(b"nothing " * 1000)
    monitor.run_until(lambda: "rights" in monitor.problems)
    assert is_licensed()
    (monitor.data_dir / FILE).write_bytes(content)
    monitor.run_until(lambda: not monitor.problems)


def test_a_change_in_this_process_is_applied_by_an_event(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reviews, "LOOK_S", 3600.0)  # polling would be too late
    monitor.run_until(
        lambda: monitor.last(ENDED_ID).type == RETRACTED and monitor.is_all_applied(),
        lambda: asyncio.get_running_loop().call_later(0.3, monitor.rights.review, ENDED_ID, "false", "Ann"),
    )
    assert [alert.type for alert in monitor.sent] == [RETRACTED]


def test_a_change_by_another_process_wakes_all_watchers_of_this_one(monitor: Monitor) -> None:
    async def run() -> None:
        with watch(monitor.rights.changed) as changed:
            watching = asyncio.create_task(
                watch_rights(monitor.rights, monitor.library, monitor.metrics, monitor.problems)
            )
            await wait_until(changed.is_set)  # the first look
            changed.clear()
            await asyncio.to_thread(RightsStore(monitor.data_dir).add_licence, owner="ACME")
            await wait_until(changed.is_set)
            assert [licence.owner for licence in monitor.library.rules.licences] == ["ACME"]
            watching.cancel()
            await asyncio.wait({watching})

    asyncio.run(run())


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
def test_events_that_follow_reviews_of_an_ended_alert(
    decisions: list[str], seq: int, type_: str, licence: str | None
) -> None:
    alert = sample_events(ENDED_ID)[-1]
    for decision in decisions:
        alert = after_review(alert, decision) or alert
    assert (alert.seq, alert.type, alert.licence) == (seq, type_, licence)
    assert alert.ended_at == sample_events(ENDED_ID)[-1].ended_at


def test_an_alert_that_matching_retracted_stays_retracted() -> None:
    retracted = replace(sample_events(ENDED_ID)[-1], type=RETRACTED)
    assert [after_review(retracted, decision) for decision in ("confirmed", "false", "licensed")] == [None] * 3
