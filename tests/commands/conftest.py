"""Runs commands with a small encoder and two short videos."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from monitor.cli import main
from tests.support.command_result import Result, Run
from tests.support.media import write_film
from tests.support.onnx_encoders import write_grid


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_grid(tmp_path_factory.mktemp("encoder") / "grid.onnx", last=0.01)


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("films")
    write_film(folder / "one.mp4", 1, 6)
    write_film(folder / "two.mp4", 2, 5)
    return folder


@pytest.fixture
def run(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process, with a new data folder."""
    for name in [name for name in os.environ if name.startswith("COPYWATCH_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COPYWATCH_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("COPYWATCH_ENCODER", str(encoder))
    # The limit counts the whole process, and this one holds what the tests before it have loaded.
    monkeypatch.setenv("COPYWATCH_REGISTRATION__MEMORY_BYTES", str(64 << 30))
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Result:
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit:
            main([str(one) for one in arguments])
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        assert "\x1b" not in out + err, "colour without a terminal"
        code = exit.value.code
        assert isinstance(code, int)
        return Result(code, out, err)

    return call
