"""Webhooks against real receivers: signed, retried, isolated, kept on disk, and never led astray."""

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
from typing import Any

import pytest
from standardwebhooks import Webhook, WebhookVerificationError
from typer.testing import CliRunner

from monitor.alerting import webhook_delivery
from monitor.alerting.alerts import ENDED, STARTED, Gap
from monitor.alerting.webhook_delivery import send
from monitor.alerting.webhooks import DONE, FAILED, SCHEDULE_S, WAITING, WebhookSink, WebhookStore, body_of, message_of
from monitor.cli import app
from monitor.errors import NoSuchWebhook, WebhookRefused
from monitor.rights.store import RightsStore
from tests.chaos.hostile import HOSTS
from tests.support.sample_alert import sample_alert
from tests.support.webhook_receiver import LOOPBACK, deliver_until, open_receiver

HASTY_S = (0.0, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05)


def test_a_message_is_signed_as_the_specification_says(tmp_path: Path) -> None:
    webhooks = WebhookStore(tmp_path)
    with open_receiver() as one:
        endpoint = webhooks.add(one.url)
        WebhookSink(webhooks).send([sample_alert()])
        deliver_until(lambda: webhooks.n_waiting() == 0, webhooks, tmp_path)
    ((headers, body),) = one.requests
    told = Webhook(endpoint.secret).verify(body, headers)
    assert (told["type"], told["data"]["id"]) == (STARTED, sample_alert().id)
    assert headers["webhook-id"] == f"msg_{sample_alert().id}_1"
    assert headers["content-type"] == "application/json"
    other = webhooks.add(one.url)
    with pytest.raises(Exception, match="No matching signature"):
        Webhook(other.secret).verify(body, headers)
    assert (tmp_path / "webhooks.sqlite").stat().st_mode & 0o777 == 0o600


def test_while_a_secret_is_replaced_both_sign(tmp_path: Path) -> None:
    webhooks = WebhookStore(tmp_path)
    with open_receiver() as one:
        first = webhooks.add(one.url)
        second = webhooks.rotate(first.id)

        def signs() -> list[bool]:
            """Which of the two secrets verify a message that is sent now."""
            asyncio.run(send(webhooks.get(first.id), webhooks.ping(first.id), LOOPBACK))
            headers, body = one.requests[-1]
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


def test_who_asked_for_some_events_is_told_no_others_and_each_once(tmp_path: Path) -> None:
    webhooks = WebhookStore(tmp_path)
    with open_receiver() as one:
        webhooks.add(one.url, [ENDED])
        for _ in range(2):  # the outbox may hand over twice
            WebhookSink(webhooks).send([sample_alert(), sample_alert(type=ENDED, seq=2)])
        deliver_until(lambda: webhooks.n_waiting() == 0, webhooks, tmp_path)
    assert one.ids == [f"msg_{sample_alert().id}_2"]


@pytest.mark.slow
def test_nothing_is_lost_when_a_third_of_all_tries_fail(tmp_path: Path) -> None:
    webhooks, rng, n = WebhookStore(tmp_path, HASTY_S), random.Random(7), 100
    with open_receiver(lambda n: 500 if rng.random() < 0.3 else 200) as one:
        webhooks.add(one.url)
        WebhookSink(webhooks).send([sample_alert(k) for k in range(n)])
        deliver_until(lambda: webhooks.n_waiting() == 0, webhooks, tmp_path)
        (endpoint,) = webhooks.all()
        log = webhooks.deliveries(endpoint.id, limit=1000)
    assert {one.state for one in log} == {DONE}
    assert set(one.ids) == {f"msg_{sample_alert(k).id}_1" for k in range(n)}
    assert len(one.ids) == sum(delivery.tries for delivery in log) > n
    bodies: dict[str, set[bytes]] = {}
    for headers, body in one.requests:
        bodies.setdefault(headers["webhook-id"], set()).add(body)
    assert all(len(same) == 1 for same in bodies.values())


def test_one_that_hangs_delays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    webhooks, released = WebhookStore(tmp_path), threading.Event()

    def hang(n: int) -> int:
        released.wait(60)
        return 200

    with open_receiver(hang) as hangs, open_receiver() as works:
        webhooks.add(hangs.url)
        webhooks.add(works.url)
        WebhookSink(webhooks).send([sample_alert(k) for k in range(20)])
        deliver_until(lambda: len(works.requests) == 20 == webhooks.n_waiting(), webhooks, tmp_path)
        assert len(hangs.requests) <= 4  # all of them still wait for an answer
        released.set()
    assert webhooks.n_waiting() == 20


