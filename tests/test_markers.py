"""Markers: what follows from fixtures, and which programs a test of the fast set can start."""

from __future__ import annotations

import shutil

import pytest

pytest_plugins = ["pytester"]

DEBIAN = ("chromium", "curl", "ffmpeg", "java", "kcat", "mvn", "nginx", "npm", "openssl", "prometheus", "promtool")
HOOKS = "from tests.conftest import pytest_addoption, pytest_collection_modifyitems, pytest_configure"
PROTOCOL = "from tests.conftest import pytest_runtest_protocol"


@pytest.mark.parametrize("program", [*DEBIAN, "strace", "systemd-analyze", "cvlc"])
def test_a_test_of_the_fast_set_does_not_find_programs_of_packages(program: str) -> None:
    assert shutil.which(program) is None


def test_it_finds_the_programs_of_any_linux() -> None:
    for program in ("sh", "bash", "cat", "python3"):
        assert shutil.which(program), program


def test_an_unmarked_test_that_starts_such_a_program_fails(pytester: pytest.Pytester) -> None:
    folder = pytester.mkdir("packages")
    (folder / "strace").write_text("#!/bin/sh\n")
    (folder / "strace").chmod(0o755)
    pytester.makeconftest(f"{HOOKS}\n{PROTOCOL}")
    pytester.makepyfile(
        f"""
        import os, subprocess, pytest
        os.environ["PATH"] = "{folder}"

        @pytest.fixture(scope="module")
        def traced(): subprocess.run(["strace"], check=True)

        def test_unmarked(): subprocess.run(["strace"], check=True)

        def test_by_a_fixture(traced): pass

        @pytest.mark.slow
        def test_slow(): subprocess.run(["strace"], check=True)

        @pytest.mark.system
        def test_system(): subprocess.run(["strace"], check=True)
        """
    )
    pytester.inline_run("-p", "no:cacheprovider").assertoutcome(passed=1, failed=3)


def test_markers_follow_from_fixtures(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(HOOKS)
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture
        def broker(): pass

        @pytest.fixture
        def browser(): pass

        def test_with_broker(broker): pass

        def test_with_browser(browser): pass

        def test_with_neither(): pass
        """
    )
    run = pytester.inline_run("-m", "not broker and not browser", "-p", "no:cacheprovider")
    run.assertoutcome(passed=1)
