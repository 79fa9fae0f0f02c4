"""The two producers of monitor/kafka/README.md, word for word but for address and topics, run against a real broker."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka.partitioner import DefaultPartitioner
from PIL import Image

from monitor.demo.films import Film
from reference_db.features.encoder import load_encoder
from reference_db.registration import register
from reference_db.store.catalog import Catalog
from tests.support import media
from tests.support.broker import ROOT, Broker, wait_for
from tests.support.planted_fleet import Fleet, House, Member

FILM = Film("film", "The Film", 77, ("hills", "face", "city", "card"), 40.0)
FPS = 4


def example(language: str, *needed: str) -> str:
    """The block of code of the page in this language that has all these words."""
    blocks = re.findall(rf"```{language}\n(.*?)```", (ROOT / "monitor/kafka/README.md").read_text(), re.DOTALL)
    (found,) = [block for block in blocks if all(word in block for word in needed)]
    return str(found)


@pytest.fixture
def fleet(broker: Broker, tmp_path: Path) -> Fleet:
    """A film in the library, and twenty of its seconds as a folder of pictures."""
    film = media.write_clip(tmp_path / "film.mp4", media.pieces(FPS, (FILM, 0, 40)), fps=FPS)
    encoder = load_encoder()
    with Catalog.open(tmp_path / "data", write=True) as catalog:
        register(film, catalog, encoder)
    (tmp_path / "pictures").mkdir()
    for second in range(20):
        Image.fromarray(FILM.picture(8.3 + second)).save(tmp_path / "pictures" / f"{second:05}.jpg", quality=90)
    broker.create_topic("examples.frames", 4)
    return Fleet(House(tmp_path, encoder.encoder_id), broker, "examples", "examples.frames")


@pytest.fixture
def member(fleet: Fleet) -> Iterator[Member]:
    member = fleet.member()
    yield member
    member.kill()


def adapted(code: str, fleet: Fleet) -> str:
    assert "localhost:9092" in code
    assert "copywatch.frames" in code
    for word, ours in (("localhost:9092", fleet.broker.address), ("copywatch.", "examples.")):
        code = code.replace(word, ours)
    return code


def test_both_producers_of_the_page_are_understood(fleet: Fleet, member: Member, tmp_path: Path) -> None:
    by_python = example("python", "AIOKafkaProducer")
    assert len([line for line in by_python.splitlines() if line]) <= 15
    subprocess.run([sys.executable, "-c", adapted(by_python, fleet)], cwd=tmp_path, check=True, timeout=120)
    sending, reading = adapted(example("sh", "kcat -P"), fleet).split("\nkcat -C")
    subprocess.run(["sh", "-e", "-c", sending], cwd=tmp_path, check=True, timeout=120)
    wait_for(fleet.is_done, "both channels to be matched")
    seen = subprocess.run(["sh", "-c", "kcat -C" + reading], capture_output=True, text=True, check=True, timeout=120)
    told = [json.loads(line.partition(" ")[2]) for line in seen.stdout.splitlines()]
    assert {alert["channel"] for alert in told if alert["type"] == "alert.started"} == {"ch5", "ch6"}
    (partition,) = {record.partition for record in fleet.broker.read(fleet.frames) if record.key == b"ch6"}
    assert partition == DefaultPartitioner()(b"ch6", range(4), range(4))  # where any other producer of it would send it
