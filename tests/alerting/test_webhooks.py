"""Webhooks on disk: endpoints, messages, retries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from monitor.alerting.alerts import Gap
from monitor.alerting.webhooks import DONE, FAILED, SCHEDULE_S, WebhookSink, WebhookStore, body_of, message_of
from monitor.errors import WebhookRefused
from tests.support.sample_alert import sample_alert
from tests.support.webhook_receiver import deliver_until, open_receiver


def test_a_delivery_fails_after_the_tries_of_the_specification(tmp_path: Path) -> None:
    assert sum(SCHEDULE_S) == 75 * 3600 + 35 * 60 + 5
    webhooks = WebhookStore(tmp_path, (0.0, 0.0, 0.0))
    with open_receiver(lambda n: 500 if n <= 3 else 200) as receiver:
        id = webhooks.add(receiver.url).id
        WebhookSink(webhooks).send([sample_alert()])
        deliver_until(lambda: webhooks.n_waiting() == 0, webhooks, tmp_path)
        (delivery,) = webhooks.deliveries(id)
        assert (delivery.state, delivery.tries) == (FAILED, 3)
        webhooks.enable(id)
        webhooks.replay(id, delivery.n)
        deliver_until(lambda: webhooks.n_waiting() == 0, webhooks, tmp_path)
    assert webhooks.deliveries(id)[0].state == DONE
    assert len(set(receiver.ids)) == 1  # a replay is the same message


@pytest.mark.parametrize(
    "url", ["", "x", "ftp://h/", "file:///etc/passwd", "http://", "http://h:0/", "http://h h/", "http://h/\n"]
)
def test_an_invalid_address_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(WebhookRefused):
        WebhookStore(tmp_path).add(url)


def test_a_body_stays_below_20_kb() -> None:
    gaps = tuple(Gap(float(n), 1.0, "reconnect" * 10) for n in range(256))
    body = message_of(sample_alert(gaps=gaps, title="ä" * 1000, owner="ö" * 1000, reason="x" * 100)).body
    assert len(body.encode()) < 20_000
    data = json.loads(body)["data"]
    assert (len(data["gaps"]), data["gaps_left_out"]) == (20, 236)
    assert "gaps_left_out" not in json.loads(body_of("x", {"gaps": []}))["data"]
