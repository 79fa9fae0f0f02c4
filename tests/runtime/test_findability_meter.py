"""The meter of quality reports, with the shipped network: real threads, planted features."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from monitor.config.settings import Settings
from monitor.runtime.findability_meter import FindabilityMeter
from reference_db.store.catalog import ReferenceFeatures
from tests.support.planted_features import film


def test_threads_share_a_meter_and_agree() -> None:
    meter = FindabilityMeter(Settings())
    rows = film("film", 60, seed=1).rows.astype(np.float16)
    features = ReferenceFeatures(rows, np.ones(60, np.bool_))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(meter, [features, features])
    assert first == second
    assert first.n_places == 5
    assert first.shortest_s is not None
    assert first.shortest_s <= 10
