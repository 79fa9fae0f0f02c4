"""`copywatch webhooks`: add, test, list, replay, rotate and remove."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from monitor.cli import app
from monitor.errors import NoSuchWebhook
from tests.support.webhook_receiver import open_receiver


def test_the_webhook_commands(tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        environment = {"COPYWATCH_WEBHOOKS__ALLOW": '["127.0.0.1"]', "COPYWATCH_DATA_DIR": str(tmp_path)}
        return CliRunner(env=environment).invoke(app, ["webhooks", *arguments])

    with open_receiver(lambda n: 200 if n == 1 else 500) as receiver:
        added: dict[str, Any] = json.loads(run("add", receiver.url, "--type", "alert.ended", "--json").stdout)
        assert added["secret"].startswith("whsec_")
        assert run("test", added["id"]).stdout == "accepted: HTTP status 200\n"
        failed = run("test", added["id"])
        assert (failed.exit_code, failed.stdout) == (1, "not accepted: HTTP status 500\n")
    listed = run("list", "--json").stdout
    assert added["secret"] not in listed
    log = json.loads(run("deliveries", added["id"], "--json").stdout)
    assert [(one["event"], one["state"]) for one in log] == [("test.ping", "failed"), ("test.ping", "done")]
    assert run("replay", added["id"], str(log[0]["id"])).exit_code == 0
    renewed = json.loads(run("rotate", added["id"], "--json").stdout)
    assert renewed["secret"].startswith("whsec_")
    assert renewed["secret"] != added["secret"]
    assert run("rm", added["id"]).exit_code == 0
    missing = run("test", added["id"])
    assert isinstance(missing.exception, NoSuchWebhook)
