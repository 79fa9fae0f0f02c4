"""Bad media and hostile addresses: a seeded sample of what `scripts/chaos.py streams` tries."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import av
import pytest

from tests.chaos import corpus, hostile, seeds

pytestmark = pytest.mark.slow  # hundreds of damaged files and hostile addresses


def test_a_sample_of_bad_media_is_decoded_or_refused() -> None:
    figures = corpus.run(corpus.sample_of(seed=1, count=250))
    assert figures["failures"] == 0, figures
    assert figures["refused"] > 20
    assert figures["decoded"] > 20
    assert figures["rss_mb"] <= corpus.MOST_RSS_MB


def test_the_corpus_covers_codecs_and_containers() -> None:
    names = [name for name, _, _ in corpus.cases(0)]
    assert len(names) == len(set(names)) >= 5000
    codecs, endings = {seed.codec for seed in seeds.SEEDS.values()}, {seed.ending for seed in seeds.SEEDS.values()}
    assert codecs >= {"libx264", "libx265", "mpeg2video", "libvpx-vp9", "libsvtav1", "mjpeg"}
    assert endings == {"mp4", "ts", "flv", "mkv", "webm", "avi"}


def test_every_seed_matches_its_description_and_can_be_decoded(tmp_path: Path) -> None:
    for name, seed in seeds.SEEDS.items():
        with av.open(str(seeds.seed_file(name, tmp_path))) as container:
            pictures = list(container.decode(video=0))
            assert bool(container.streams.audio) == bool(seed.sound), name
        steps = {round((b.time or 0.0) - (a.time or 0.0), 3) for a, b in pairwise(pictures)}
        assert len(pictures) == seeds.SECONDS * seeds.FPS, name
        assert pictures[0].format.name == seed.pixels, name
        assert (pictures[0].width, pictures[0].height) == seed.size, name
        assert pictures[0].rotation == -90 * seed.quarter_turns, name
        assert (len(steps) > 1) == seed.varies, (name, steps)


def test_no_hostile_address_reaches_a_canary() -> None:
    figures = hostile.run()
    assert figures["addresses"] >= 150
    assert figures["tried"] >= 450
    assert figures["failures"] == 0, figures
