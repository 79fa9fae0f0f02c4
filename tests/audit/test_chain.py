"""The hash chain: every removed, changed or moved entry is found, and what may be missing is explained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from monitor.audit.chain import (
    ERASURE,
    FIRST_HASH,
    RETENTION,
    Record,
    canonical,
    chain_hash,
    numbers_of,
    ranges_of,
    record_of,
    sha256,
    verify_chain,
)


def chain(n: int, *more: tuple[str, dict[str, object]]) -> list[Record]:
    """So many ordinary entries, and after them entries with these actions and details."""
    records: list[Record] = []
    previous = FIRST_HASH
    for number, (action, details) in enumerate([*[("licences add", dict[str, object]())] * n, *more], 1):
        person = canonical({"salt": f"{number:032}", "who": f"user {number}", "address": "192.0.2.1", "about": None})
        values = {"n": number, "action": action, "details": details, "person": sha256(person)}
        body = canonical(values)
        previous = chain_hash(previous, body)
        records.append(Record(number, body, person, previous))
    return records


def faults(records: list[Record]) -> list[str]:
    return verify_chain(records).faults


def test_a_whole_chain_has_no_fault() -> None:
    found = verify_chain(chain(9))
    assert (found.faults, found.n_entries, found.first, found.last) == ([], 9, 1, 9)
    assert found.last_hash == chain(9)[-1].hash
    assert verify_chain([]).is_whole


def test_a_removed_entry_is_found() -> None:
    for n in range(2, 9):
        records = [one for one in chain(9) if one.n != n]
        assert faults(records) == [f"entries {n} to {n} are missing"]
    assert faults(chain(9)[1:]) == ["the entries before entry 2 are missing, and no retention entry says why"]


def test_a_changed_entry_is_found() -> None:
    for place in range(9):
        records = chain(9)
        records[place] = replace(records[place], body=records[place].body.replace("licences add", "licences rm"))
        assert len(faults(records)) == 1, place
        assert f"entry {place + 1} was changed" in faults(records)[0]


def test_reordered_entries_are_found() -> None:
    records = chain(9)
    records[3], records[6] = records[6], records[3]
    assert faults(records)
    moved = chain(9)  # the contents change places, the numbers of the rows stay
    moved[3], moved[6] = replace(moved[6], n=4), replace(moved[3], n=7)
    assert "entry 4 is not the one that was written there" in faults(moved)


def test_a_renumbered_chain_is_found() -> None:
    records = [replace(one, n=place, body=one.body) for place, one in enumerate(chain(9)[1:], 1)]
    assert faults(records)


def test_damaged_json_is_found() -> None:
    records = chain(3)
    records[1] = replace(records[1], body="{")
    assert faults(records)[0] == "entry 2 is not the one that was written there"


def test_the_old_end_may_be_cut_only_where_a_retention_entry_says_so() -> None:
    whole = chain(6)
    records = chain(6, (RETENTION, {"removed_to": 4, "hash": whole[3].hash}))
    assert faults(records[4:]) == []
    assert faults(records[5:])  # one more than it says
    assert faults(records[3:])  # one less than it says: the entry was put back
    assert faults(chain(6, (RETENTION, {"removed_to": 4, "hash": "f" * 64}))[4:])
    assert verify_chain(whole[4:], is_part=True).is_whole


def test_erased_personal_data_need_an_entry_that_says_so() -> None:
    records = chain(5, (ERASURE, {"erased": "2-3"}))
    erased = [replace(one, person=None) if one.n in (2, 3) else one for one in records]
    assert (faults(erased), verify_chain(erased).n_erased) == ([], 2)
    more = [replace(one, person=None) if one.n in (2, 3, 5) else one for one in records]
    assert faults(more) == ["the personal data of entries 5 are missing"]


def test_changed_personal_data_are_found() -> None:
    records = chain(3)
    records[1] = replace(records[1], person=(records[1].person or "").replace("user 2", "user 9"))
    assert faults(records) == ["the personal data of entry 2 were changed"]


@pytest.mark.parametrize("numbers", [[], [1], [1, 2, 3], [1, 3, 4, 9]])
def test_ranges(numbers: list[int]) -> None:
    assert list(numbers_of(ranges_of(numbers))) == numbers


def test_an_exported_line_is_the_record() -> None:
    for record in chain(3):
        assert record_of(record.as_line()) == record
    for line in ("", "{}", "[]", '{"entry": {}, "person": null, "hash": ""}', '"x"'):
        with pytest.raises(ValueError, match=r".*"):
            record_of(line)
