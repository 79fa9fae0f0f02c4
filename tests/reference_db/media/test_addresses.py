"""Addresses: where they may lead, and that messages never contain a secret of theirs."""

import pytest

from reference_db.media.address_ranges import is_public
from reference_db.media.addresses import (
    AddressRefused,
    ReachPolicy,
    display_name,
    is_fixed,
    redact_text,
    redact_url,
    scheme_of,
)
from tests.support.changing_names import ChangingNames
from tests.support.secret_addresses import FORMS, SECRET, filled


@pytest.mark.parametrize("form", FORMS)
def test_no_form_of_an_address_reveals_its_secret(form: str) -> None:
    url = filled(form)
    messages = [
        display_name(url),
        redact_url(url),
        redact_text(f"cannot open '{url}': refused"),
        redact_text(f"{url}, again"),
    ]
    assert [one for one in messages if SECRET in one] == []
    assert display_name(url).partition("://")[0].lower() == url.partition("://")[0].lower()


def test_enough_forms_are_tried() -> None:
    assert len(FORMS) >= 40


def test_parts_that_are_not_secret_stay() -> None:
    assert redact_url("http://cdn.example.com:8080/channel-5/main-feed-1080p.m3u8") == (
        "http://cdn.example.com:8080/channel-5/main-feed-1080p.m3u8"
    )
    assert display_name("https://cdn.example.com:8080/x") == "https://cdn.example.com:8080"


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "127.0.0.1",
        "127.8.8.8",
        "10.1.2.3",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "192.0.2.1",
        "198.18.0.1",
        "198.51.100.7",
        "203.0.113.9",
        "224.0.0.1",
        "239.1.1.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fd12:3456::1",
        "ff02::1",
        "2001:db8::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "2002:a00:1::",
    ],
)
def test_private_addresses_in_every_notation(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


# Notations that resolvers accept, all of them 127.0.0.1 or this host.
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f000001", "017700000001", "127.1", "0"])
def test_a_private_host_must_be_configured_by_host_and_port(host: str) -> None:
    public = ReachPolicy("cdn.example.com", 80)
    with pytest.raises(AddressRefused, match="private address that the channel does not allow"):
        public.resolve(host, 8080)
    assert ReachPolicy(host, 8080).resolve(host, 8080)
    with pytest.raises(AddressRefused):
        ReachPolicy(host, 8080).resolve(host, 8081)
    assert ReachPolicy("cdn.example.com", 80, (host,)).resolve(host, 8081)
    assert ReachPolicy("cdn.example.com", 80, (host.upper(),)).resolve(host, 8081)
    assert ReachPolicy("cdn.example.com", 80, ("127.0.0.0/8", "0.0.0.0/32")).resolve(host, 8081)


@pytest.mark.parametrize("inside", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "168.63.129.16", "::1"])
def test_a_name_that_was_public_cannot_lead_inside_later(inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ChangingNames(monkeypatch, rebind_example="93.184.216.34")
    policy = ReachPolicy.of("http://rebind.example:8080/live")
    assert policy.resolve("rebind.example", 8080) == [("93.184.216.34", 8080)]
    names.numbers["rebind.example"] = inside
    with pytest.raises(AddressRefused, match="if this is intended, set the channel's `private: true`"):
        policy.resolve("rebind.example", 8080)
    for is_stream in (True, False):
        with pytest.raises(AddressRefused):
            policy.check(inside, 8080, is_stream=is_stream)


def test_an_admin_names_the_own_host_as_private(monkeypatch: pytest.MonkeyPatch) -> None:
    ChangingNames(monkeypatch, camera_example="10.1.2.3", other_example="10.1.2.4")
    policy = ReachPolicy.of("rtsp://camera.example/1", private=True)
    assert policy.resolve("camera.example", 554) == [("10.1.2.3", 554)]
    policy.check("10.1.2.3", 554, is_stream=True)
    for host, port in (("camera.example", 80), ("other.example", 554), ("10.1.2.3", 80)):
        with pytest.raises(AddressRefused, match="add it to the channel's `allow`"):
            policy.resolve(host, port)
    with pytest.raises(AddressRefused):
        policy.check("10.1.2.4", 554, is_stream=True)


def test_numbers_and_localhost_need_no_name_server() -> None:
    fixed = ["127.0.0.1", "::1", "fe80::1%eth0", "localhost", "LOCALHOST.", "127.1", "2130706433", "0x7f000001", "0"]
    assert all(map(is_fixed, fixed))
    assert not any(map(is_fixed, ["", "camera", "1.2.3.4.example", "localhost.example", "face", "0x7f000001.example"]))


@pytest.mark.parametrize(
    "url",
    [
        "film.mp4",
        "file.m3u8",
        "concat:/etc/passwd",
        "subfile:,,:/etc/passwd",
        "data:x",
        "pipe:0",
        "async:http://x",
        "cache:http://x",
        "tee:x",
        "crypto:x",
        "gopher://x",
        "ftp://x",
        "sftp://x",
        "smb://x",
        "tcp://x:1",
        "tls://x:1",
        "unix:///run/x",
        "httpproxy://x",
        "rtmpt://x",
        "rtmpe://x",
        "mmsh://x",
        "ipfs://x",
        "concatf:x",
        "fd:",
        "-i",
    ],
)
def test_other_schemes_are_refused(url: str) -> None:
    with pytest.raises(AddressRefused, match="begins with one of"):
        scheme_of(url)
