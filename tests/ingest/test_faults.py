"""Every fault of a stream, each on a channel of its own, several at once, and one channel that nothing happens to."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.streams import STORIES, run

pytestmark = pytest.mark.system  # nginx, VLC, ffmpeg, openssl

AT_ONCE = 8  # stories; more would only wait for two cores to start their decoders


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """How each story went, and the witness's."""
    return run(STORIES, tmp_path_factory.mktemp("studio"), AT_ONCE)


@pytest.mark.parametrize("name", STORIES)
def test_the_channel_ends_in_its_state_and_recovers_by_itself(name: str, told: dict[str, dict[str, Any]]) -> None:
    assert told[name]["wrong"] == 0, told[name]


def test_no_other_channel_misses_a_second(told: dict[str, dict[str, Any]]) -> None:
    assert told["witness"]["wrong"] == 0, told["witness"]
    assert told["witness"]["seconds"] > 10
