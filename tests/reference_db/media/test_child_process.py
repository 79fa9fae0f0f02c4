"""The set-up of a child process: request in, answers out, and no life after the parent's."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys

CHILD = """
import sys
from reference_db.media.child_process import receive_request
request, answers = receive_request()
print("a stray print")
answers.write(request["question"].encode())
answers.flush()
sys.stdin.close()
import time
time.sleep(request["sleep_s"])
"""
PARENT = f"""
import json, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdin.write(json.dumps({{"parent": os.getpid(), "question": "alive", "sleep_s": 60}}).encode())
child.stdin.close()
assert child.stdout.read(5) == b"alive"
print(child.pid, flush=True)
time.sleep(60)
"""


def ask(**request: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD]
    return subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=60)


def test_answers_go_to_stdout_and_stray_prints_do_not() -> None:
    done = ask(parent=os.getpid(), question="who?", sleep_s=0)
    assert (done.returncode, done.stdout) == (0, "who?")
    assert "a stray print" in done.stderr


def test_a_child_whose_parent_is_gone_answers_nothing() -> None:
    done = ask(parent=1, question="who?", sleep_s=0)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_child_dies_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    try:
        assert select.select([child], [], [], 20)[0], "the child outlived its parent"
    finally:
        os.close(child)
