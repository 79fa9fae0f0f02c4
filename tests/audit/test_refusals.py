"""Refused requests: the first ones are recorded, the others are counted."""

from __future__ import annotations

from monitor.audit.refusals import MAX_GROUPS, SHOWN_EACH, SHOWN_IN_ALL, WINDOW_S, RefusalCounter, Refusals, network_of


def test_the_first_refusals_of_an_address_get_entries_and_the_others_are_counted() -> None:
    counter = RefusalCounter()
    shown = [counter.count("192.0.2.1", float(n)) for n in range(500)]
    assert shown == [True] * SHOWN_EACH + [False] * (500 - SHOWN_EACH)
    assert counter.count("192.0.2.2", 500.0)
    assert counter.take(WINDOW_S - 1) == []  # the window has not ended
    assert counter.take(WINDOW_S) == [Refusals("192.0.2.1", 490)]
    assert counter.count("192.0.2.1", WINDOW_S)  # a new window
    assert counter.take() == []


def test_many_addresses_cannot_write_more_than_a_fixed_number_of_entries() -> None:
    counter = RefusalCounter()
    n_shown = sum(counter.count(f"192.0.{n // 256}.{n % 256}", 0.0) for n in range(10_000))
    counted = counter.take()
    assert n_shown <= SHOWN_IN_ALL
    assert len(counted) <= MAX_GROUPS + 1
    assert sum(one.n for one in counted) + n_shown == 10_000
    assert max(counted, key=lambda one: one.n).group is None


def test_one_ipv6_customer_is_one_address() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") == "2001:db8::/64"
    assert network_of("2001:db8:0:1::1") != network_of("2001:db8::1")
    assert network_of("192.0.2.7") == "192.0.2.7"
    assert network_of("::ffff:192.0.2.7") == "::ffff:192.0.2.7"
    assert network_of("not an address") == "not an address"
