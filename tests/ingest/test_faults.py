"""Every fault of a stream at once, each on a channel of its own, and one channel that nothing happens to."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.air import Air, on_air
from tests.chaos.streams import STORIES, Figures, Studio
from tests.watching import LENGTH_S, Watching, watching

AT_ONCE = 8  # stories; more would only wait for two cores to start their decoders


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[Figures]]:
    """How each story went, and the witness's."""
    studio = Studio(tmp_path_factory.mktemp("studio"))
    with on_air(Air(studio.clip, LENGTH_S)) as web, watching(f"http://127.0.0.1:{web.port}/x.ts", "witness") as witness:
        witness.wait_for_more()
        with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
            futures = {name: pool.submit(story, studio) for name, story in STORIES.items()}
        witness.wait_for_more()
        futures["witness"] = Future()
        futures["witness"].set_result(_of(witness))
    return futures


def _of(witness: Watching) -> Figures:
    return {
        "seconds": len(witness.samples),
        "missed_s": sum(n for _, n, _ in witness.holes),
        "epochs": len(witness.epochs),
    }


@pytest.mark.parametrize("name", STORIES)
def test_the_channel_ends_in_its_state_and_recovers_by_itself(name: str, told: dict[str, Future[Figures]]) -> None:
    print(name, told[name].result())


def test_no_other_channel_misses_a_second(told: dict[str, Future[Figures]], tmp_path: Path) -> None:
    figures = told["witness"].result()
    assert figures["epochs"] == 1
    assert figures["missed_s"] == 0
    assert figures["seconds"] > 10
