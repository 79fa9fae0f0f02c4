"""Checks that a query uses metrics and labels that the code exports."""

from __future__ import annotations

from pathlib import Path

import promql_parser as promql
from prometheus_client import CollectorRegistry

from monitor.ops.metrics import Metrics

ROOT = Path(__file__).parent.parent.parent
SCRAPED = {"job", "instance"}  # labels that Prometheus adds


def exported() -> dict[str, set[str]]:
    """Every exported series, with its labels."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    series: dict[str, set[str]] = {"up": set()}
    for family in metrics.families:
        labels = set(family.labels)
        if family.kind == "histogram":
            series[f"{family.name}_bucket"] = labels | {"le"}
            series[f"{family.name}_sum"] = series[f"{family.name}_count"] = labels
        else:
            series[family.name] = labels
    for plain in registry.collect():  # process_*, which have no labels
        for sample in plain.samples:
            series.setdefault(sample.name, set(sample.labels))
    return {name: labels | SCRAPED for name, labels in series.items()}


def faults(query: str) -> list[str]:
    """Metrics and labels of the query that the code does not export."""
    try:
        expression = promql.parse(query)
    except ValueError as error:
        return [f"{query}: {error}"]
    known, found = exported(), []
    for node in _nodes(expression):
        if isinstance(node, promql.VectorSelector):
            if node.name not in known:
                found.append(f"no metric {node.name}")
            else:
                used = {matcher.name for matcher in node.matchers.matchers}
                found += [f"{node.name} has no label {label}" for label in sorted(used - known[node.name])]
        elif isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            found += [
                f"no label {label} in {node}" for label in sorted(set(node.modifier.labels) - labels_of(node.expr))
            ]
    return found


def labels_of(expression: promql.Expr) -> set[str]:
    """The labels that all selected series share."""
    known = exported()
    selected = [known.get(str(n.name), set()) for n in _nodes(expression) if isinstance(n, promql.VectorSelector)]
    return set.intersection(*selected) if selected else set()


def _nodes(expression: promql.Expr) -> list[promql.Expr]:
    """The expression and all its subexpressions."""
    nodes: list[promql.Expr] = []
    promql.walk(expression, nodes.append)
    return nodes
