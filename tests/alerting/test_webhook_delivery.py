"""The webhook sender against real receivers: signed, retried, isolated, and never led to a private address."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from monitor.alerting import webhook_delivery
from monitor.alerting.alerts import ENDED, STARTED
from monitor.alerting.webhook_delivery import send
from monitor.alerting.webhooks import DONE, FAILED, WAITING, WebhookSink, WebhookStore
from monitor.errors import WebhookRefused
from monitor.rights.store import RightsStore
from tests.chaos.hostile import HOSTS
from tests.support.changing_names import ChangingNames
from tests.support.sample_alert import sample_alert
from tests.support.webhook_receiver import LOOPBACK, deliver_until, open_receiver

QUICK_SCHEDULE_S = (0.0, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05)


def test_a_message_is_signed_as_the_specification_says(tmp_path: Path) -> None:
    webhooks = WebhookStore(tmp_path)
    with open_receiver() as receiver:
        endpoint = webhooks.add(receiver.url)
        WebhookSink(webhooks).send([sample_alert()])
        deliver_until(lambda: webhooks.n_waiting() == 0, webhooks, tmp_path)
    ((headers, body),) = receiver.requests
    content = Webhook(endpoint.secret).verify(body, headers)
    assert (content["type"], content["data"]["id"]) == (STARTED, sample_alert().id)
    assert headers["webhook-id"] == f"msg_{sample_alert().id}_1"
    assert headers["content-type"] == "application/json"
    other = webhooks.add(receiver.url)
    with pytest.raises(Exception, match="No matching signature"):
        Webhook(other.secret).verify(body, headers)
    assert (tmp_path / "webhooks.sqlite").stat().st_mode & 0o777 == 0o600


def test_while_a_secret_is_being_replaced_both_sign(tmp_path: Path) -> None:
    webhooks = WebhookStore(tmp_path)
    with open_receiver() as receiver:
        first = webhooks.add(receiver.url)
        second = webhooks.rotate(first.id)

        def signs() -> list[bool]:
            """Which of the two secrets verify a message that is sent now."""
            asyncio.run(send(webhooks.get(first.id), webhooks.ping(first.id), LOOPBACK))
            headers, body = receiver.requests[-1]
            verified = []
            for secret in (first.secret, second.secret):
                try:
                    verified.append(bool(Webhook(secret).verify(body, headers)))
                except WebhookVerificationError:
                    verified.append(False)
            return verified

        assert signs() == [True, True]
        assert webhooks.get(first.id).as_dict()["old_secret_until"] is not None
        assert webhooks.get(first.id).secrets(time.time() + 86_401) == [second.secret]
        at_once = webhooks.rotate(first.id, at_once=True)
        assert signs() == [False, False]
        assert webhooks.get(first.id).secrets(time.time()) == [at_once.secret]
        assert webhooks.get(first.id).as_dict()["old_secret_until"] is None


def test_the_specification_s_own_example() -> None:
    secret, message = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek"
    signed = Webhook(secret).sign(message, datetime.fromtimestamp(1614265330, UTC), '{"test": 2432232314}')
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_an_endpoint_gets_each_event_that_it_subscribed_to_once(tmp_path: Path) -> None:
    webhooks = WebhookStore(tmp_path)
    with open_receiver() as receiver:
        webhooks.add(receiver.url, [ENDED])
        for _ in range(2):  # the dispatcher may send an event twice
            WebhookSink(webhooks).send([sample_alert(), sample_alert(type=ENDED, seq=2)])
        deliver_until(lambda: webhooks.n_waiting() == 0, webhooks, tmp_path)
    assert receiver.ids == [f"msg_{sample_alert().id}_2"]


@pytest.mark.slow
def test_nothing_is_lost_when_a_third_of_all_tries_fail(tmp_path: Path) -> None:
    webhooks, rng, n = WebhookStore(tmp_path, QUICK_SCHEDULE_S), random.Random(7), 100
    with open_receiver(lambda n: 500 if rng.random() < 0.3 else 200) as receiver:
        webhooks.add(receiver.url)
        WebhookSink(webhooks).send([sample_alert(k) for k in range(n)])
        deliver_until(lambda: webhooks.n_waiting() == 0, webhooks, tmp_path)
        (endpoint,) = webhooks.all()
        log = webhooks.deliveries(endpoint.id, limit=1000)
    assert {one.state for one in log} == {DONE}
    assert set(receiver.ids) == {f"msg_{sample_alert(k).id}_1" for k in range(n)}
    assert len(receiver.ids) == sum(delivery.tries for delivery in log) > n
    bodies: dict[str, set[bytes]] = {}
    for headers, body in receiver.requests:
        bodies.setdefault(headers["webhook-id"], set()).add(body)
    assert all(len(same) == 1 for same in bodies.values())


def test_an_endpoint_that_hangs_delays_no_other(tmp_path: Path) -> None:
    webhooks, released = WebhookStore(tmp_path), threading.Event()

    def hang(n: int) -> int:
        released.wait(60)
        return 200

    with open_receiver(hang) as hanging, open_receiver() as working:
        webhooks.add(hanging.url)
        webhooks.add(working.url)
        WebhookSink(webhooks).send([sample_alert(k) for k in range(20)])
        deliver_until(lambda: len(working.requests) == 20 == webhooks.n_waiting(), webhooks, tmp_path)
        assert len(hanging.requests) <= 4  # none of these has been answered
        released.set()
    assert webhooks.n_waiting() == 20


@pytest.mark.parametrize(
    ("answer", "headers", "state", "is_enabled", "error"),
    [
        (204, {}, DONE, True, None),
        (410, {}, FAILED, False, "HTTP status 410"),
        (302, {"Location": "http://169.254.169.254/"}, WAITING, True, "HTTP status 302: redirects are not followed"),
        (500, {}, WAITING, True, "HTTP status 500"),
        (429, {"Retry-After": "4000"}, WAITING, True, "HTTP status 429"),
    ],
)
def test_outcome_of_each_kind_of_response(
    tmp_path: Path, answer: int, headers: dict[str, str], state: str, is_enabled: bool, error: str | None
) -> None:
    webhooks = WebhookStore(tmp_path, (0.0, 600.0))
    with open_receiver(lambda n: answer, headers) as receiver:
        id = webhooks.add(receiver.url).id
        WebhookSink(webhooks).send([sample_alert()])
        deliver_until(lambda: webhooks.deliveries(id)[0].tries == 1, webhooks, tmp_path)
        (delivery,) = webhooks.deliveries(id)
    assert (delivery.state, delivery.last_status, delivery.last_error) == (state, answer, error)
    assert len(receiver.requests) == 1
    endpoint = webhooks.get(id)
    assert endpoint.enabled == is_enabled
    if state == WAITING:
        wait_s = delivery.next_at - time.time()
        assert (3000 if answer == 429 else 0) < wait_s <= (4000 if answer == 429 else 720)
    if not is_enabled:
        WebhookSink(webhooks).send([sample_alert(1)])
        assert webhooks.n_waiting() == 0  # nothing is queued for a disabled endpoint
        assert webhooks.enable(id).enabled


def test_a_sender_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    """The sender in a process of its own, killed twice while it delivers."""
    webhooks, n = WebhookStore(tmp_path), 60
    with open_receiver() as receiver:
        webhooks.add(receiver.url)
        WebhookSink(webhooks).send([sample_alert(k) for k in range(n)])
        for stop_at in (10, 35):
            child = subprocess.Popen([sys.executable, "-m", "tests.support.webhook_receiver", str(tmp_path)])
            while len(receiver.requests) < stop_at:
                assert child.poll() is None
                time.sleep(0.005)  # requests arrive in another thread
            child.send_signal(signal.SIGKILL)
            child.wait()
        deliver_until(lambda: webhooks.n_waiting() == 0, webhooks, tmp_path)
    counts = Counter(receiver.ids)
    assert counts.keys() == {f"msg_{sample_alert(k).id}_1" for k in range(n)}
    assert sum(counts.values()) <= n + 2 * webhook_delivery.AT_ONCE  # only deliveries in flight are repeated


# --- addresses -------------------------------------------------------------------------------------------------------


@pytest.fixture
def canary() -> Iterator[socket.socket]:
    """A listener on loopback that no setting allows; a connection to it would be a leak."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener


