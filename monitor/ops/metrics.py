"""Metrics: what Copywatch exports to Prometheus, in a registry that the caller owns.

Metrics are output only. State is in `ChannelStatuses` and `ProcessStatus`, which each scrape reads; the other counters,
gauges and histograms are updated by the stage that knows and never read back. Labels are bounded: channel and sink (as
many as are configured), stage, reason and result (a few words of ours); never a reference, a URL or an alert. A test
compares the table in deploy/prometheus/README.md with this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from monitor.ops.channel_status import STATES, ChannelReport, ChannelStatuses
from monitor.ops.process_status import ProcessStatus

# One second of one channel takes 5-50 ms in a stage; above 1 s the stage cannot keep up with real time.
STAGE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
DELAY_BUCKETS_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)  # 1 s is the target


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric: its name in PromQL, type, help text and labels."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


CHANNEL_FAMILIES = (
    MetricFamily("copywatch_channel_up", "gauge", "1 while new pictures arrive, else 0.", ("channel",)),
    MetricFamily(
        "copywatch_channel_state",
        "gauge",
        "1 for the current state of the channel, 0 for the others.",
        ("channel", "state"),
    ),
    MetricFamily("copywatch_frames_received_total", "counter", "Frames received, one per stream second.", ("channel",)),
    MetricFamily(
        "copywatch_frames_processed_total", "counter", "Frames matched; in the ingest role, published.", ("channel",)
    ),
    MetricFamily(
        "copywatch_frames_dropped_total",
        "counter",
        "Frames received but not matched, by reason: overload, backward, repeated, late, failed, stopped.",
        ("channel", "reason"),
    ),
    MetricFamily("copywatch_frames_waiting", "gauge", "Frames received and not matched yet.", ("channel",)),
    MetricFamily(
        "copywatch_reconnects_total", "counter", "Reconnects of the channel's source, by reason.", ("channel", "reason")
    ),
    MetricFamily("copywatch_gap_seconds_total", "counter", "Stream seconds that were never received.", ("channel",)),
    MetricFamily(
        "copywatch_lag_seconds", "gauge", "Time from arrival to result of the newest matched frame.", ("channel",)
    ),
)
BACKLOG = MetricFamily(
    "copywatch_outbox_owed_events", "gauge", "Alert events that a sink has not accepted yet.", ("sink",)
)
LATENCY = MetricFamily(
    "copywatch_detection_latency_seconds",
    "histogram",
    "Time from the first second of a copy on air to its alert; the main service level.",
)


class _StatusCollector(Collector):
    """Exports the statuses. Every channel is read once per scrape, so that the counts of its frames agree."""

    def __init__(self, channels: ChannelStatuses, process: ProcessStatus) -> None:
        self._channels, self._process = channels, process

    def describe(self) -> Iterable[Metric]:
        families = (*CHANNEL_FAMILIES, BACKLOG, LATENCY)
        return [Metric(family.name.removesuffix("_total"), family.help, family.kind) for family in families]

    def collect(self) -> Iterable[Metric]:
        metrics = {family.name: _empty_metric(family) for family in CHANNEL_FAMILIES}
        for report in self._channels.reports():
            for name, labels, value in _channel_samples(report):
                metric = metrics[name]
                if isinstance(metric, CounterMetricFamily):
                    metric.add_metric([report.channel, *labels], value, created=report.created_s)
                else:
                    metric.add_metric([report.channel, *labels], value)
        yield from metrics.values()
        backlog = GaugeMetricFamily(BACKLOG.name, BACKLOG.help, labels=BACKLOG.labels)
        for sink, n_events in self._process.backlog.items():
            backlog.add_metric([sink], n_events)
        yield backlog
        yield self._latency()

    def _latency(self) -> Metric:
        histogram = self._process.detection_latency
        buckets, n_all, sum_s = histogram.cumulative()
        named = [(str(bound_s), float(n_within)) for bound_s, n_within in buckets]
        metric = HistogramMetricFamily(LATENCY.name, LATENCY.help, [*named, ("+Inf", float(n_all))], sum_s)
        metric.add_sample(f"{LATENCY.name}_created", {}, histogram.created_s)
        return metric


def _channel_samples(report: ChannelReport) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """(metric, values of the labels after `channel`, value); nothing for what never happened to the channel."""
    if report.source_state is not None:
        yield "copywatch_channel_up", (), float(report.is_up)
        for state in STATES:
            yield "copywatch_channel_state", (state,), float(state == report.source_state)
    if report.n_received:
        yield "copywatch_frames_received_total", (), report.n_received
        yield "copywatch_frames_waiting", (), report.n_waiting
    if report.n_processed:
        yield "copywatch_frames_processed_total", (), report.n_processed
    for reason, n_dropped in report.dropped.items():
        yield "copywatch_frames_dropped_total", (reason,), n_dropped
    for reason, n_reconnects in report.reconnects.items():
        yield "copywatch_reconnects_total", (reason,), n_reconnects
    if report.gap_s:
        yield "copywatch_gap_seconds_total", (), report.gap_s
    if report.lag_s is not None:
        yield "copywatch_lag_seconds", (), report.lag_s


def _empty_metric(family: MetricFamily) -> CounterMetricFamily | GaugeMetricFamily:
    if family.kind == "counter":
        return CounterMetricFamily(family.name.removesuffix("_total"), family.help, labels=family.labels)
    return GaugeMetricFamily(family.name, family.help, labels=family.labels)


class Metrics:
    """Every metric that Copywatch exports. `channels` and `process` hold state; all else is only counted."""

    def __init__(self, registry: CollectorRegistry, channels: ChannelStatuses | None = None) -> None:
        self.registry = registry
        self.channels = channels if channels is not None else ChannelStatuses()
        self.process = ProcessStatus()
        self.detection_latency = self.process.detection_latency
        self.families = [*CHANNEL_FAMILIES, BACKLOG, LATENCY]
        self._per_channel: list[Counter | Gauge] = []
        registry.register(_StatusCollector(self.channels, self.process))

        # --- channels
        self.channels_held_back = self._gauge(
            "copywatch_channels_held_back", "Channels that are not started because memory is nearly used up."
        )
        self.low_information_seconds = self._counter(
            "copywatch_low_information_seconds_total",
            "Seconds of black, flat or test pictures, which match nothing.",
            "channel",
        )
        self.epochs = self._counter(
            "copywatch_epochs_total",
            "Starts of a channel's stream clock: at the first frame, after a jump or a long silence.",
            "channel",
        )
        self.damaged_pictures = self._counter(
            "copywatch_damaged_pictures_total", "Pictures that were decoded with errors or not at all.", "channel"
        )
        self.open_paths = self._gauge("copywatch_open_paths", "Alignment paths that are open.", "channel")
        self.restores = self._counter(
            "copywatch_restores_total",
            "Channels started with stored state, by result: continued, replayed (from Kafka records), refused.",
            "channel",
            "result",
        )

        # --- compute
        self.stage_duration = self._histogram(
            "copywatch_stage_duration_seconds",
            "Time a stage took for one frame, as its share of the batch: encode, match, snapshot, keep.",
            STAGE_BUCKETS_S,
            "stage",
        )
        self.compute_busy = self._counter(
            "copywatch_compute_busy_seconds_total",
            "Time that the compute thread worked; at 1 s per second it is overloaded.",
        )
        self.event_loop_lag = self._gauge(
            "copywatch_event_loop_lag_seconds",
            "Maximum delay of the event loop in the last 15 s; above 1 s something blocks it.",
        )

        # --- alerts
        self.alert_delay = self._histogram(
            "copywatch_alert_delay_seconds",
            "Time from the arrival of the frame that decided an alert to its hand-over to the sinks.",
            DELAY_BUCKETS_S,
        )
        self.alerts = self._counter(
            "copywatch_alerts_total",
            "Alert events by type (started, updated, ended, retracted) and whether the play is licensed (yes, no).",
            "channel",
            "event",
            "licensed",
        )
        self.suppressed = self._counter(
            "copywatch_alerts_suppressed_total",
            "Copies found but not alerted, by reason: exclusion.",
            "channel",
            "reason",
        )
        self.reviews = self._counter(
            "copywatch_reviews_total", "Reviews that were applied, by decision: confirmed, false, licensed.", "decision"
        )

        # --- references
        self.references = self._gauge("copywatch_references", "References in the index.")
        self.damaged_references = self._gauge(
            "copywatch_damaged_references", "References left out of the index because their files are damaged."
        )
        self.reference_seconds = self._gauge("copywatch_reference_seconds", "Seconds of reference video in the index.")
        self.index_generation = self._gauge(
            "copywatch_index_generation", "Generation of the index in use; grows with each change."
        )
        self._gauge(
            "copywatch_index_stale_seconds",
            "Time since the index was last known to contain the whole catalogue; normally about 1 s.",
        ).set_function(lambda: self.process.index_stale_s)

        # --- storage and sinks
        self.data_free = self._gauge("copywatch_data_free_bytes", "Free space on the disk of data_dir.")
        self.data_size = self._gauge("copywatch_data_size_bytes", "Size of the disk of data_dir.")
        self.outbox_up = self._gauge("copywatch_outbox_up", "1 while alerts and state can be written to disk, else 0.")
        self.outbox_unsaved = self._gauge(
            "copywatch_outbox_unsaved_events", "Alert events in memory that are not on disk yet."
        )
        self.sink_failures = self._counter(
            "copywatch_sink_failures_total", "Failed attempts to send alerts to a sink.", "sink"
        )
        self._gauge("copywatch_evidence_bytes", "Bytes used by the evidence of alerts.").set_function(
            lambda: self.process.evidence_bytes
        )
        self.evidence_quota = self._gauge("copywatch_evidence_quota_bytes", "Limit for the bytes used by evidence.")
        self.evidence_evicted = self._counter(
            "copywatch_evidence_evicted_total", "Alerts whose evidence was deleted, by reason: quota, age.", "reason"
        )
        self.evidence_failures = self._counter(
            "copywatch_evidence_failures_total",
            "Failures to store evidence, by reason: disk, overload, failed.",
            "reason",
        )
        self.webhook_deliveries = self._counter(
            "copywatch_webhook_deliveries_total",
            "Attempts to deliver a message to a webhook, by result: taken, failed.",
            "result",
        )
        self.webhooks_waiting = self._gauge("copywatch_webhook_waiting_messages", "Messages queued for webhooks.")

        # --- Kafka
        self.kafka_up = self._gauge("copywatch_kafka_up", "1 while the broker answers, else 0.")
        self.kafka_partitions = self._gauge("copywatch_kafka_partitions", "Partitions assigned to this member.")
        self.kafka_lag_records = self._gauge(
            "copywatch_kafka_lag_records", "Records of a partition that are not matched yet.", "partition"
        )
        self.kafka_lag_seconds = self._gauge(
            "copywatch_kafka_lag_seconds",
            "Age of the oldest record of a partition that is not matched yet.",
            "partition",
        )
        self.kafka_rebalances = self._counter("copywatch_kafka_rebalances_total", "Rebalances of the consumer group.")
        self.kafka_retakes = self._counter(
            "copywatch_kafka_retakes_total", "Restarts of a partition from its stored state, after a fault."
        )
        self.kafka_dead_letters = self._counter(
            "copywatch_kafka_dead_letters_total", "Invalid records moved to the dead-letter topic, by reason.", "reason"
        )
        self.kafka_skipped_records = self._counter(
            "copywatch_kafka_skipped_records_total",
            "Records that were never read: live (too far behind), expired (deleted by the broker).",
            "reason",
        )

        self.build_info = self._gauge(
            "copywatch_build_info", "Always 1; the labels hold the version and the model.", "version", "model"
        )
        ProcessCollector(registry=registry)  # process_cpu_seconds_total, process_resident_memory_bytes, ...

    def count_alert(self, channel: str, type_: str, licence: str | None) -> None:
        """Counts an alert event."""
        self.alerts.labels(channel, type_.removeprefix("alert."), "no" if licence is None else "yes").inc()

    def forget(self, channel: str) -> None:
        """Drops the status and every series of a channel that is no longer monitored."""
        self.channels.forget(channel)
        for metric in self._per_channel:
            metric.remove_by_labels({"channel": channel})

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        self.families.append(MetricFamily(name, "counter", help, labels))
        metric = Counter(name, help, labels, registry=self.registry)
        if "channel" in labels:
            self._per_channel.append(metric)
        return metric

    def _gauge(self, name: str, help: str, *labels: str) -> Gauge:
        self.families.append(MetricFamily(name, "gauge", help, labels))
        metric = Gauge(name, help, labels, registry=self.registry)
        if "channel" in labels:
            self._per_channel.append(metric)
        return metric

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        self.families.append(MetricFamily(name, "histogram", help, labels))
        return Histogram(name, help, labels, buckets=buckets, registry=self.registry)
