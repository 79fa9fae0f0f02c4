"""The two producers in monitor/kafka/README.md, unchanged except for address and topics, against a real broker."""

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
from tests.support.planted_fleet import PlantedFleet, PlantedLibrary, RoleProcess

FILM = Film("film", "The Film", 77, ("hills", "face", "city", "card"), 40.0)
FPS = 4


def example(language: str, *needed: str) -> str:
    """The code block of the page in this language that contains all of `needed`."""
    blocks = re.findall(rf"```{language}\n(.*?)```", (ROOT / "monitor/kafka/README.md").read_text(), re.DOTALL)
    (found,) = [block for block in blocks if all(text in block for text in needed)]
    return str(found)


@pytest.fixture
def fleet(broker: Broker, tmp_path: Path) -> PlantedFleet:
    """A film in the library, and twenty of its seconds as a folder of pictures."""
    film = media.write_clip(tmp_path / "film.mp4", media.pieces(FPS, (FILM, 0, 40)), fps=FPS)
    encoder = load_encoder()
    with Catalog.open(tmp_path / "data", write=True) as catalog:
        register(film, catalog, encoder)
    (tmp_path / "pictures").mkdir()
    for second in range(20):
        Image.fromarray(FILM.picture(8.3 + second)).save(tmp_path / "pictures" / f"{second:05}.jpg", quality=90)
    broker.create_topic("examples.frames", 4)
    return PlantedFleet(PlantedLibrary(tmp_path, encoder.encoder_id), broker, "examples", "examples.frames")


@pytest.fixture
def member(fleet: PlantedFleet) -> Iterator[RoleProcess]:
    member = fleet.member()
    yield member
    member.kill()


def adapted(code: str, fleet: PlantedFleet) -> str:
    assert "localhost:9092" in code
    assert "copywatch.frames" in code
    for text, ours in (("localhost:9092", fleet.broker.address), ("copywatch.", "examples.")):
        code = code.replace(text, ours)
    return code


def test_records_of_both_producers_are_matched(fleet: PlantedFleet, member: RoleProcess, tmp_path: Path) -> None:
    python_code = example("python", "AIOKafkaProducer")
    assert len([line for line in python_code.splitlines() if line]) <= 15
    subprocess.run([sys.executable, "-c", adapted(python_code, fleet)], cwd=tmp_path, check=True, timeout=120)
    sending, reading = adapted(example("sh", "kcat -P"), fleet).split("\nkcat -C")
    subprocess.run(["sh", "-e", "-c", sending], cwd=tmp_path, check=True, timeout=120)
    wait_for(fleet.is_done, "both channels to be matched")
    read = subprocess.run(["sh", "-c", "kcat -C" + reading], capture_output=True, text=True, check=True, timeout=120)
    alerts = [json.loads(line.partition(" ")[2]) for line in read.stdout.splitlines()]
    assert {alert["channel"] for alert in alerts if alert["type"] == "alert.started"} == {"ch5", "ch6"}
    (partition,) = {record.partition for record in fleet.broker.read(fleet.frames) if record.key == b"ch6"}
    assert partition == DefaultPartitioner()(b"ch6", range(4), range(4))  # as every other producer does
