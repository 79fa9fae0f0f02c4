"""TLS and SASL against a broker that wants them; passwords are in no word that anybody says."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.broker import PASSWORD, USER, Broker, wait_for
from tests.support.planted_channels import Part
from tests.support.planted_fleet import Fleet, House, Member, records

CANARY = "canary-passw0rd"
COPY = [Part(6, noise=1.0), Part(20, "swift", 5, noise=0.2), Part(12, noise=1.0)]


@pytest.fixture(scope="module")
def fleet(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    house = House.build(tmp_path_factory.mktemp("secure"))
    broker.create_topic("secure.frames", 1, retention_ms="-1")
    broker.write("secure.frames", records(house, "ch5", COPY, seed=1))
    return Fleet(house, broker, "secure", "secure.frames")


def doors(broker: Broker) -> dict[str, dict[str, Any]]:
    """Settings for each way in."""
    broker.add_scram_user(USER, PASSWORD)
    tls = {"ssl_cafile": str(broker.ca_file)}
    user = {"sasl_username": USER, "sasl_password": PASSWORD}
    return {
        "SSL": tls,
        "SASL_PLAINTEXT": user,
        "SASL_SSL": {**tls, **user, "sasl_mechanism": "SCRAM-SHA-256"},
    }


def test_match_works_through_every_door_and_says_no_password(fleet: Fleet, broker: Broker) -> None:
    for protocol, settings in doors(broker).items():
        through = Fleet(fleet.house, broker, f"secure-{protocol.lower()}", fleet.frames)
        how = {"bootstrap": broker.door(protocol), "security_protocol": protocol, **settings}
        member = through.member(logging={"level": "debug"}, **how)
        try:
            wait_for(through.is_done, f"all to be read by {protocol}")
            assert [alert["type"] for alert in through.told()][-1] == "alert.ended"
            assert PASSWORD not in everything_said_by(member)
        finally:
            member.kill()


@pytest.mark.parametrize(
    ("protocol", "settings", "complaint"),
    [
        ("SASL_PLAINTEXT", {"sasl_username": USER, "sasl_password": CANARY}, "Authentication"),
        ("SSL", {}, "certificate"),
    ],
)
def test_a_door_that_stays_shut_is_complained_of_without_the_password(
    fleet: Fleet, broker: Broker, protocol: str, settings: dict[str, Any], complaint: str
) -> None:
    how = {"bootstrap": broker.door(protocol), "security_protocol": protocol, **settings}
    member = fleet.member(instance="shut", logging={"level": "debug"}, **how)
    try:
        member.wait_until_it_says("trying until it does")
        said = everything_said_by(member)
        assert complaint.lower() in said.lower()
        assert CANARY not in said
        assert member.stop() == 0
    finally:
        member.kill()


def everything_said_by(member: Member) -> str:
    """Log, metrics, health and command line."""
    member.wait_until_it_says("health at")
    address = member.said().partition("health at ")[2].split('"')[0].split()[0]
    heard = [member.said(), Path(f"/proc/{member.process.pid}/cmdline").read_text()]
    for page in ("metrics", "readyz?verbose", "livez"):
        try:
            with urllib.request.urlopen(f"{address}/{page}", timeout=30) as reply:
                heard.append(reply.read().decode())
        except urllib.error.HTTPError as error:
            heard.append(error.read().decode())
    return "\n".join(heard)
