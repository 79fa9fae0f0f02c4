"""`copywatch doctor`: each fault says how to fix it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.command_result import Result, Run


def findings(result: Result) -> dict[str, dict[str, object]]:
    assert isinstance(result.json, list)
    return {finding["what"]: finding for finding in result.json}


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_doctor_names_channels_that_do_not_answer(
    run: Run, tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (tmp_path / "c.yaml").write_text(
            f"web: {{port: 0}}\nchannels:\n  - {{name: up, url: 'http://127.0.0.1:{port}/x.ts'}}\n"
            f"  - {{name: down, url: 'rtsp://u:hunter2@127.0.0.1:{free_port}/x'}}\n"
            "  - {name: gone, url: none.ts}\n  - {name: air, url: 'udp://239.0.0.1:9'}\n"
        )
        monkeypatch.delenv("COPYWATCH_ENCODER")
        result = run("doctor", "--config", "c.yaml", "--json")
    found = findings(result)
    assert [found[f"channel {name}"]["ok"] for name in ("up", "down", "gone", "air")] == [True, False, False, True]
    assert "hunter2" not in result.out
    assert result.code == 4
    for name in ("limits", "no_new_privs", "capabilities", "seccomp", "gateway", "files"):
        assert str(found[f"decoder sandbox: {name}"]["found"]).startswith("in force (")
    assert str(found["decoder sandbox: landlock"]["found"]).startswith(("in force (", "not available here: "))
    assert all(found[what]["ok"] for what in ("libraries", "data folder", "web port", "models", "library"))


def test_doctor_finds_a_port_in_use_and_a_file_instead_of_a_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file in the way")
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "c.yaml").write_text(f"web: {{port: {server.getsockname()[1]}}}\n")
        result = run("doctor", "--config", "c.yaml")
    assert result.code == 1
    faults = [line for line in result.out.splitlines() if line.startswith("FAULT")]
    assert [line.split()[1] for line in faults][:2] == ["data", "web"]
    assert "set COPYWATCH_DATA_DIR" in faults[0]
    assert "set web.port" in faults[1]
