"""Metrics: what the pipeline counts, as Prometheus families in a registry that the caller owns.

Labels are bounded: channel (as many as are configured), stage and reason (few words of ours); never a reference,
an address or an alert. The README's table of metrics is compared with this file by a test.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

# One second of one channel costs some 5-50 ms in a stage; beyond a second the stage cannot hold real time.
STAGE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
# Four seconds go to the network's look ahead, so nothing is faster than that; 10 s is the target.
LATENCY_BUCKETS_S = (4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 15.0, 20.0, 30.0, 60.0)


class Metrics:
    """Every family that Copywatch exports, each updated by the stage that knows."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        per_channel = ["channel"]
        self.channel_up = Gauge(
            "copywatch_channel_up", "1 while the channel delivers pictures, else 0.", per_channel, registry=registry
        )
        self.frames_received = Counter(
            "copywatch_frames_received_total", "Seconds of air that ingest handed over.", per_channel, registry=registry
        )
        self.frames_processed = Counter(
            "copywatch_frames_processed_total", "Seconds of air that were matched.", per_channel, registry=registry
        )
        self.frames_dropped = Counter(
            "copywatch_frames_dropped_total",
            "Seconds of air that came and were not matched, by reason.",
            ["channel", "reason"],
            registry=registry,
        )
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
        self.gap_seconds = Counter(
            "copywatch_gap_seconds_total", "Seconds of air that never came.", per_channel, registry=registry
        )
        self.stage_duration = Histogram(
            "copywatch_stage_duration_seconds",
            "Time one call of a stage took: encode, match.",
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
        self.alerts = Counter(
            "copywatch_alerts_total",
            "Alert events by kind: started, updated, ended, retracted.",
            ["channel", "event"],
            registry=registry,
        )
        self.open_paths = Gauge(
            "copywatch_open_paths", "Alignment paths that are being walked.", per_channel, registry=registry
        )
        self.references = Gauge("copywatch_references", "References that are searched.", registry=registry)
        self.reference_seconds = Gauge(
            "copywatch_reference_seconds", "Seconds of reference video that are searched.", registry=registry
        )
        self.index_generation = Gauge(
            "copywatch_index_generation", "Generation of the index in use; grows with each change.", registry=registry
        )
        self.build_info = Gauge(
            "copywatch_build_info", "Always 1; the labels say what runs.", ["version", "model"], registry=registry
        )
        ProcessCollector(registry=registry)  # process_cpu_seconds_total, process_resident_memory_bytes, ...
