"""Metrics: names and labels follow the rules of Prometheus and our own, statuses are exported, nothing is read back."""

import ast
import inspect
import re
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import monitor.ops.metrics
from monitor.ops.metrics import Metrics

PACKAGES = [Path(monitor.__file__).parent, Path(monitor.__file__).parent.parent / "reference_db"]
PRODUCT = {path: path.read_text() for package in PACKAGES for path in package.rglob("*.py")}
BOUNDED = {"channel", "sink", "reason", "result", "stage", "event", "state", "version", "model", "licensed", "decision"}
BOUNDED |= {"partition"}  # as many as the topic has


def sample_values(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """One scrape: (name, labels as k=v) to value, without the times at which series were created."""
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(generate_latest(metrics.registry).decode())
        for sample in family.samples
        if sample.name.startswith("copywatch_") and not sample.name.endswith("_created")
    }


def test_two_sets_of_metrics_are_independent() -> None:
    one, other = Metrics(CollectorRegistry()), Metrics(CollectorRegistry())
    one.channels.of("five").count_received()
    assert one.registry.get_sample_value("copywatch_frames_received_total", {"channel": "five"}) == 1
    assert other.registry.get_sample_value("copywatch_frames_received_total", {"channel": "five"}) is None


def test_every_name_and_label_follows_the_rules() -> None:
    families = Metrics(CollectorRegistry()).families
    assert len(families) >= 15
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.name.startswith("copywatch_")
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert family.help.endswith(".")
        assert set(family.labels) <= BOUNDED, family.name


def test_the_families_are_those_that_the_registry_exports() -> None:
    metrics = Metrics(CollectorRegistry())
    exported = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    described = {
        (family.name.removesuffix("_total") if family.kind == "counter" else family.name): (family.kind, family.help)
        for family in metrics.families
    }
    found = {one.name: (one.type, one.documentation) for one in exported if one.name.startswith("copywatch_")}
    found = {name: one for name, one in found.items() if not name.endswith("_created")}
    assert found == described


def test_a_scrape_shows_what_was_counted() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.detection_latency.observe(7)
    metrics.stage_duration.labels("encode").observe(0.03)
    metrics.count_alert("five", "alert.started", None)
    metrics.process.backlog = {"file": 2}
    metrics.process.evidence_bytes = 77
    values = sample_values(metrics)
    assert values["copywatch_detection_latency_seconds_bucket", "le=8.0"] == 1
    assert values["copywatch_detection_latency_seconds_bucket", "le=6.0"] == 0
    assert values["copywatch_detection_latency_seconds_bucket", "le=+Inf"] == 1
    assert values["copywatch_detection_latency_seconds_count",] == 1
    assert values["copywatch_detection_latency_seconds_sum",] == 7
    assert values["copywatch_stage_duration_seconds_count", "stage=encode"] == 1
    assert values["copywatch_alerts_total", "channel=five", "event=started", "licensed=no"] == 1
    assert values["copywatch_outbox_owed_events", "sink=file"] == 2
    assert values["copywatch_evidence_bytes",] == 77
    assert values["copywatch_index_stale_seconds",] == 0


def test_a_channel_status_is_exported_under_its_names_and_labels() -> None:
    metrics = Metrics(CollectorRegistry())
    status = metrics.channels.of("five")
    status.enter("stalled", "lost")
    for _ in range(5):
        status.count_received()
    status.count_processed()
    status.count_dropped("overload")
    status.count_reconnect("lost")
    status.add_gap(4)
    status.set_lag(0.25)
    values = sample_values(metrics)
    five = {key: value for key, value in values.items() if "channel=five" in key}
    states = ("starting", "up", "impaired", "stalled", "no_video", "denied", "failed")
    expected: dict[tuple[str, ...], float] = {
        ("copywatch_channel_up", "channel=five"): 0,
        **{("copywatch_channel_state", "channel=five", f"state={one}"): float(one == "stalled") for one in states},
        ("copywatch_frames_received_total", "channel=five"): 5,
        ("copywatch_frames_processed_total", "channel=five"): 1,
        ("copywatch_frames_dropped_total", "channel=five", "reason=overload"): 1,
        ("copywatch_frames_waiting", "channel=five"): 3,
        ("copywatch_reconnects_total", "channel=five", "reason=lost"): 1,
        ("copywatch_gap_seconds_total", "channel=five"): 4,
        ("copywatch_lag_seconds", "channel=five"): 0.25,
    }
    assert five == expected


def test_a_channel_has_no_series_for_what_never_happened() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.channels.of("file")
    assert not [key for key in sample_values(metrics) if "channel=file" in key]


def test_a_forgotten_channel_has_no_series_and_the_others_stay() -> None:
    metrics = Metrics(CollectorRegistry())
    for channel in ("five", "six"):
        metrics.channels.of(channel).enter("up")
        metrics.channels.of(channel).count_received()
        metrics.count_alert(channel, "alert.started", None)
        metrics.open_paths.labels(channel).set(2)
        metrics.restores.labels(channel, "continued").inc()
    before = sample_values(metrics)
    metrics.forget("five")
    assert sample_values(metrics) == {key: value for key, value in before.items() if "channel=five" not in key}


def test_nothing_is_exported_that_no_code_updates() -> None:
    code = "".join(text for path, text in PRODUCT.items() if path.name != "metrics.py")
    code += inspect.getsource(Metrics.count_alert).replace("self.", "metrics.")
    assert "metrics.count_alert(" in code
    written = [name for name, one in vars(Metrics(CollectorRegistry())).items() if isinstance(one, PROMETHEUS)]
    assert len(written) >= 15
    assert [name for name in written if f"metrics.{name}." not in code] == []


PROMETHEUS = (Counter, Gauge, Histogram)


def test_metrics_are_never_read_back_as_state() -> None:
    """Nothing collects metrics, scrapes /metrics or reaches into prometheus_client: state is in the statuses."""
    private = {
        name
        for one in (Counter("a", "a", ["b"]), Gauge("c", "c"), Histogram("d", "d"), CollectorRegistry())
        for name in (*dir(one), *vars(one))
        if name.startswith("_") and not name.startswith("__")
    }
    assert {"_metrics", "_labelnames", "_value"} <= private
    found = []
    for path, text in PRODUCT.items():
        found += [(path, words) for words in re.findall(r"(?<!gc)\.collect\(|/metrics\"|text_string_to_metric", text)]
        if "prometheus" in text or "metrics" in text:
            found += [(path, f".{name}") for name in _foreign_privates(text) & private]
    assert [(path.name, words) for path, words in found if (path.name, words) != ("probes.py", '/metrics"')] == []


def _foreign_privates(text: str) -> set[str]:
    """Private attributes that the code uses of anything but `self`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }
