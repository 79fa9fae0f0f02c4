"""What is public: every row of the registries, judged at both of its ends. Nothing here connects anywhere."""

import ipaddress

import pytest

from reference_db.media.address_ranges import is_public

# IANA IPv4 and IPv6 Special-Purpose Address Registry: the blocks whose "Globally Reachable" is False or N/A.
NOT_REACHABLE = """
0.0.0.0/8 0.0.0.0/32 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.0.0/29
192.0.0.8/32 192.0.0.170/32 192.0.0.171/32 192.0.2.0/24 192.88.99.0/24 192.88.99.2/32 192.168.0.0/16 198.18.0.0/15
198.51.100.0/24 203.0.113.0/24 240.0.0.0/4 255.255.255.255/32
::/128 ::1/128 64:ff9b:1::/48 100::/64 100:0:0:1::/64 2001::/23 2001::/32 2001:2::/48 2001:10::/28 2001:db8::/32
3fff::/20 5f00::/16 fc00::/7 fe80::/10
"""
# Not in those registries: multicast, deprecated site-local and IPv4-compatible addresses, unallocated space.
OTHERS = "224.0.0.0/4 233.252.0.0/24 ::/96 fec0::/10 ff00::/8 100:1::/32 4000::/3 8000::/2 e000::/4"
CLOUDS = {
    "169.254.169.254": "AWS, Google, Azure, Oracle, OpenStack: metadata",
    "169.254.170.2": "AWS: credentials of containers",
    "168.63.129.16": "Azure: WireServer",
    "192.0.0.192": "Oracle: metadata of old images",
    "100.100.100.200": "Alibaba: metadata",
    "fd00:ec2::254": "AWS: metadata",
    "fd20:ce::254": "Google: metadata",
}
# "Globally Reachable" is True, as blocks of their own, and ordinary hosts beside special ranges.
PUBLIC = """
192.31.196.1 192.52.193.1 192.175.48.1 2620:4f:8000::1
1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.0 168.63.129.15 168.63.129.17
169.253.255.255 169.255.0.0 172.15.255.255 172.32.0.0 191.255.255.255 192.0.1.0 192.0.3.0 192.167.255.255 192.169.0.0
198.17.255.255 198.20.0.0 223.255.255.255 2001:200::1 2606:4700::1111 2a00:1450::1 2001:db7:ffff::1 2001:db9::1
"""


@pytest.mark.parametrize("block", f"{NOT_REACHABLE} {OTHERS}".split())
def test_no_address_of_a_special_block_is_public(block: str) -> None:
    network = ipaddress.ip_network(block)
    middle = network[network.num_addresses // 2]
    assert [str(one) for one in (network[0], middle, network[-1]) if is_public(str(one))] == []


@pytest.mark.parametrize("address", CLOUDS)
def test_addresses_that_only_a_cloud_s_own_machines_reach_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC.split())
def test_ordinary_hosts_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "prefix",
    ["::ffff:{}", "64:ff9b::{}", "2002:{:02x}{:02x}:{:02x}{:02x}::"],
)
def test_an_embedded_ipv4_address_is_judged_itself(prefix: str) -> None:
    for address, expected in (("8.8.8.8", True), ("10.0.0.1", False), ("168.63.129.16", False), ("100.64.0.1", False)):
        numbers = ipaddress.IPv4Address(address).packed
        embedded = prefix.format(address) if prefix.count("{") == 1 else prefix.format(*numbers)
        assert is_public(embedded) == expected, embedded


def test_other_embeddings_are_never_public() -> None:
    # IPv4-compatible, the local NAT64 prefix, and Teredo, whose server and client are chosen by whoever names it
    for address in ("::127.0.0.1", "::8.8.8.8", "64:ff9b:1::808:808", "2001:0:808:808::f7f7:f7f7", "fe80::1%eth0"):
        assert not is_public(address), address
