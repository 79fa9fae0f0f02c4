"""TLS and SASL against a broker that requires them; no output contains a password."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.broker import PASSWORD, USER, Broker, wait_for
from tests.support.planted_channels import Part
from tests.support.planted_fleet import PlantedFleet, PlantedLibrary, RoleProcess, records

CANARY = "canary-passw0rd"
COPY = [Part(6, noise=1.0), Part(20, "swift", 5, noise=0.2), Part(12, noise=1.0)]


@pytest.fixture(scope="module")
def fleet(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> PlantedFleet:
    library = PlantedLibrary.build(tmp_path_factory.mktemp("secure"))
    broker.create_topic("secure.frames", 1, retention_ms="-1")
    broker.write("secure.frames", records(library, "ch5", COPY, seed=1))
    return PlantedFleet(library, broker, "secure", "secure.frames")


def listener_settings(broker: Broker) -> dict[str, dict[str, Any]]:
    """The settings for each protected listener."""
    broker.add_scram_user(USER, PASSWORD)
    tls = {"ssl_cafile": str(broker.ca_file)}
    user = {"sasl_username": USER, "sasl_password": PASSWORD}
    return {
        "SSL": tls,
        "SASL_PLAINTEXT": user,
        "SASL_SSL": {**tls, **user, "sasl_mechanism": "SCRAM-SHA-256"},
    }


def test_match_works_with_every_protocol_and_prints_no_password(fleet: PlantedFleet, broker: Broker) -> None:
    for protocol, settings in listener_settings(broker).items():
        group = PlantedFleet(fleet.library, broker, f"secure-{protocol.lower()}", fleet.frames)
        kafka = {"bootstrap": broker.listener(protocol), "security_protocol": protocol, **settings}
        member = group.member(logging={"level": "debug"}, **kafka)
        try:
            wait_for(group.is_done, f"all to be read by {protocol}")
            assert [alert["type"] for alert in group.read_alerts()][-1] == "alert.ended"
            assert PASSWORD not in all_output(member)
        finally:
            member.kill()


@pytest.mark.parametrize(
    ("protocol", "settings", "error"),
    [
        ("SASL_PLAINTEXT", {"sasl_username": USER, "sasl_password": CANARY}, "Authentication"),
        ("SSL", {}, "certificate"),
    ],
)
def test_a_refused_connection_is_reported_without_the_password(
    fleet: PlantedFleet, broker: Broker, protocol: str, settings: dict[str, Any], error: str
) -> None:
    kafka = {"bootstrap": broker.listener(protocol), "security_protocol": protocol, **settings}
    member = fleet.member(instance="refused", logging={"level": "debug"}, **kafka)
    try:
        member.wait_for_log("; retrying")
        output = all_output(member)
        assert error.lower() in output.lower()
        assert CANARY not in output
        assert member.stop() == 0
    finally:
        member.kill()


def all_output(member: RoleProcess) -> str:
    """Log, metrics, health and command line."""
    member.wait_for_log("health at")
    address = member.log_text().partition("health at ")[2].split('"')[0].split()[0]
    outputs = [member.log_text(), Path(f"/proc/{member.process.pid}/cmdline").read_text()]
    for page in ("metrics", "readyz?verbose", "livez"):
        try:
            with urllib.request.urlopen(f"{address}/{page}", timeout=30) as reply:
                outputs.append(reply.read().decode())
        except urllib.error.HTTPError as error:
            outputs.append(error.read().decode())
    return "\n".join(outputs)
