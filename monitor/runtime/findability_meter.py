"""The meter that quality reports use: measures with the shipped network how long a copy must be to be found.

`reference_db` owns the reports but knows nothing of matching, so whoever opens a library passes this meter to it.
"""

from __future__ import annotations

import threading
from functools import cached_property
from typing import TYPE_CHECKING

from monitor.config.settings import Settings

if TYPE_CHECKING:
    from monitor.matching.mask_step import TileReader
    from reference_db.registration import Findability
    from reference_db.store.references import Features


class FindabilityMeter:
    """Measures one reference at a time, with the parameters of these settings; usable from any thread.

    The network is loaded with the first measurement: most commands that open a library never measure.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()  # a reader serves one thread

    def __call__(self, features: Features) -> Findability:
        from monitor.matching.confidence import confidence
        from monitor.matching.findability import measure_findability
        from monitor.runtime.channel_monitor import match_parameters

        min_confidence = self._settings.alerting.min_confidence
        with self._lock:
            return measure_findability(
                features,
                self._reader.read,
                match_parameters(self._settings),
                lambda view: confidence(view) >= min_confidence,
            )

    @cached_property
    def _reader(self) -> TileReader:
        from monitor.matching.mask_step import TileReader, load_mask_step

        return TileReader(load_mask_step())
