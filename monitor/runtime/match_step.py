"""The match step: one sample of one channel, matched by a coroutine, so that channels can share one network call.

A match step is a generator; `ChannelMonitor.match_step` makes one for each sample. It yields the similarity tiles that
the network must read, is sent their maps in the same order, may yield again (a sample after a gap brings several
seconds), and returns an `Outcome`. It never calls the network itself. The batcher drives the steps of many channels
side by side: it collects the tiles of all of them, has the network read them in one batch, and sends each step its own
maps. A step therefore reads like ordinary sequential code, and its outcome does not depend on what else is in the
batch. All driving is in `batcher.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from monitor.alerting.alerts import Alert
from monitor.matching.tiles import SimilarityTile, TileMaps

T = TypeVar("T")

MatchStep: TypeAlias = Generator[list[SimilarityTile], list[TileMaps], T]
# Makes a step, given the feature row of a picture and whether the picture carries information.
NewStep: TypeAlias = Callable[[NDArray[np.float32], bool], MatchStep[T]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one match step."""

    second: int
    alerts: list[Alert]
    arrived_at: datetime
    snapshot: bytes | None = None  # of the channel after these alerts, with the position of its newest sample
