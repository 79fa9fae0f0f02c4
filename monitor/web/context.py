"""What the routes work with: the running monitor as `serve` gives it, and the stores and workers of the web.

A route takes it as a parameter `context: Context`. Methods that read a disk are plain functions for a thread, so
nothing here blocks the event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request

from monitor.alerting.outbox import History
from monitor.alerting.webhook_delivery import WebhookSender
from monitor.alerting.webhooks import WebhookStore
from monitor.audit.log import AuditLog
from monitor.config.settings import ChannelSettings, Settings
from monitor.evidence.store import EvidenceStore
from monitor.ingest.latest_frames import LatestFrames
from monitor.ops.change_signal import ChangeSignal
from monitor.ops.health import Health
from monitor.ops.metrics import Metrics
from monitor.rights.store import RightsStore
from monitor.runtime.active_library import ActiveLibrary
from monitor.web.audit_trail import RequestLog, Trail
from monitor.web.auth.gatekeeper import Caller, Gatekeeper
from monitor.web.auth.local_secret import LocalSecret
from monitor.web.auth.sessions import Sessions
from monitor.web.auth.token_uses import TokenUses
from monitor.web.auth.tokens import Tokens
from monitor.web.channel_views import ChannelViews
from monitor.web.dashboard import read_dashboard
from monitor.web.event_feed import EventFeed
from monitor.web.quality_reports import QualityReports
from monitor.web.reference_views import ReferenceViews
from monitor.web.requests.downloads import RecentlyUsed
from monitor.web.requests.jobs import Jobs, Registrar
from monitor.web.requests.limits import RequestLimits
from monitor.web.requests.upload_space import UploadSpace
from reference_db.store.catalog import Catalog, Contents

MAX_EXPORT_HEADERS = 256  # of some kB each; without one, an export is read twice more
HOUR_S = 3600.0


@dataclass(eq=False)
class AppContext:
    """One per application. The fields come from `serve`; the other attributes are built from them."""

    settings: Settings
    config: Path | None  # the file that channels are added to and removed from
    metrics: Metrics
    health: Health
    library: ActiveLibrary
    model: str
    encoder_id: str
    channels: Callable[[], Sequence[ChannelSettings]]  # those that are monitored now
    latest_frames: LatestFrames
    rights: RightsStore
    webhooks: WebhookStore
    emitted: ChangeSignal = field(default_factory=ChangeSignal)  # new alert events are in the history
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __post_init__(self) -> None:
        data_dir = self.settings.data_dir
        self.evidence = EvidenceStore(data_dir)
        self.history = History(data_dir)
        self.audit = AuditLog(data_dir)
        self.request_log = RequestLog(self.audit)
        self.tokens = Tokens(data_dir)
        web = self.settings.web
        self.local_secret = LocalSecret(data_dir)
        self.sessions = Sessions(data_dir, web.session_idle_hours * HOUR_S, web.session_hours * HOUR_S)
        self.token_uses = TokenUses(data_dir)
        self.gatekeeper = Gatekeeper(self.tokens, self.local_secret, self.sessions, self.token_uses)
        self.check_reader = self.gatekeeper.check_reader if web.metrics_token else None  # of metrics
        self.channel_views = ChannelViews(self.channels, self.metrics.channels, self.history)
        self.feed = EventFeed(self.history, self.rights, self.evidence, self.channel_views, self.contents, self.emitted)
        self.registrar = Registrar(Jobs(data_dir), self.settings)
        self.webhook_sender = WebhookSender(
            self.webhooks,
            self.history,
            self.rights,
            self.metrics,
            self.settings.webhooks.allow,
            self.settings.alerting.keep_days,
        )
        self.reference_views = ReferenceViews()
        self.quality_reports = QualityReports(self.settings)
        self.export_headers: RecentlyUsed[bytes] = RecentlyUsed(MAX_EXPORT_HEADERS)
        self.dashboard = read_dashboard()
        self.limits = RequestLimits()
        self.upload_space = UploadSpace(self.settings.web, self.registrar.jobs)
        self._contents: Contents | None = None
        self._contents_lock = threading.Lock()

    def catalog(self) -> Catalog:
        """The library on disk, opened to read; the caller closes it."""
        return Catalog.open(self.settings.data_dir)

    def contents(self) -> Contents:
        """What the library holds; read again only after a change."""
        with self._contents_lock, self.catalog() as catalog:
            checksum = catalog.checksum()
            if self._contents is None or not checksum or self._contents.checksum != checksum:
                self._contents = catalog.contents()
            return self._contents


async def _app_context(request: Request) -> AppContext:
    context = request.app.state.context
    assert isinstance(context, AppContext)
    return context


async def _current_caller(request: Request) -> Caller:
    caller = request.state.caller  # set by the middleware
    assert isinstance(caller, Caller)
    return caller


async def _current_trail(request: Request) -> Trail:
    trail = request.state.trail  # set by the middleware
    assert isinstance(trail, Trail)
    return trail


Context = Annotated[AppContext, Depends(_app_context)]
CurrentCaller = Annotated[Caller, Depends(_current_caller)]
CurrentTrail = Annotated[Trail, Depends(_current_trail)]
