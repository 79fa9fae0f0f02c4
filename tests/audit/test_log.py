"""The audit log on disk: durable, chained across processes, without secrets, with retention and erasure."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import apsw
import pytest

from monitor.audit.chain import RETENTION, record_of, verify_chain
from monitor.audit.log import DONE, FAILED, FILE, UNKNOWN, Actor, AuditLog, Change
from monitor.errors import AuditFailed

ADA = Actor("ada", "192.0.2.1", "api")
BOB = Actor("bob", "198.51.100.7", "dashboard")


def change(action: str = "licences add", actor: Actor = ADA, **values: object) -> Change:
    return Change(action=action, actor=actor, **values)  # type: ignore[arg-type]


def edit(data_dir: Path, sql: str) -> None:
    """Changes the file as somebody with access to the disk could."""
    db = apsw.Connection(str(data_dir / FILE))
    db.execute("DROP TRIGGER IF EXISTS entry_is_final; DROP TRIGGER IF EXISTS entry_stays")
    db.execute(sql)
    db.close()


def test_an_entry_says_who_did_what_when_and_from_where(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    log.append(change(object="L1", status=201, details={"channel": "five", "whole": True}))
    (entry,) = [one.as_dict() for one in log.entries()]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry.pop("at"))
    assert len(entry.pop("hash")) == 64
    assert entry == {
        "n": 1,
        "action": "licences add",
        "via": "api",
        "result": DONE,
        "status": 201,
        "object": "L1",
        "alerts": [],
        "details": {"channel": "five", "whole": True},
        "who": "ada",
        "address": "192.0.2.1",
        "about": None,
        "erased": False,
    }
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_an_empty_log_is_whole_and_nothing_is_created_by_reading(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "new")
    assert log.verify().is_whole
    assert (log.entries(), list(log.records()), log.head()[0], log.n_expired(timedelta(0))) == ([], [], 0, 0)
    assert log.n_personal("ada") == 0
    log.recover()
    assert not (tmp_path / "new").exists()


def test_entries_are_listed_newest_first_in_pages_and_by_filters(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    for n in range(10):
        log.append(change("licences add" if n % 2 else "licences rm", ADA if n < 5 else BOB))
    log.append(change("tokens add", ADA, about="bob", result=FAILED))
    assert [one.n for one in log.entries(limit=3)] == [11, 10, 9]
    assert [one.n for one in log.entries(limit=3, before=9)] == [8, 7, 6]
    assert [one.n for one in log.entries(who="bob")] == [11, 10, 9, 8, 7, 6]
    assert [one.n for one in log.entries(action="licences add")] == [10, 8, 6, 4, 2]
    assert len(log.entries(action="licences")) == 10
    assert [one.n for one in log.entries(result=FAILED)] == [11]
    assert log.entries(since="2999-01-01T00:00:00Z") == []
    assert len(log.entries(until="2999-01-01T00:00:00Z")) == 11


def test_entries_that_concern_an_alert(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    log.append(change("alerts review", alerts=("a" * 24, "b" * 24)))
    log.append(change())
    log.append(change("alerts review", alerts=("b" * 24,)))
    assert [one.n for one in log.of_alert("b" * 24)] == [1, 3]
    assert [one.n for one in log.of_alert("a" * 24)] == [1]


def test_no_secret_enters_the_log(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    token = "cw_" + "A1b2" * 10
    log.append(
        change(
            "channels add",
            Actor(f"x {token}", "a\x1b[31m\u202eb", "api"),
            object=token,
            details={
                "url": "rtsp://user:pa55@10.0.0.1/live?token=hush",
                "secret": "whsec_" + "Zz9+" * 8,
                "l": "x" * 999,
            },
        )
    )
    (entry,) = [one.as_dict() for one in log.entries()]
    text = json.dumps(entry, ensure_ascii=False) + "".join(one.as_line() for one in log.records())
    for secret in (token, "pa55", "hush", "Zz9+", "\x1b", "\u202e"):
        assert secret not in text
    assert entry["object"] == "cw_***"
    assert len(entry["details"]["l"]) == 200


# --- changes under way -----------------------------------------------------------------------------------------------


def test_a_change_is_on_disk_before_it_is_made_and_enters_the_chain_with_its_result(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    pending = log.begin(change())
    assert log.entries() == []
    AuditLog(tmp_path).append(change("tokens add"))  # another process
    log.finish(pending, change(result=FAILED))
    assert [one.as_dict()["result"] for one in log.entries()] == [FAILED, DONE]
    log.discard(log.begin(change()))
    assert len(log.entries()) == 2
    assert log.verify().is_whole


KILLED = """
import os, signal, sys
from pathlib import Path
from monitor.audit.log import Actor, AuditLog, Change
log = AuditLog(Path(sys.argv[1]))
log.begin(Change(action="webhooks rm", actor=Actor("eve", "203.0.113.5", "api"), object="wh_1", alerts=("a" * 24,)))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_change_whose_process_was_killed_is_recorded_with_an_unknown_result(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)]).returncode == -signal.SIGKILL
    log = AuditLog(tmp_path)
    assert log.entries() == []
    log.discard(log.begin(change()))  # any later change finds it
    (entry,) = [one.as_dict() for one in log.of_alert("a" * 24)]
    assert (entry["who"], entry["action"], entry["object"], entry["result"]) == ("eve", "webhooks rm", "wh_1", UNKNOWN)
    assert entry["details"]["started_at"] < entry["at"]
    log.recover()
    assert len(log.entries()) == 1
    assert log.verify().is_whole