@pytest.mark.parametrize("host", HOSTS)
def test_a_private_address_is_not_reached(tmp_path: Path, canary: socket.socket, host: str) -> None:
    webhooks, port = WebhookStore(tmp_path), canary.getsockname()[1]
    for before in ("http://", "https://", "http://user:pass@", "http://public.example@", "http://a%40b:c@"):
        try:
            endpoint = webhooks.add(f"{before}{host}:{port}/")
        except WebhookRefused:
            continue  # not a valid address at all
        attempt = asyncio.run(send(endpoint, webhooks.ping(endpoint.id), (), timeout_s=3))
        assert attempt.error, host
        assert attempt.status is None
    with pytest.raises(BlockingIOError):
        canary.accept()


def test_only_allowed_private_addresses_are_reached(tmp_path: Path) -> None:
    webhooks = WebhookStore(tmp_path)
    with open_receiver() as receiver:
        endpoint = webhooks.add(receiver.url)
        refused = asyncio.run(send(endpoint, webhooks.ping(endpoint.id), ("10.0.0.0/8",)))
        assert refused.error == "the address is private; to allow it, name it in webhooks.allow"
        for allow in ("127.0.0.1", "127.0.0.0/8"):
            assert asyncio.run(send(endpoint, webhooks.ping(endpoint.id), (allow,))).succeeded
        by_name = webhooks.add(receiver.url.replace("127.0.0.1", "localhost"))
        assert asyncio.run(send(by_name, webhooks.ping(by_name.id), ("localhost",))).succeeded


