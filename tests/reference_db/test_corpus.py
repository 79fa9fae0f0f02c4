"""Bad media and hostile addresses: a seeded sample of what `scripts/chaos.py streams` tries."""

from __future__ import annotations

from tests.chaos import corpus, hostile


def test_a_sample_of_bad_media_hurts_nobody() -> None:
    figures = corpus.run(corpus.sample_of(seed=1, count=250))
    assert figures["wrong"] == 0, figures
    assert figures["refused"] > 20
    assert figures["decoded"] > 20
    assert figures["rss_mb"] <= corpus.MOST_RSS_MB


def test_the_whole_corpus_has_what_it_should() -> None:
    names = [name for name, _, _ in corpus.cases(0)]
    assert len(names) == len(set(names)) >= 3400


def test_no_hostile_address_reaches_a_canary() -> None:
    figures = hostile.run()
    assert figures["addresses"] >= 150
    assert figures["tried"] >= 450
    assert figures["wrong"] == 0, figures
