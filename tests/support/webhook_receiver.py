"""A real web server that receives webhooks, and a real sender that delivers to it.

Run as a program (`python -m tests.support.webhook_receiver DATA_DIR`) it sends until it is killed.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from prometheus_client import CollectorRegistry

from monitor.alerting.outbox import History
from monitor.alerting.webhook_delivery import WebhookSender
from monitor.alerting.webhooks import WebhookStore
from monitor.ops.metrics import Metrics
from monitor.rights.store import RightsStore

LOOPBACK = ("127.0.0.1",)


class Receiver:
    """Answers the n-th request with the status `answer(n)` and stores every request."""

    def __init__(self, answer: Callable[[int], int], headers: dict[str, str] | None) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.requests.append(({k.lower(): v for k, v in self.headers.items()}, body))
                self.send_response(answer(len(receiver.requests)))
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def ids(self) -> list[str]:
        """The webhook-id of every request."""
        return [headers["webhook-id"] for headers, _ in self.requests]


@contextmanager
def open_receiver(
    answer: Callable[[int], int] = lambda n: 204, headers: dict[str, str] | None = None
) -> Iterator[Receiver]:
    receiver = Receiver(answer, headers)
    try:
        yield receiver
    finally:
        receiver.close()


def deliver_until(condition: Callable[[], bool], webhooks: WebhookStore, data_dir: Path) -> None:
    """Runs a webhook sender until the condition holds."""

    async def run() -> None:
        rights, metrics = RightsStore(data_dir), Metrics(CollectorRegistry())
        sender = WebhookSender(webhooks, History(data_dir), rights, metrics, LOOPBACK, 30.0)
        sending = asyncio.create_task(sender.run())
        while not await asyncio.to_thread(condition):
            assert not sending.done(), sending
            await asyncio.sleep(0.02)  # the condition depends on other threads and processes
        sending.cancel()
        await asyncio.wait([sending])

    asyncio.run(run())


if __name__ == "__main__":
    deliver_until(lambda: False, WebhookStore(Path(sys.argv[1])), Path(sys.argv[1]))
