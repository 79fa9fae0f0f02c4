"""Compose file, Kubernetes manifests and unit file: valid by their schemas, consistent with the code and each other."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from monitor import __version__
from monitor.cli import app
from monitor.config.settings import load_settings
from tests.support.container import Dockerfile
from tests.support.promql_queries import ROOT

DEPLOY = ROOT / "deploy"
DOCKERFILE = Dockerfile(DEPLOY / "Dockerfile")
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
VERSIONS = ("1.30", "1.37")  # the oldest and the newest that are checked
PORT = int(DOCKERFILE.environment["COPYWATCH_WEB__PROBES_PORT"])


def is_command(words: list[str]) -> bool:
    """Whether `copywatch` has this command with these options."""
    command = typer.main.get_command(app)
    name, *arguments = words
    assert isinstance(command, typer.core.TyperGroup)
    assert name in command.commands, words
    command.commands[name].make_context(name, arguments)
    return True


def test_every_image_has_the_version_of_the_code() -> None:
    texts = {path.name: path.read_text() for path in DEPLOY.rglob("*") if path.is_file()}
    versions = {name: set(re.findall(r"\bcopywatch:(\d[\w.]*)", text)) for name, text in texts.items()}
    found = {name: one for name, one in versions.items() if one}
    assert found.keys() >= {"Dockerfile", "compose.yaml", "statefulset.yaml"}
    assert set().union(*found.values()) == {__version__}


# --- compose ----------------------------------------------------------------------------------------------------------


def test_the_compose_file_is_valid() -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*check, DEPLOY / "compose.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_profiles_exist_and_our_services_are_locked_down() -> None:
    services = COMPOSE["services"]
    profiles = {profile for service in services.values() for profile in service.get("profiles", [])}
    assert profiles == {"demo", "kafka", "monitoring"}
    for name, service in services.items():
        assert ":" in service["image"], f"{name} has no version"
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists() or source == "./copywatch.yaml", source  # written by the user
            else:
                assert source in COMPOSE["volumes"]
        if service["image"].startswith("copywatch:"):
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]
            assert is_command(service.get("command", DOCKERFILE.command("CMD")))


def test_environment_variables_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for service in COMPOSE["services"].values():
        for name, value in service.get("environment", {}).items():
            if name.startswith("COPYWATCH_"):
                monkeypatch.setenv(name, re.sub(r"\$\{\w+:-(.*)\}", r"\1", str(value)))
    assert load_settings().kafka.bootstrap == "kafka:9092"


@pytest.mark.system
def test_prometheus_scrapes_every_role_on_its_port() -> None:
    prometheus = DEPLOY / "prometheus/prometheus.yml"
    done = subprocess.run(["promtool", "check", "config", prometheus], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (job,) = yaml.safe_load(prometheus.read_text())["scrape_configs"]
    (names,) = job["dns_sd_configs"]
    assert (job["job_name"], names["port"]) == ("copywatch", PORT)
    assert set(names["names"]) <= set(COMPOSE["services"])


# --- Kubernetes -------------------------------------------------------------------------------------------------------


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in KUBERNETES:
        if path.name != "kustomization.yaml":
            yield path.name, yaml.safe_load(path.read_text())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("name", "manifest"), list(manifests()))
def test_a_manifest_is_valid(name: str, manifest: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_an_invalid_manifest_is_refused() -> None:
    manifest = dict(manifests())["statefulset.yaml"]
    manifest["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, VERSIONS[0], strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.system
def test_kubeconform_finds_nothing(version: str, tmp_path: Path) -> None:
    """Uses the schemas of kubernetes-validate, with their definitions inlined, so that nothing is downloaded."""
    program = shutil.which("kubeconform", path=f"{os.environ['PATH']}:{Path.home() / 'go/bin'}")
    if program is None:
        pytest.skip("kubeconform is not installed: go install github.com/yannh/kubeconform/cmd/kubeconform@latest")
    carried = Path(kubernetes_validate.__file__).parent / f"kubernetes-json-schema/v{version}.0-local-strict"
    definitions = json.loads((carried / "_definitions.json").read_text())["$defs"]
    for _, manifest in manifests():
        group = manifest["apiVersion"].replace(".k8s.io/", "/").replace("/", "-")
        name = f"{manifest['kind'].lower()}-{group}.json"
        schema = json.loads((carried / name).read_text().replace("/api/_definitions.json#", "#"))
        (tmp_path / name).write_text(json.dumps({**schema, "$defs": definitions}))
    check = [program, "-strict", "-kubernetes-version", f"{version}.0", "-output", "json", "-summary"]
    check += ["-schema-location", f"{tmp_path}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json"]
    paths = [path for path in KUBERNETES if path.name != "kustomization.yaml"]
    done = subprocess.run([*check, *paths], capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert report["resources"] == []
    assert report["summary"] == {"valid": len(paths), "invalid": 0, "errors": 0, "skipped": 0}


def test_every_manifest_is_applied() -> None:
    kustomization = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())
    assert sorted(kustomization["resources"]) == sorted(name for name, _ in manifests())


def test_the_pod_is_locked_down_limited_and_probed() -> None:
    pod = dict(manifests())["statefulset.yaml"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    user, group = map(int, DOCKERFILE.word("USER").split(":"))
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]) == (user, group)
    assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert set(container["resources"]["limits"]) >= {"cpu", "memory"}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["probes"] == PORT
    paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}
    assert {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")} == {"/data", "/tmp"}
    assert is_command(container["args"])
    assert pod["enableServiceLinks"] is False  # otherwise Kubernetes sets COPYWATCH_PORT, which is not a setting


def test_selectors_match_the_pod() -> None:
    named = dict(manifests())
    labels = named["statefulset.yaml"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        named["statefulset.yaml"]["spec"]["selector"]["matchLabels"],
        named["service.yaml"]["spec"]["selector"],
        named["poddisruptionbudget.yaml"]["spec"]["selector"]["matchLabels"],
        named["networkpolicy.yaml"]["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)


@pytest.mark.parametrize(
    ("address", "is_reachable"),
    [
        ("198.51.100.7", True),
        ("2001:db8::7", True),
        *((inside, False) for inside in ("10.1.2.3", "172.31.0.1", "192.168.1.1", "100.64.0.1", "127.0.0.1")),
        *(
            (special, False)
            for special in ("169.254.169.254", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fe80::1")
        ),
    ],
)
def test_the_network_policy_lets_out_to_public_addresses_only(address: str, is_reachable: bool) -> None:
    dns, channels = dict(manifests())["networkpolicy.yaml"]["spec"]["egress"]
    assert [peer["podSelector"]["matchLabels"] for peer in dns["to"]] == [{"k8s-app": "kube-dns"}]
    blocks = [peer["ipBlock"] for peer in channels["to"]]
    number = ipaddress.ip_address(address)
    permitted = [
        block
        for block in blocks
        if number in ipaddress.ip_network(block["cidr"])
        and not any(number in ipaddress.ip_network(network) for network in block["except"])
    ]
    assert bool(permitted) == is_reachable


def test_the_settings_in_the_config_map_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = dict(manifests())["configmap.yaml"]["data"].values()
    (tmp_path / "copywatch.yaml").write_text(text)
    channels = [{"name": "five", "url": "http://198.51.100.7/live.m3u8"}]
    monkeypatch.setenv("COPYWATCH_CHANNELS", json.dumps(channels))  # as the Secret has them
    assert [one.name for one in load_settings(tmp_path / "copywatch.yaml").channels] == ["five"]


def test_the_rules_of_the_operator_are_those_of_prometheus() -> None:
    rule = yaml.safe_load((DEPLOY / "kubernetes/monitoring/prometheusrule.yaml").read_text())
    assert rule["spec"] == yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())
    service = dict(manifests())["service.yaml"]
    monitor = yaml.safe_load((DEPLOY / "kubernetes/monitoring/servicemonitor.yaml").read_text())["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "copywatch"
    assert monitor["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}


# --- systemd ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit file, with the path of this environment's program."""
    text = (DEPLOY / "copywatch.service").read_text()
    path = tmp_path / "copywatch.service"
    path.write_text(text.replace("/opt/copywatch/bin/copywatch", str(Path(sys.executable).parent / "copywatch")))
    return path


@pytest.mark.system
def test_systemd_accepts_the_unit(unit: Path) -> None:
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.system
def test_the_unit_is_hardened(unit: Path) -> None:
    """Systemd's exposure score is below 2.0 of 10; it was 1.5 when this was written."""
    check = ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=20"]
    done = subprocess.run([*check, unit], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_unit_runs_an_existing_command() -> None:
    text = (DEPLOY / "copywatch.service").read_text()
    (command,) = re.findall(r"^ExecStart=/opt/copywatch/bin/copywatch (.+)$", text, re.M)
    assert is_command(command.split())
    settings = dict(re.findall(r"^(\w+)=(.*)$", text, re.M))
    assert settings["Type"] == "notify"
    assert settings["RestartPreventExitStatus"] == "3"  # the exit code of an invalid configuration
    assert settings["MemoryMax"] == "4G"
    assert settings["IPAddressDeny"].startswith("link-local ")