def test_a_change_of_a_process_that_cannot_be_seen_is_recovered_after_a_day(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    log.begin(change())
    edit(tmp_path, "UPDATE pending SET process = replace(process, ' ', ' 1')")  # another namespace of processes
    log.recover()
    assert log.entries() == []
    edit(tmp_path, "UPDATE pending SET started_at = '2026-01-01T00:00:00.000Z'")
    log.recover()
    assert len(log.entries(result=UNKNOWN)) == 1


def test_a_result_that_cannot_be_written_is_written_with_the_next_entry(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    pending = log.begin(change())
    blocking = apsw.Connection(str(tmp_path / FILE))
    blocking.execute("CREATE TRIGGER full BEFORE INSERT ON entry BEGIN SELECT raise(ABORT, 'disk full'); END")
    with pytest.raises(AuditFailed):
        log.finish(pending, change(object="L7"))
    with pytest.raises(AuditFailed):
        log.append(change())
    blocking.execute("DROP TRIGGER full")
    blocking.close()
    log.append(change(object="L8"))
    assert [one.as_dict()["object"] for one in log.records()] == ["L7", "L8"]
    assert log.verify().is_whole


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from monitor.audit.log import Actor, AuditLog, Change
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
AuditLog(Path(sys.argv[1])).begin(Change(action="licences add", actor=Actor("ada", None, "cli")))
"""


def test_a_full_disk_refuses_the_change_before_it_is_made(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    log.append(change())
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True)
    assert "monitor.errors.AuditFailed" in done.stderr
    assert log.verify().is_whole
    log.append(change())  # there is room again
    assert log.head()[0] == 2


def test_a_result_is_recorded_though_another_process_took_the_change_for_lost(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    pending = log.begin(change(object="L7"))
    edit(tmp_path, "UPDATE pending SET process = 'another-boot 1 1 1'")
    AuditLog(tmp_path).recover()
    log.finish(pending, change(object="L7"))
    assert [one.as_dict()["result"] for one in log.records()] == [UNKNOWN, DONE]


def test_threads_of_one_process_append_each_result_once(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)

    def write(n: int) -> None:
        log.finish(log.begin(change(object=str(n))), change(object=str(n)))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(40)))
    assert sorted(int(one.as_dict()["object"]) for one in log.records()) == list(range(40))
    assert log.verify().is_whole


# --- several processes -----------------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from monitor.audit.log import Actor, AuditLog, Change
log = AuditLog(Path(sys.argv[1]))
for n in range(int(sys.argv[2])):
    one = Change(action="licences add", actor=Actor(sys.argv[3], None, "cli"), object=str(n))
    pending = log.begin(one)
    print("begun", flush=True)
    log.finish(pending, one)
"""


def test_processes_write_one_chain_and_killed_ones_leave_it_whole(tmp_path: Path) -> None:
    n_each, seed = 12, random.randrange(10**6)
    print(f"seed {seed}")
    generator = random.Random(seed)
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(n_each), f"writer {n}"], stdout=subprocess.PIPE, text=True
        )
        for n in range(4)
    ]
    for writer in writers[:2]:  # killed somewhere in the middle
        assert writer.stdout
        for _ in range(generator.randrange(1, n_each)):
            writer.stdout.readline()
        writer.kill()
    for writer in writers:
        writer.communicate()
    log = AuditLog(tmp_path)
    log.recover()
    found = log.verify()
    assert found.is_whole, found.faults
    entries = [one.as_dict() for one in log.records()]
    for name in ("writer 2", "writer 3"):
        assert [one["object"] for one in entries if one["who"] == name] == [str(n) for n in range(n_each)]
    for name in ("writer 0", "writer 1"):
        own = [one for one in entries if one["who"] == name]
        assert sum(one["result"] == UNKNOWN for one in own) <= 1
        assert [one["object"] for one in own] == [str(n) for n in range(len(own))]