def test_every_delivery_checks_where_the_name_leads_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    webhooks, names = WebhookStore(tmp_path), ChangingNames(monkeypatch)
    with open_receiver() as receiver:
        endpoint = webhooks.add(receiver.url.replace("127.0.0.1", "rebind.example"))
        for inside in ("127.0.0.1", "::ffff:127.0.0.1", "168.63.129.16", "192.0.0.192", "64:ff9b:1::7f00:1", "fec0::1"):
            names.numbers["rebind.example"] = inside
            attempt = asyncio.run(send(endpoint, webhooks.ping(endpoint.id), ("other.example",), timeout_s=3))
            assert attempt.error == "the address is private; to allow it, name it in webhooks.allow", inside
        assert receiver.requests == []


def test_errors_contain_no_secrets(tmp_path: Path) -> None:
    webhooks = WebhookStore(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    endpoint = webhooks.add(f"http://user:pa55@127.0.0.1:{port}/x?key=hush")
    failed = webhooks.record_attempt(
        webhooks.ping(endpoint.id), asyncio.run(send(endpoint, webhooks.ping(endpoint.id), LOOPBACK)), 1.0
    )
    text = json.dumps([failed.as_dict(), endpoint.as_dict()])
    assert "cannot connect" in text
    assert not any(word in text for word in ("pa55", "hush", "whsec_", "user"))


def test_a_review_is_sent_once_whichever_process_made_it(tmp_path: Path) -> None:
    webhooks, rights = WebhookStore(tmp_path), RightsStore(tmp_path)
    rights.review(sample_alert().id, "confirmed", by="before the webhook existed")
    with open_receiver() as receiver:
        webhooks.add(receiver.url)
        deliver_until(lambda: webhooks.position("review") is not None, webhooks, tmp_path)
        rights.review(sample_alert().id, "false", by="ada")
        for _ in range(2):
            deliver_until(lambda: len(receiver.requests) == 1 and webhooks.n_waiting() == 0, webhooks, tmp_path)
    ((_, body),) = receiver.requests
    assert json.loads(body)["data"]["review"]["by"] == "ada"