@pytest.mark.parametrize(
    ("answer", "headers", "state", "is_on", "error"),
    [
        (204, {}, DONE, True, None),
        (410, {}, FAILED, False, "HTTP status 410"),
        (302, {"Location": "http://169.254.169.254/"}, WAITING, True, "HTTP status 302: redirects are not followed"),
        (500, {}, WAITING, True, "HTTP status 500"),
        (429, {"Retry-After": "4000"}, WAITING, True, "HTTP status 429"),
    ],
)
def test_what_an_answer_means(
    tmp_path: Path, answer: int, headers: dict[str, str], state: str, is_on: bool, error: str | None
) -> None:
    webhooks = WebhookStore(tmp_path, (0.0, 600.0))
    with open_receiver(lambda n: answer, headers) as one:
        id = webhooks.add(one.url).id
        WebhookSink(webhooks).send([sample_alert()])
        deliver_until(lambda: webhooks.deliveries(id)[0].tries == 1, webhooks, tmp_path)
        (delivery,) = webhooks.deliveries(id)
    assert (delivery.state, delivery.last_status, delivery.last_error) == (state, answer, error)
    assert len(one.requests) == 1
    endpoint = webhooks.get(id)
    assert endpoint.enabled == is_on
    if state == WAITING:
        wait_s = delivery.next_at - time.time()
        assert (3000 if answer == 429 else 0) < wait_s <= (4000 if answer == 429 else 720)
    if not is_on:
        WebhookSink(webhooks).send([sample_alert(1)])
        assert webhooks.n_waiting() == 0  # who is off is owed nothing
        assert webhooks.enable(id).enabled


def test_the_tries_are_the_specification_s_and_then_it_is_given_up(tmp_path: Path) -> None:
    assert sum(SCHEDULE_S) == 75 * 3600 + 35 * 60 + 5
    webhooks = WebhookStore(tmp_path, (0.0, 0.0, 0.0))
    with open_receiver(lambda n: 500 if n <= 3 else 200) as one:
        id = webhooks.add(one.url).id
        WebhookSink(webhooks).send([sample_alert()])
        deliver_until(lambda: webhooks.n_waiting() == 0, webhooks, tmp_path)
        (delivery,) = webhooks.deliveries(id)
        assert (delivery.state, delivery.tries) == (FAILED, 3)
        webhooks.enable(id)
        webhooks.replay(id, delivery.n)
        deliver_until(lambda: webhooks.n_waiting() == 0, webhooks, tmp_path)
    assert webhooks.deliveries(id)[0].state == DONE
    assert len(set(one.ids)) == 1  # a replay is the same message


def test_killed_at_any_moment_nothing_is_lost(tmp_path: Path) -> None:
    """The courier in a process of its own, killed again and again while it delivers."""
    webhooks, n = WebhookStore(tmp_path), 60
    with open_receiver() as one:
        webhooks.add(one.url)
        WebhookSink(webhooks).send([sample_alert(k) for k in range(n)])
        for stop_at in (10, 35):
            child = subprocess.Popen([sys.executable, "-m", "tests.support.webhook_receiver", str(tmp_path)])
            while len(one.requests) < stop_at:
                assert child.poll() is None
                time.sleep(0.005)  # until so many have come
            child.send_signal(signal.SIGKILL)
            child.wait()
        deliver_until(lambda: webhooks.n_waiting() == 0, webhooks, tmp_path)
    counts = Counter(one.ids)
    assert counts.keys() == {f"msg_{sample_alert(k).id}_1" for k in range(n)}
    assert sum(counts.values()) <= n + 2 * webhook_delivery.AT_ONCE  # again only what was under way


# --- where it may lead -----------------------------------------------------------------------------------------------


@pytest.fixture
def canary() -> Iterator[socket.socket]:
    """A listener on loopback that nobody named; a connection to it would be a leak."""
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
            continue  # it did not even look like an address
        attempt = asyncio.run(send(endpoint, webhooks.ping(endpoint.id), (), timeout_s=3))
        assert attempt.error, host
        assert attempt.status is None
    with pytest.raises(BlockingIOError):
        canary.accept()