# --- tampering -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sql", "fault"),
    [
        ("DELETE FROM entry WHERE n = 3", "entries 3 to 3 are missing"),
        ("DELETE FROM entry WHERE n = 1", "the entries before entry 2 are missing"),
        ("DELETE FROM entry WHERE n = 6", "entries 6 to 6 are missing at the end"),
        ("DELETE FROM entry", "entries 1 to 6 are missing at the end"),
        ("UPDATE entry SET body = replace(body, 'licences', 'webhooks') WHERE n = 2", "entry 2 was changed"),
        ("UPDATE entry SET body = replace(body, 'licences', 'webhooks') WHERE n = 6", "entry 6 was changed"),
        ("UPDATE entry SET hash = '00' WHERE n = 6", "entry 6 was changed"),
        (
            "UPDATE entry SET n = -n; UPDATE entry SET n = iif(n = -2, 4, iif(n = -4, 2, -n))",
            "entry 2 is not the one that was written there",
        ),
        ("UPDATE person SET body = replace(body, 'ada', 'eve') WHERE n = 5", "personal data of entry 5 were changed"),
        ("DELETE FROM person WHERE n = 5", "the personal data of entries 5 are missing"),
    ],
)
def test_a_manipulated_file_is_found(tmp_path: Path, sql: str, fault: str) -> None:
    log = AuditLog(tmp_path)
    for _ in range(6):
        log.append(change())
    assert log.verify().is_whole
    edit(tmp_path, sql)
    found = log.verify()
    assert not found.is_whole
    assert any(fault in one for one in found.faults), found.faults


def test_our_own_code_cannot_change_or_delete_an_entry(tmp_path: Path) -> None:
    AuditLog(tmp_path).append(change())
    db = apsw.Connection(str(tmp_path / FILE))
    for sql in ("UPDATE entry SET hash = ''", "DELETE FROM entry"):
        with pytest.raises(apsw.ConstraintError, match="entries of the audit log"):
            db.execute(sql)
    db.close()


# --- retention and erasure -------------------------------------------------------------------------------------------


def test_retention_cuts_the_old_end_and_the_rest_can_be_verified(tmp_path: Path) -> None:
    log, day = AuditLog(tmp_path), timedelta(days=1)
    for _ in range(5):
        log.append(change(alerts=("a" * 24,)))
    assert log.apply_retention(day) == 0
    assert log.n_expired(timedelta(0)) == 5
    later = datetime.now(UTC) + 2 * day
    assert log.apply_retention(day, later) == 5
    (cut,) = [one.as_dict() for one in log.records()]
    assert (cut["n"], cut["action"], cut["who"]) == (6, RETENTION, "copywatch")
    assert (cut["details"]["removed"], cut["details"]["removed_to"]) == (5, 5)
    assert log.of_alert("a" * 24) == []
    log.append(change())
    assert log.verify().is_whole
    assert log.apply_retention(day, later + 2 * day) == 2
    log.append(change())
    found = log.verify()
    assert (found.is_whole, found.first, found.last) == (True, 8, 9)
    edit(tmp_path, "DELETE FROM entry WHERE n = 8")
    assert not log.verify().is_whole


def test_a_person_can_be_erased_and_the_chain_stays_whole(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    for actor in (ADA, BOB, ADA):
        log.append(change(actor=actor))
    log.append(change("tokens add", BOB, about="ada"))
    assert log.n_personal("ada") == 3
    assert log.erase("ada", Actor("root", "local", "cli")) == 3
    assert b'"ada"' not in (tmp_path / FILE).read_bytes()
    entries = [one.as_dict() for one in log.records()]
    assert [one["who"] for one in entries] == [None, "bob", None, None, "root"]
    assert [one["erased"] for one in entries] == [True, False, True, True, False]
    found = log.verify()
    assert (found.is_whole, found.n_erased) == (True, 3)
    assert log.erase("ada", ADA) == 0
    assert log.erase(BOB.address or "", Actor("root", "local", "cli")) == 1


def test_an_export_can_be_verified_elsewhere(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    for n in range(20):
        log.append(change(object=f"L{n} ü"))
    log.erase("ada", BOB)
    lines = [one.as_line() for one in log.records()]
    assert verify_chain(map(record_of, lines)).is_whole
    changed = [line.replace("L7", "L8") for line in lines]
    assert not verify_chain(map(record_of, changed)).is_whole
    assert verify_chain(map(record_of, lines)).last_hash == log.head()[1] == log.hash_of(21)
