"""Health: which checks fail, and when a worker counts as stuck. tests/ops/test_health_in_serve.py has real faults."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from monitor.ops import health
from monitor.ops.health import Health, Worker, set_problem


def test_a_problem_fails_its_check_until_it_is_cleared() -> None:
    problems: dict[str, str] = {}
    checks = Health(problems, ["index", "outbox"], {}, vital=[])
    assert checks.checks == {"index": None, "outbox": None}
    assert checks.problems == {}
    set_problem(problems, "index", "cannot be read")
    set_problem(problems, "kafka", "does not answer")  # a check that exists only while it fails
    assert checks.checks == {"index": "cannot be read", "outbox": None, "kafka": "does not answer"}
    assert checks.problems == {"index": "cannot be read", "kafka": "does not answer"}
    set_problem(problems, "index", None)
    set_problem(problems, "outbox", None)
    assert checks.problems == {"kafka": "does not answer"}


def test_a_worker_with_work_that_makes_no_progress_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("monitor.ops.health.time.monotonic", lambda: now_s[0])
    worker, first, second = Worker(), Future[None](), Future[None]()
    checks = Health({}, [], {"compute": worker, "other": Worker()}, vital=["compute"])
    now_s[0] += 1000  # idle for as long as it likes
    assert worker.problem is None
    worker.track(first)
    worker.track(second)
    now_s[0] += health.STUCK_S
    assert worker.problem is None
    now_s[0] += 1
    assert worker.problem == "has finished nothing for 31 s; restart it"
    assert checks.problems == {"compute": worker.problem}
    assert checks.stuck_worker == f"compute {worker.problem}"
    first.set_result(None)  # progress
    assert worker.problem is None
    assert Health({}, [], {"compute": worker}, vital=["compute"]).stuck_worker is None
    now_s[0] += 1000
    assert worker.problem is not None
    second.set_exception(OSError())  # failed work is finished work
    assert worker.problem is None


def test_a_stuck_worker_that_is_not_vital_fails_its_check_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "STUCK_S", -1.0)
    worker = Worker()
    worker.track(Future())
    checks = Health({}, [], {"refresher": worker}, vital=[])
    assert checks.problems.keys() == {"refresher"}
    assert checks.stuck_worker is None