def test_only_what_is_named_may_be_reached(tmp_path: Path) -> None:
    webhooks = WebhookStore(tmp_path)
    with open_receiver() as one:
        endpoint = webhooks.add(one.url)
        refused = asyncio.run(send(endpoint, webhooks.ping(endpoint.id), ("10.0.0.0/8",)))
        assert refused.error == "the address is private; to allow it, name it in webhooks.allow"
        for allow in ("127.0.0.1", "127.0.0.0/8"):
            assert asyncio.run(send(endpoint, webhooks.ping(endpoint.id), (allow,))).succeeded
        by_name = webhooks.add(one.url.replace("127.0.0.1", "localhost"))
        assert asyncio.run(send(by_name, webhooks.ping(by_name.id), ("localhost",))).succeeded


@pytest.mark.parametrize(
    "url", ["", "x", "ftp://h/", "file:///etc/passwd", "http://", "http://h:0/", "http://h h/", "http://h/\n"]
)
def test_what_cannot_be_an_address(tmp_path: Path, url: str) -> None:
    with pytest.raises(WebhookRefused):
        WebhookStore(tmp_path).add(url)


def test_errors_have_words_and_no_secrets(tmp_path: Path) -> None:
    webhooks = WebhookStore(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    endpoint = webhooks.add(f"http://user:pa55@127.0.0.1:{port}/x?key=hush")
    done = webhooks.record_attempt(
        webhooks.ping(endpoint.id), asyncio.run(send(endpoint, webhooks.ping(endpoint.id), LOOPBACK)), 1.0
    )
    said = json.dumps([done.as_dict(), endpoint.as_dict()])
    assert "cannot connect" in said
    assert not any(word in said for word in ("pa55", "hush", "whsec_", "user"))


def test_a_body_stays_below_20_kb() -> None:
    gaps = tuple(Gap(float(n), 1.0, "reconnect" * 10) for n in range(256))
    body = message_of(sample_alert(gaps=gaps, title="ä" * 1000, owner="ö" * 1000, reason="x" * 100)).body
    assert len(body.encode()) < 20_000
    told = json.loads(body)["data"]
    assert (len(told["gaps"]), told["gaps_left_out"]) == (20, 236)
    assert "gaps_left_out" not in json.loads(body_of("x", {"gaps": []}))["data"]


def test_a_review_is_told_once_wherever_it_was_made(tmp_path: Path) -> None:
    webhooks, desk = WebhookStore(tmp_path), RightsStore(tmp_path)
    desk.review(sample_alert().id, "confirmed", by="before anybody was told")
    with open_receiver() as one:
        webhooks.add(one.url)
        deliver_until(lambda: webhooks.position("review") is not None, webhooks, tmp_path)
        desk.review(sample_alert().id, "false", by="ada")
        for _ in range(2):
            deliver_until(lambda: len(one.requests) == 1 and webhooks.n_waiting() == 0, webhooks, tmp_path)
    ((_, body),) = one.requests
    assert json.loads(body)["data"]["review"]["by"] == "ada"


def test_on_the_command_line(tmp_path: Path) -> None:
    def run(*words: str) -> Any:
        environment = {"COPYWATCH_WEBHOOKS__ALLOW": '["127.0.0.1"]', "COPYWATCH_DATA_DIR": str(tmp_path)}
        return CliRunner(env=environment).invoke(app, ["webhooks", *words])

    with open_receiver(lambda n: 200 if n == 1 else 500) as one:
        made: dict[str, Any] = json.loads(run("add", one.url, "--type", "alert.ended", "--json").stdout)
        assert made["secret"].startswith("whsec_")
        assert run("test", made["id"]).stdout == "accepted: HTTP status 200\n"
        failed = run("test", made["id"])
        assert (failed.exit_code, failed.stdout) == (1, "not accepted: HTTP status 500\n")
    listed = run("list", "--json").stdout
    assert made["secret"] not in listed
    log = json.loads(run("deliveries", made["id"], "--json").stdout)
    assert [(one["event"], one["state"]) for one in log] == [("test.ping", "failed"), ("test.ping", "done")]
    assert run("replay", made["id"], str(log[0]["id"])).exit_code == 0
    renewed = json.loads(run("rotate", made["id"], "--json").stdout)
    assert renewed["secret"].startswith("whsec_")
    assert renewed["secret"] != made["secret"]
    assert run("rm", made["id"]).exit_code == 0
    missing = run("test", made["id"])
    assert isinstance(missing.exception, NoSuchWebhook)
