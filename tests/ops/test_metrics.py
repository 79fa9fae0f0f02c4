"""Metrics: names and labels keep the rules of Prometheus and our own."""

import inspect
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import monitor.ops.metrics
from monitor.ops.metrics import Metrics

BOUNDED = {"channel", "sink", "reason", "result", "stage", "event", "state", "version", "model", "licensed", "decision"}
BOUNDED |= {"partition"}  # as many as the topic has


def test_two_sets_of_metrics_live_side_by_side() -> None:
    one, other = Metrics(CollectorRegistry()), Metrics(CollectorRegistry())
    one.frames_processed.labels("five").inc(3)
    assert one.registry.get_sample_value("copywatch_frames_processed_total", {"channel": "five"}) == 3
    assert other.registry.get_sample_value("copywatch_frames_processed_total", {"channel": "five"}) is None


def test_every_name_and_label_follows_the_rules() -> None:
    metrics = Metrics(CollectorRegistry())
    families = [one for one in vars(metrics).values() if hasattr(one, "_labelnames")]
    assert len(families) >= 15
    for family in families:
        (described,) = family.describe()
        assert described.name.startswith("copywatch_")
        assert described.documentation.endswith(".")
        assert set(family._labelnames) <= BOUNDED, described.name


def test_what_prometheus_reads_is_what_was_counted() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.detection_latency.observe(7)
    metrics.stage_duration.labels("encode").observe(0.03)
    metrics.alerts.labels("five", "started", "no").inc()
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(metrics.registry).decode())
        for sample in family.samples
    }
    assert samples["copywatch_detection_latency_seconds_bucket", ("le", "8.0")] == 1
    assert samples["copywatch_detection_latency_seconds_bucket", ("le", "6.0")] == 0
    assert samples["copywatch_stage_duration_seconds_count", ("stage", "encode")] == 1
    assert samples["copywatch_alerts_total", ("channel", "five"), ("event", "started"), ("licensed", "no")] == 1


def test_nothing_is_exported_that_nobody_updates() -> None:
    package = Path(monitor.ops.metrics.__file__).parent
    code = "".join(path.read_text() for path in package.rglob("*.py") if path.name != "metrics.py")
    code += inspect.getsource(Metrics.alert_told).replace("self.", "metrics.")
    assert "metrics.alert_told(" in code
    families = [name for name, one in vars(Metrics(CollectorRegistry())).items() if hasattr(one, "_labelnames")]
    assert [name for name in families if f"metrics.{name}." not in code] == []
