"""The Grafana dashboard: every query is valid and uses metrics and labels that the code exports."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from tests.support.promql_queries import ROOT, faults, labels_of

BOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/copywatch.json").read_text())
VARIABLES = {one["name"]: one for one in BOARD["templating"]["list"]}
ROWS = ["Now", "Channels", "Stages", "Resources", "Detections", "Delivery and Kafka", "Library and disk"]


def filled(query: str) -> str:
    """The query as Grafana sends it, with its variables replaced."""
    for name, value in (("__range", "1h"), ("__rate_interval", "1m"), ("job", ".*"), ("instance", ".*")):
        query = query.replace(f"${name}", value)
    return query.replace("$channel", ".*")


def targets() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every query, with the title of its panel."""
    for panel in BOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target
    for note in BOARD["annotations"]["list"]:
        yield note["name"], note


QUERIES = [(title, target["expr"]) for title, target in targets()]


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_a_query_uses_exported_metrics_and_labels(title: str, query: str) -> None:
    assert "$" not in filled(query)
    assert faults(filled(query)) == []


@pytest.mark.parametrize("query", [one["query"]["query"] for one in VARIABLES.values() if one["type"] == "query"])
def test_a_variable_lists_existing_labels(query: str) -> None:
    found = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
    assert found
    selected, label = filled(found[1]), found[2]
    assert faults(selected) == []
    assert label in labels_of(promql.parse(selected))


def test_legends_use_labels_of_the_result() -> None:
    for title, target in targets():
        expression = promql.parse(filled(target["expr"]))
        left = labels_of(expression)
        by = [set(found.split(", ")) for found in re.findall(r"by \(([^)]*)\)", target["expr"])]
        left = set.intersection(left, *by) if by else left
        for label in re.findall(r"{{(\w+)}}", target.get("legendFormat", "")):
            assert label in left, f"{title}: {label} is not in {sorted(left)}"


@pytest.mark.system
def test_prometheus_parses_every_query(tmp_path: Path) -> None:
    named = [{"record": f"query:n{n}", "expr": filled(query)} for n, (_, query) in enumerate(QUERIES)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": named}]}))
    done = subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rows_and_panels_are_complete() -> None:
    rows = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]
    assert [row.split(":")[0] for row in rows] == ROWS
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["targets"]
    assert list(VARIABLES) == ["datasource", "job", "instance", "channel"]


def test_provisioning_finds_the_dashboard() -> None:
    folder = ROOT / "deploy/grafana/provisioning"
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["uid"] == VARIABLES["datasource"]["current"]["value"]
    (provider,) = yaml.safe_load((folder / "dashboards/copywatch.yaml").read_text())["providers"]
    grafana = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]["grafana"]
    places = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    assert places["./grafana/copywatch.json"].startswith(provider["options"]["path"])
    assert places["./grafana/provisioning"] == "/etc/grafana/provisioning"
