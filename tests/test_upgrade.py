"""A data folder that version 0.1.0 wrote opens with this version, and nothing in it is lost.

`tests/data/data_dir_0.1.0.tar.gz` was written by commit d343a21: the library of the demo, its alerts, a licence, an
exclusion, a review, a token, a webhook and a job. `serve` was killed with `kill -9` while two files played (ch8, ch9)
and one alert of each was open, so the newest events are in SQLite's write-ahead log only.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from monitor.alerting.alerts import ENDED, Gap
from monitor.alerting.outbox import History, Outbox
from monitor.alerting.webhooks import WebhookStore
from monitor.errors import SnapshotRefused
from monitor.evidence.store import EvidenceStore
from monitor.ingest.clock import ChannelEpoch
from monitor.rights.store import RightsStore
from monitor.web.auth.tokens import Tokens
from monitor.web.requests.jobs import Jobs
from reference_db.features.encoder import load_encoder
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import Catalog
from reference_db.store.verification import verify
from tests.support.planted_channels import Part, new_monitor, outcomes_of, plant
from tests.support.serve_process import ServeProcess, clean_environment, wait_until

ARCHIVE = Path(__file__).parent / "data" / "data_dir_0.1.0.tar.gz"
FILMS = ["clockwork-garden", "harbour-nights", "paper-planets"]
OPEN = {"ch8": "cdc2e944236d30768c5791b0", "ch9": "1c5c39af2dd3673c33722599"}
REVIEWED_ID = "95de861cf2c4f8f645ba28db"
N_EVENTS = 46


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not in Python 3.11.2
        archive.extractall(tmp_path)
    return tmp_path / "v0"


def test_references_are_complete_and_found_by_their_features(data_dir: Path) -> None:
    assert not verify(data_dir).damaged
    assert verify(data_dir).n_references == len(FILMS)
    with Catalog.open(data_dir) as catalog:
        assert sorted(reference.id for reference in catalog.references()) == FILMS
        index = ReferenceIndex.build(catalog, load_encoder().encoder_id)
        for place, reference in enumerate(index.references):
            features = catalog.features(reference.id)
            second = int(np.flatnonzero(features.informative)[20])
            hits = index.search(features.rows[second : second + 1].astype(np.float32), 1)
            assert (hits.reference[0, 0], hits.second[0, 0]) == (place, second)
            assert catalog.thumbnail(reference.id, 0) is not None


def test_licences_exclusions_and_reviews_are_there(data_dir: Path) -> None:
    rights = RightsStore(data_dir)
    (licence,), (exclusion,), (review,) = rights.licences(), rights.exclusions(), rights.reviews()
    assert (licence.id, licence.reference, licence.channel) == ("L1", "paper-planets", "ch5")
    assert licence.note == "sold until spring"
    assert (exclusion.reference, exclusion.start_s, exclusion.end_s) == ("harbour-nights", 0.0, 5.0)
    assert (review.alert_id, review.decision, review.by) == (REVIEWED_ID, "confirmed", "root")
    assert rights.unapplied_reviews() == []
    assert not list(data_dir.glob("desk.sqlite*"))


def test_alerts_are_there_whoever_opens_them_first(data_dir: Path) -> None:
    history = History(data_dir)
    events = history.events(limit=1000)
    assert [event.n for event in events] == list(range(1, N_EVENTS + 1))
    assert events[0].emitted_at == "2026-11-18T00:37:12.863Z"
    assert {alert.channel: alert.id for alert in history.open_alerts()} == OPEN
    with Outbox.open(data_dir, ["log"]) as outbox:
        assert {alert.channel: alert.id for alert in outbox.open_alerts()} == OPEN
        assert outbox.snapshots().keys() == OPEN.keys()


def test_an_outbox_opened_first_upgrades_the_file_as_well(data_dir: Path) -> None:
    with Outbox.open(data_dir, ["log"]) as outbox:
        assert outbox.snapshots().keys() == OPEN.keys()
        assert len(History(data_dir).events(limit=1000)) == N_EVENTS


def test_tokens_webhooks_jobs_and_evidence_are_there(data_dir: Path) -> None:
    assert [(token.name, token.scope) for token in Tokens(data_dir).all()] == [("ops", "read")]
    webhooks = WebhookStore(data_dir)
    (endpoint,) = webhooks.all()
    assert (endpoint.url, endpoint.enabled) == ("http://127.0.0.1:9/hook", True)
    assert endpoint.secret.startswith("whsec_")
    assert webhooks.n_waiting() > 0
    (job,) = Jobs(data_dir).page(None, 10)
    assert (job.kind, job.state, job.request["id"]) == ("register", "failed", "harbour-nights")
    evidence = EvidenceStore(data_dir)
    with_evidence = [event.alert.id for _, event in History(data_dir).alerts() if evidence.has(event.alert.id)]
    assert len(with_evidence) == 2
    assert all(evidence.report(alert_id) for alert_id in with_evidence)


@pytest.mark.slow
def test_every_list_command_reads_it(data_dir: Path) -> None:
    for command, expected in [
        ("refs list", FILMS[0]),
        ("alerts list", OPEN["ch8"]),
        ("licences list", "sold until spring"),
        ("refs exclusions", FILMS[1]),
        ("webhooks list", "127.0.0.1:9"),
        ("tokens list", "ops"),
    ]:
        run = subprocess.run(
            [sys.executable, "-m", "monitor.cli", *command.split(), "--data-dir", str(data_dir)],
            capture_output=True,
            text=True,
            env=clean_environment(),
        )
        assert run.returncode == 0, run.stderr
        assert expected in run.stdout, command


def test_a_snapshot_is_refused_and_the_seconds_since_it_are_a_gap(data_dir: Path) -> None:
    with Outbox.open(data_dir, ["log"]) as outbox:
        content = outbox.snapshots()["ch8"]
    monitor = new_monitor()
    with pytest.raises(SnapshotRefused, match="snapshot cannot be restored") as refused:
        monitor.restore(content)
    assert refused.value.notes is not None
    epoch, newest_s = refused.value.notes["epoch"], refused.value.notes["newest_s"]
    planted = plant([Part(30, "swift", 20, noise=0.2), Part(25, noise=1.0)])
    samples = [
        replace(sample, epoch=ChannelEpoch("ch8", epoch, None), second=newest_s + 8 + sample.second)
        for sample in planted.samples
    ]
    alerts = [alert for one in outcomes_of(monitor, samples, planted.rows) for alert in one.alerts]
    assert alerts[0].gaps == (Gap(newest_s + 1, 7, "reconnect"),)


def refusals(serve: ServeProcess) -> list[str]:
    return [line for line in serve.log if "snapshot cannot be restored" in line]


@pytest.mark.slow
def test_serve_starts_on_it_and_reports_the_snapshots_it_cannot_restore(data_dir: Path, tmp_path: Path) -> None:
    config = tmp_path / "copywatch.yaml"
    url = "http://127.0.0.1:9/nothing.m3u8"
    config.write_text(
        f"data_dir: {data_dir}\nweb: {{port: 0}}\n"
        f"channels: [{{name: ch8, url: '{url}'}}, {{name: ch9, url: '{url}'}}]\n"
    )
    with ServeProcess(config) as serve:
        wait_until(lambda: len(refusals(serve)) == len(OPEN), lambda: serve.log)
        assert all(any(f"channel {channel}" in line for line in refusals(serve)) for channel in OPEN)
        assert serve.problems() == {}
        serve.process.send_signal(signal.SIGTERM)
        assert serve.process.wait(60) == 0
    history = History(data_dir)
    assert history.open_alerts() == []
    for channel, alert_id in OPEN.items():
        last = history.alert(alert_id)[-1].alert
        assert (last.channel, last.type, last.reason) == (channel, ENDED, "state lost")
    assert [licence.id for licence in RightsStore(data_dir).licences()] == ["L1"]
