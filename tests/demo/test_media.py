"""The rendered media contain the listed copies."""

from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import pytest

from monitor.demo import media
from monitor.demo.media import BROADCAST_S, COPIES, FPS, REFERENCE_S, REFERENCES, Media, PlantedCopy, render_media


def pictures(path: Path) -> list[tuple[float, np.ndarray]]:
    with av.open(str(path), "r") as container:
        return [(float(frame.time or 0.0), frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]


def test_the_copies_have_the_planned_lengths_and_distances() -> None:
    assert {copy.edit for copy in COPIES} == {"logo", "crop", "low quality", "1.25x speed"}
    for copy in COPIES:
        assert 12 <= copy.channel_end - copy.channel_start <= 25
        assert 0 <= copy.reference_start < copy.reference_end <= REFERENCE_S
    for before, after in pairwise(COPIES):
        assert after.channel_start - before.channel_end > 10
    assert COPIES[0].channel_start < 10  # the first alert comes soon
    assert BROADCAST_S - COPIES[-1].channel_end > 20  # and the last one has time to end


def test_the_broadcast_is_a_stream_from_second_0_with_a_key_frame_a_second(demo_media: Media) -> None:
    with av.open(str(demo_media.broadcast), "r") as container:
        assert "mpegts" in container.format.name
        packets = [packet for packet in container.demux(video=0) if packet.pts is not None]
        times = [float(packet.pts * packet.time_base) for packet in packets if packet.pts is not None]
        keys = [float(p.pts * p.time_base) for p in packets if p.is_keyframe and p.pts is not None]
    assert times[0] == 0.0
    assert len(times) == BROADCAST_S * FPS
    assert max(b - a for a, b in pairwise(keys)) <= 1.01


def test_each_copy_shows_its_reference_and_nothing_else_does(demo_media: Media) -> None:
    broadcast = pictures(demo_media.broadcast)
    films = {film.name: film for film in REFERENCES}
    assert demo_media.copies() == list(COPIES)

    def distance(at_s: float, copy: PlantedCopy) -> float:
        """Mean difference between the middle of the broadcast picture and the reference, which is cropped alike."""
        picture = broadcast[round(at_s * FPS)][1].astype(float)
        ref = films[copy.reference].picture(copy.reference_start + copy.speed * (at_s - copy.channel_start))
        reference = media._cropped(ref) if copy.edit == "crop" else ref
        return float(np.abs(picture - reference)[40:150, 20:250].mean())

    for copy in COPIES:
        inside = [distance(copy.channel_start + part, copy) for part in (0.5, 5.0, 11.0)]
        outside = [distance(copy.channel_start - 2, copy), distance(copy.channel_end + 2, copy)]
        assert max(inside) < 20, copy
        assert min(outside) > 25, copy


def test_references_are_complete_films(demo_media: Media) -> None:
    for film in REFERENCES:
        with av.open(str(demo_media.reference(film)), "r") as container:
            assert container.duration is not None
            assert container.duration / av.time_base == pytest.approx(REFERENCE_S, abs=0.2)


def test_rendered_media_are_used_again_but_not_outdated_or_partial_ones(
    demo_media: Media, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = demo_media.broadcast.stat().st_mtime_ns
    assert render_media(demo_media.folder.parent) == demo_media
    assert demo_media.broadcast.stat().st_mtime_ns == before

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "media-0").mkdir()
    monkeypatch.setattr(media, "_render_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        render_media(tmp_path)
    assert list(tmp_path.iterdir()) == []
