"""Metrics: what the pipeline counts, as Prometheus families in a registry that the caller owns.

Labels are bounded: channel and sink (as many as are configured), stage, reason and result (few words of ours); never
a reference, an address or an alert. The table in README.md is compared with this file by a test.
"""

import threading
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

# One second of one channel costs some 5-50 ms in a stage; beyond a second the stage cannot hold real time.
STAGE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
DELAY_BUCKETS_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)  # 1 s is the target
# Four seconds go to the network's look ahead, so nothing is faster than that; 10 s is the target.
LATENCY_BUCKETS_S = (4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 15.0, 20.0, 30.0, 60.0)


class _Together(Collector):
    """Families whose samples are taken at one moment, while nothing moves between them."""

    def __init__(self, moving: threading.Lock, *families: MetricWrapperBase) -> None:
        self._moving = moving
        self._families = families

    def describe(self) -> Iterable[Metric]:
        return [described for family in self._families for described in family.describe()]

    def collect(self) -> Iterable[Metric]:
        with self._moving:
            return [metric for family in self._families for metric in family.collect()]


class Metrics:
    """Every family that Copywatch exports, each updated by the stage that knows."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        per_channel = ["channel"]
        self.channel_up = Gauge(
            "copywatch_channel_up", "1 while the channel delivers pictures, else 0.", per_channel, registry=registry
        )
        self.channel_state = Gauge(
            "copywatch_channel_state",
            "1 for the state that the channel is in, 0 for the others.",
            ["channel", "state"],
            registry=registry,
        )
        self.channels_held_back = Gauge(
            "copywatch_channels_held_back",
            "Channels that are not watched yet because memory is nearly used up.",
            registry=registry,
        )
        # These four are moved by ingest/ledger.py and scraped together: received = processed + dropped + waiting.
        self.moving = threading.Lock()
        self.frames_received = Counter(
            "copywatch_frames_received_total", "Seconds of air that came.", per_channel, registry=None
        )
        self.frames_processed = Counter(
            "copywatch_frames_processed_total", "Seconds of air that were matched.", per_channel, registry=None
        )
        self.frames_dropped = Counter(
            "copywatch_frames_dropped_total",
            "Seconds of air that came and were not matched: overload, backward, repeated, late, failed, stopped.",
            ["channel", "reason"],
            registry=None,
        )
        self.frames_waiting = Gauge(
            "copywatch_frames_waiting", "Seconds of air that came and are not matched yet.", per_channel, registry=None
        )
        moved = (self.frames_received, self.frames_processed, self.frames_dropped, self.frames_waiting)
        registry.register(_Together(self.moving, *moved))
        self.low_information_seconds = Counter(
            "copywatch_low_information_seconds_total",
            "Seconds of black, flat or test pictures, which match nothing.",
            per_channel,
            registry=registry,
        )
        self.reconnects = Counter(
            "copywatch_reconnects_total",
            "Times that a channel was opened again, by reason.",
            ["channel", "reason"],
            registry=registry,
        )
        self.epochs = Counter(
            "copywatch_epochs_total",
            "Times that a channel's clock began anew: at the start, after a jump or a long silence.",
            per_channel,
            registry=registry,
        )
        self.damaged_pictures = Counter(
            "copywatch_damaged_pictures_total",
            "Pictures that came out damaged, or not at all.",
            per_channel,
            registry=registry,
        )
        self.gap_seconds = Counter(
            "copywatch_gap_seconds_total", "Seconds of air that never came.", per_channel, registry=registry
        )
        self.stage_duration = Histogram(
            "copywatch_stage_duration_seconds",
            "Time a stage took for one second of a channel, by its share of the turn: encode, match, snapshot, keep.",
            ["stage"],
            buckets=STAGE_BUCKETS_S,
            registry=registry,
        )
        self.detection_latency = Histogram(
            "copywatch_detection_latency_seconds",
            "From the copy's first second on air to its alert; the one service level that matters.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.alert_delay = Histogram(
            "copywatch_alert_delay_seconds",
            "From the arrival of the second that decided an alert to its being handed to the sinks.",
            buckets=DELAY_BUCKETS_S,
            registry=registry,
        )
        self.alerts = Counter(
            "copywatch_alerts_total",
            "Alert events by kind (started, updated, ended, retracted), and whether the play is licensed (yes, no).",
            ["channel", "event", "licensed"],
            registry=registry,
        )
        self.suppressed = Counter(
            "copywatch_alerts_suppressed_total",
            "Copies that were not told, by reason: exclusion.",
            ["channel", "reason"],
            registry=registry,
        )
        self.reviews = Counter(
            "copywatch_reviews_total",
            "Reviews that were acted on, by decision: confirmed, false, licensed.",
            ["decision"],
            registry=registry,
        )
        self.open_paths = Gauge(
            "copywatch_open_paths", "Alignment paths that are being walked.", per_channel, registry=registry
        )
        self.lag = Gauge(
            "copywatch_lag_seconds",
            "How long the newest matched second waited from its arrival to its outcome.",
            per_channel,
            registry=registry,
        )
        self.compute_busy = Counter(
            "copywatch_compute_busy_seconds_total",
            "Time that the computing thread worked; at one second a second it is overloaded.",
            registry=registry,
        )
        self.event_loop_lag = Gauge(
            "copywatch_event_loop_lag_seconds",
            "How late the event loop woke, at most, in the last 15 s; beyond a second something holds it up.",
            registry=registry,
        )
        self.references = Gauge("copywatch_references", "References that are searched.", registry=registry)
        self.damaged_references = Gauge(
            "copywatch_damaged_references",
            "References that are not searched, since their bytes are damaged.",
            registry=registry,
        )
        self.reference_seconds = Gauge(
            "copywatch_reference_seconds", "Seconds of reference video that are searched.", registry=registry
        )
        self.index_generation = Gauge(
            "copywatch_index_generation", "Generation of the index in use; grows with each change.", registry=registry
        )
        self.index_stale = Gauge(
            "copywatch_index_stale_seconds",
            "Time since the index in use was last seen to have all of the catalogue; some 1 s while all is well.",
            registry=registry,
        )
        self.data_free = Gauge(
            "copywatch_data_free_bytes", "Room that is left on the disk of data_dir.", registry=registry
        )
        self.data_size = Gauge("copywatch_data_size_bytes", "Size of the disk of data_dir.", registry=registry)
        self.outbox_up = Gauge(
            "copywatch_outbox_up", "1 while alerts and state can be kept on disk, else 0.", registry=registry
        )
        self.outbox_owed = Gauge(
            "copywatch_outbox_owed_events", "Alert events that a sink has not taken yet.", ["sink"], registry=registry
        )
        self.outbox_unsaved = Gauge(
            "copywatch_outbox_unsaved_events", "Alert events that wait in memory for the disk.", registry=registry
        )
        self.sink_failures = Counter(
            "copywatch_sink_failures_total", "Times that a sink did not take alerts.", ["sink"], registry=registry
        )
        self.evidence_bytes = Gauge(
            "copywatch_evidence_bytes", "Bytes that the evidence of alerts takes.", registry=registry
        )
        self.evidence_quota = Gauge("copywatch_evidence_quota_bytes", "Bytes that it may take.", registry=registry)
        self.evidence_evicted = Counter(
            "copywatch_evidence_evicted_total",
            "Alerts whose evidence was let go, by reason: quota, age.",
            ["reason"],
            registry=registry,
        )
        self.evidence_failures = Counter(
            "copywatch_evidence_failures_total",
            "Times that evidence could not be kept, by reason: disk, overload, failed.",
            ["reason"],
            registry=registry,
        )
        self.restores = Counter(
            "copywatch_restores_total",
            "Channels that began with kept state, by what came of it: continued, replayed from its records, refused.",
            ["channel", "result"],
            registry=registry,
        )
        self.kafka_up = Gauge("copywatch_kafka_up", "1 while the broker answers, else 0.", registry=registry)
        self.kafka_partitions = Gauge(
            "copywatch_kafka_partitions", "Partitions of frames that this member reads.", registry=registry
        )
        per_partition = ["partition"]
        self.kafka_lag_records = Gauge(
            "copywatch_kafka_lag_records",
            "Records of a partition that came and are not matched.",
            per_partition,
            registry=registry,
        )
        self.kafka_lag_seconds = Gauge(
            "copywatch_kafka_lag_seconds",
            "Age of the oldest record of a partition that is not matched.",
            per_partition,
            registry=registry,
        )
        self.kafka_rebalances = Counter(
            "copywatch_kafka_rebalances_total", "Times that partitions were spread anew.", registry=registry
        )
        self.kafka_retakes = Counter(
            "copywatch_kafka_retakes_total",
            "Times that a partition was taken up again from what is kept, after a fault.",
            registry=registry,
        )
        self.kafka_dead_letters = Counter(
            "copywatch_kafka_dead_letters_total",
            "Records that cannot be used, by reason.",
            ["reason"],
            registry=registry,
        )
        self.kafka_skipped_records = Counter(
            "copywatch_kafka_skipped_records_total",
            "Records that were never read: live (too far behind), expired (deleted by the broker).",
            ["reason"],
            registry=registry,
        )
        self.webhook_deliveries = Counter(
            "copywatch_webhook_deliveries_total",
            "Tries to deliver a message to a webhook, by what came of it: taken, failed.",
            ["result"],
            registry=registry,
        )
        self.webhooks_waiting = Gauge(
            "copywatch_webhook_waiting_messages", "Messages that webhooks have not taken yet.", registry=registry
        )
        self.build_info = Gauge(
            "copywatch_build_info", "Always 1; the labels say what runs.", ["version", "model"], registry=registry
        )
        ProcessCollector(registry=registry)  # process_cpu_seconds_total, process_resident_memory_bytes, ...

    def alert_told(self, channel: str, type_: str, licence: str | None) -> None:
        """Counts an alert event."""
        self.alerts.labels(channel, type_.removeprefix("alert."), "no" if licence is None else "yes").inc()

    def forget(self, channel: str) -> None:
        """Drops every series of a channel that is no longer watched."""
        for family in vars(self).values():
            if isinstance(family, MetricWrapperBase) and "channel" in family._labelnames:
                place = family._labelnames.index("channel")
                for labels in [one for one in family._metrics if one[place] == channel]:
                    family.remove(*labels)
