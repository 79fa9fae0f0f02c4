"""The image: hadolint checks the Dockerfile, and its commands run as its user on a read-only tree."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from monitor.config.settings import load_settings
from monitor.demo.films import Film
from tests.support import media
from tests.support.container import Container, Dockerfile, first_process
from tests.support.image_libraries import link_into, requirements
from tests.support.promql_queries import ROOT
from tests.support.serve_process import wait_until

DOCKERFILE = ROOT / "deploy/Dockerfile"
PARSED = Dockerfile(DOCKERFILE)
FPS = 4
FILM = Film("film", "The Film", 77, ("hills", "face", "city", "card"), 24.0)


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([Path(sys.executable).parent / "hadolint", DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_it_does_not_run_as_root_and_has_a_health_check() -> None:
    assert all(int(number) > 0 for number in PARSED.word("USER").split(":"))
    port = PARSED.environment["COPYWATCH_WEB__PROBES_PORT"]
    assert f":{port}/readyz" in PARSED.command("HEALTHCHECK")[-1]
    assert port in PARSED.word("EXPOSE").split()
    assert PARSED.command("ENTRYPOINT") == ["copywatch"]


def test_dockerignore_passes_exactly_the_files_that_are_copied() -> None:
    allowed = re.findall(r"^!(\S+)", (ROOT / ".dockerignore").read_text(), re.M)
    copied = [line.split()[1:-1] for line in DOCKERFILE.read_text().splitlines() if re.match(r"COPY (?!--from)", line)]
    assert sorted(allowed) == sorted(path for paths in copied for path in paths)
    assert all((ROOT / path).exists() for path in allowed)


def test_its_environment_variables_are_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in PARSED.environment.items():
        if name.startswith("COPYWATCH_"):
            monkeypatch.setenv(name, value)
    settings = load_settings()
    assert settings.data_dir == Path("/data")
    assert settings.web.host == "127.0.0.1"  # other hosts require a token


@pytest.fixture
def box(tmp_path: Path, pytestconfig: pytest.Config) -> Iterator[Container]:
    """The image, built from its Dockerfile.

    pip finds every library installed already, unless `--whole-image` asks for an installation from scratch. In place of
    PyTorch's index of CPU wheels stands pip's own, which has the same torch with GPU libraries.
    """
    box = Container(PARSED, tmp_path / "box")
    if not pytestconfig.getoption("--whole-image"):
        link_into(box.packages)
    box.build(ROOT, {"TORCH_INDEX": os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")})
    yield box
    subprocess.run(["rm", "-rf", box.folder], check=True)  # gigabytes, in the long form


@pytest.mark.system
def test_its_commands_run_as_its_user_on_a_read_only_tree(box: Container) -> None:
    installed = {canonicalize_name(one.name): one.version for one in distributions(path=[str(box.packages)])}
    wanted = {name: one.version for name, one in requirements().items()}
    assert {name: installed[name] for name in installed.keys() - {"copywatch", "pip", "setuptools"}} == {
        name: wanted[name] for name in wanted.keys() - {"setuptools"}
    }
    pictures = [FILM.picture(n / FPS) for n in range(24 * FPS)]
    for name in ("film.mp4", "air.ts"):
        media.write_clip(box.data / name, ((n / FPS, one) for n, one in enumerate(pictures)), fps=FPS)
    (box.config / "copywatch.yaml").write_text(
        "alerting: {output: /data/alerts.jsonl}\nchannels: [{name: air, url: /data/air.ts, mode: exact}]\n"
    )
    user = PARSED.word("USER")
    assert f"{box.data.stat().st_uid}:{box.data.stat().st_gid}" == user

    adding = box.start([*PARSED.command("ENTRYPOINT"), "refs", "add", "/data/film.mp4"])
    output, _ = adding.communicate(timeout=120)
    assert adding.returncode == 0, output

    container = box.start([*PARSED.command("ENTRYPOINT"), *PARSED.command("CMD")])
    try:
        health = PARSED.command("HEALTHCHECK")
        wait_until(
            lambda: box.join(container, health).returncode == 0, lambda: (container.poll(), box.join(container, health))
        )
        alerts = box.data / "alerts.jsonl"
        wait_until(lambda: alerts.exists() and "alert.started" in alerts.read_text(), lambda: list(box.data.iterdir()))
        assert json.loads(alerts.read_text().splitlines()[0])["reference"] == "film"
        page = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8080/').status)"
        assert box.join(container, ["python", "-c", page]).stdout == "200\n"  # the dashboard's files are in the package
        status = Path(f"/proc/{first_process(container)}/status").read_text()
        assert re.search(r"^Uid:\s+(\d+)\s+\1\s+\1\s+\1$", status, re.M)[1] == user.split(":")[0]  # type: ignore[index]
        assert "NoNewPrivs:\t1" in status
        assert re.findall(r"^Cap\w+:\s+(\w+)$", status, re.M) == ["0" * 16] * 5
        for place, is_writable in (
            ("/data", True),
            ("/tmp", True),
            ("/", False),
            ("/opt/copywatch", False),
            ("/config", False),
        ):
            tried = box.join(container, ["python", "-c", f"open('{place}/tried', 'w')"])
            assert (tried.returncode == 0) is is_writable, place
        report = (
            "from reference_db.media.decoding import sandbox_report\n"
            "print([one.name for one in sandbox_report() if not one.in_force])"
        )
        missing = box.join(container, ["python", "-c", report]).stdout
        assert missing in ("[]\n", "['landlock']\n")  # decoders are confined without root, too
        os.kill(first_process(container), signal.SIGTERM)
        log, _ = container.communicate(timeout=60)
        assert container.returncode == 0, log
    finally:
        container.kill()
        container.wait()
