"""Address ranges that are not the public Internet: a table of ours, so the answer does not depend on Python's version.

Python's `ipaddress` knows the registries of its own release date only, and no cloud's internal addresses. The table has
every block of IANA's special-purpose registries (IPv4 and IPv6, as of 2025) that is not globally reachable, multicast
and reserved space, and addresses of cloud providers that only their own machines reach. A block inside one of these
that the registry calls reachable (192.0.0.9, 2001:1::1, ...) serves protocols, never a stream or a webhook: it stays
refused.
"""

import ipaddress

Number = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Block -> its name in the registry, or who uses it.
NOT_PUBLIC: dict[str, str] = {
    "0.0.0.0/8": "this network",
    "10.0.0.0/8": "private use",
    "100.64.0.0/10": "shared address space (carrier-grade NAT; Alibaba's metadata at 100.100.100.200)",
    "127.0.0.0/8": "loopback",
    "168.63.129.16/32": "Azure: WireServer, DHCP and DNS of the host",
    "169.254.0.0/16": "link-local (metadata of most clouds at 169.254.169.254)",
    "172.16.0.0/12": "private use",
    "192.0.0.0/24": "IETF protocol assignments (Oracle's metadata at 192.0.0.192)",
    "192.0.2.0/24": "documentation (TEST-NET-1)",
    "192.88.99.0/24": "deprecated 6to4 relay anycast",
    "192.168.0.0/16": "private use",
    "198.18.0.0/15": "benchmarking",
    "198.51.100.0/24": "documentation (TEST-NET-2)",
    "203.0.113.0/24": "documentation (TEST-NET-3)",
    "224.0.0.0/4": "multicast",
    "240.0.0.0/4": "reserved, and limited broadcast",
    "2001::/23": "IETF protocol assignments, with Teredo, benchmarking and ORCHID",
    "2001:db8::/32": "documentation",
    "3fff::/20": "documentation",
}
# Of IPv6 only this block is allocated for global unicast. Outside it are loopback, ::/96 (IPv4-compatible), the local
# NAT64 prefix 64:ff9b:1::/48, 100::/64 (discard), 5f00::/16 (segment routing), fc00::/7 (unique local, with EC2's
# metadata), fe80::/10 (link-local), fec0::/10 (site-local), ff00::/8 (multicast), and what nobody has been given.
GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_NETWORKS: tuple[Network, ...] = tuple(ipaddress.ip_network(block) for block in NOT_PUBLIC)


def is_public(address: str) -> bool:
    """Whether a numeric address is on the public Internet, also if IPv6 embeds an IPv4 address."""
    number = embedded_ipv4(ipaddress.ip_address(address.partition("%")[0]))
    if isinstance(number, ipaddress.IPv6Address) and number not in GLOBAL_UNICAST:
        return False
    return not any(number in network for network in _NETWORKS)


def embedded_ipv4(number: Number) -> Number:
    """The IPv4 address that an IPv6 address embeds (NAT64, mapped, 6to4); any other unchanged."""
    if isinstance(number, ipaddress.IPv6Address):
        if number in _NAT64:
            return ipaddress.IPv4Address(int(number) & 0xFFFFFFFF)
        return number.ipv4_mapped or number.sixtofour or number
    return number
