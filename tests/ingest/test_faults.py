"""Every stream fault, each on its own channel, several at once, beside one channel without faults."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.streams import SCENARIOS, run

pytestmark = pytest.mark.system  # nginx, VLC, ffmpeg, openssl

AT_ONCE = 8  # scenarios; more would only wait until two cores have started their decoders


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The figures of each scenario and of the witness."""
    return run(SCENARIOS, tmp_path_factory.mktemp("clips"), AT_ONCE)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_channel_ends_in_its_state_and_recovers_by_itself(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert results[name]["failures"] == 0, results[name]


def test_no_other_channel_misses_a_second(results: dict[str, dict[str, Any]]) -> None:
    assert results["witness"]["failures"] == 0, results["witness"]
    assert results["witness"]["seconds"] > 10
