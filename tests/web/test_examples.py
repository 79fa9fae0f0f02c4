"""The examples of the API and of webhooks in monitor/web/README.md, run as printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks import Webhook

from monitor.web.auth.tokens import Tokens
from reference_db.library import ReferenceLibrary
from tests.support import media
from tests.support.recorded_channel import RecordedChannel
from tests.support.web_only import WebAppServer

pytestmark = pytest.mark.system  # curl


PAGE = (Path(__file__).parents[2] / "monitor" / "web" / "README.md").read_text()


def blocks(title: str, kind: str) -> list[str]:
    """The code blocks of a section."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    assert found
    return re.findall(rf"^```{kind}\n(.*?)^```", found.group(1), re.M | re.S)


def test_every_example_call_works(tmp_path: Path, recorded: RecordedChannel) -> None:
    media.write_clip(tmp_path / "film.mp4", ((n / 5, media.picture(3, n / 5)) for n in range(20)), fps=5)
    ReferenceLibrary(recorded.settings.data_dir).export("harbour", tmp_path / "film-42.copywatch")
    token = Tokens(tmp_path / "data").add("ada", "write")
    calls = [line for block in blocks("REST API", "sh") for line in block.replace("\\\n", "").splitlines()]
    without_token = [call for call in calls if "local_secret" in call]
    with_token = [call for call in calls if call not in without_token]
    assert (len(with_token), len(without_token)) == (6, 1)
    with WebAppServer(tmp_path / "data") as server:
        for call in with_token:
            run(call, tmp_path, TOKEN=token, ADDRESS=f"http://127.0.0.1:{server.port}")
    with WebAppServer(tmp_path / "without") as server:
        server.context.local_secret.store()
        for call in without_token:
            run(call, tmp_path, DATA_DIR=str(tmp_path / "without"), ADDRESS=f"http://127.0.0.1:{server.port}")


def run(call: str, folder: Path, **variables: str) -> None:
    command = call.replace("curl ", "curl -sS --fail-with-body --noproxy '*' ", 1)
    environment = {**os.environ, **variables}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), (call, done.stdout)
    assert json.loads(done.stdout)


def test_the_example_receiver_verifies_a_signature() -> None:
    (program,) = blocks("Webhooks", "python")
    names: dict[str, Any] = {}
    exec(program, names)
    secret, now, body = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", datetime.now(UTC), '{"type": "test.ping"}'
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(secret).sign("msg_1", now, body),
    }
    assert names["received"](secret, headers, body.encode()) == {"type": "test.ping"}
