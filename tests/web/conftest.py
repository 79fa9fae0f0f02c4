"""One running server per test file: some tests leave a channel or a review behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.recorded_channel import RecordedChannel
from tests.support.web_server import Client, MonitorServer, write_config


@pytest.fixture(scope="module")
def server(recorded: RecordedChannel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MonitorServer]:
    running = MonitorServer(write_config(recorded, tmp_path_factory.mktemp("web")))
    running.wait_for("the stream ended")
    yield running
    assert running.stop() == 0
    assert "s3cret" not in "".join(running.log)
    assert "hush" not in "".join(running.log)


@pytest.fixture
def client(server: MonitorServer) -> Client:
    return server.client()
