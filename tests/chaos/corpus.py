"""Bad media: thousands of files that are truncated, damaged, reordered, spliced or forged, and the outcome of each.

Every case is determined by its name and the seed. The code of the decoding child decodes them, fifty per process with
its memory limit and an alarm, because a process each would take most of the time; a case that kills such a process is
retried alone. A third is decoded in economy mode, a third as live. A case may be decoded or refused. It must not hang,
exceed the memory limit, or affect anything but its own process.
"""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np

from reference_db.media.frames import Mode
from tests.chaos.seeds import SEEDS, seed_file
from tests.support.live_stream import PACKET, retimed

BATCH = 50
ALARM_S = 30  # longest allowed time of a case
MOST_RSS_MB = 512
Case = tuple[str, Callable[[], bytes], str]  # name, function that returns its content, file extension
Built = Iterator[tuple[str, bytes, str]]  # name, content, file extension


# --- kinds of damage -------------------------------------------------------------------------------------------------


def truncated(whole: bytes, n: int, luck: random.Random) -> bytes:
    edge = len(whole) * n // 40 // PACKET * PACKET + luck.choice((-1, 0, 1))
    return whole[: max(1, edge)]


def flipped_header(whole: bytes, n: int, luck: random.Random) -> bytes:
    return _flip(whole, luck.randint(1, 4), min(2048, len(whole)), luck)


def flipped(whole: bytes, n: int, luck: random.Random) -> bytes:
    return _flip(whole, luck.randint(1, 16), len(whole), luck)


def _flip(whole: bytes, times: int, within: int, luck: random.Random) -> bytes:
    out = bytearray(whole)
    for _ in range(times):
        out[luck.randrange(within)] = luck.randrange(256)
    return bytes(out)


def shuffled(whole: bytes, n: int, luck: random.Random) -> bytes:
    """A chunk deleted, duplicated or moved."""
    size = luck.randint(1, max(2, len(whole) // 8))
    at, to = luck.randrange(len(whole)), luck.randrange(len(whole))
    chunk = whole[at : at + size]
    match n % 3:
        case 0:
            return whole[:at] + whole[at + size :]
        case 1:
            return whole[:to] + chunk + whole[to:]
    rest = whole[:at] + whole[at + size :]
    return rest[:to] + chunk + rest[to:]


def bit_errors(whole: bytes, n: int, luck: random.Random) -> bytes:
    """Bits flipped everywhere, one in ten thousand to one in a hundred."""
    rate = 10 ** luck.uniform(-4, -2)
    bits = np.random.default_rng(luck.randrange(1 << 32)).random(8 * len(whole)) < rate
    return bytes(np.frombuffer(whole, np.uint8) ^ np.packbits(bits))


def noisy(whole: bytes, n: int, luck: random.Random, ending: str) -> bytes:
    """Packets damaged or dropped inside an intact container."""
    filters = [f"noise=amount={amount}" for amount in (1, 5, 20, 200)] + [
        "noise=drop=not(mod(n\\,3))",
        "noise=drop=eq(n\\,0)",
    ]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / f"in.{ending}", Path(folder) / f"out.{ending}"
        source.write_bytes(whole)
        with av.open(str(source)) as reading, av.open(str(target), "w") as writing:
            stream = writing.add_stream_from_template(reading.streams.video[0], opaque=True)
            damage = av.bitstream.BitStreamFilterContext(filters[n % len(filters)], reading.streams.video[0])
            for packet in reading.demux(video=0):
                if packet.size:
                    for damaged in damage.filter(packet):
                        damaged.stream = stream
                        with suppress(av.error.FFmpegError):  # too damaged even for the muxer
                            writing.mux(damaged)
        return target.read_bytes()


def transported(whole: bytes, n: int, luck: random.Random) -> bytes:
    """Transport packets dropped, duplicated, swapped, renumbered, with clock jumps, or garbage between them."""
    packets = [whole[at : at + PACKET] for at in range(0, len(whole) - PACKET + 1, PACKET)]
    at = luck.randrange(len(packets))
    match n % 8:
        case 0:
            del packets[at : at + luck.randint(1, 9)]
        case 1:
            packets.insert(at, packets[at])
        case 2:
            to = luck.randrange(len(packets))
            packets[at], packets[to] = packets[to], packets[at]
        case 3:
            packets = [one[:3] + bytes([one[3] & 0xF0 | luck.randrange(16)]) + one[4:] for one in packets]
        case 4:
            packets[0], packets[1] = packets[1], packets[0]  # the tables
        case 5:
            pid = luck.randrange(0x20, 0x1FFF)
            packets = [one[:1] + struct.pack(">H", one[1] << 8 & 0xE000 | pid) + one[3:] for one in packets]
        case 6:
            jump = luck.choice((-1, 1)) * luck.randrange(90_000, 1 << 33)
            packets = packets[:at] + [retimed(one, jump) for one in packets[at:]]
        case 7:
            packets.insert(at, luck.randbytes(luck.randint(1, 400)))
    return b"".join(packets)


def timelines(streams: dict[str, bytes], n: int, luck: random.Random) -> bytes:
    """Two recordings in one: the clock jumps back or wraps, another size, another codec."""
    first, second = luck.choice(sorted(streams)), luck.choice(sorted(streams))
    shift = luck.choice((0, (1 << 33) - 90_000, -90_000, 3600 * 90_000, 1 << 32))
    return retimed(streams[first], (1 << 33) - 45_000 * n) + retimed(streams[second], shift)


def bombs() -> Built:
    """Small files that claim large resources."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    def box(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", 8 + len(body)) + kind + body

    for side in (8193, 20_000, 32_767, 65_535):
        head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
        png = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1 << 20))) + chunk(b"IEND", b"")
        yield f"png-{side}", png, "png"
        yield f"png-{side}-as-avi", png, "avi"
        jpeg = (
            b"\xff\xd8\xff\xc0\x00\x11\x08"
            + struct.pack(">HH", side, side)
            + b"\x03\x01\x22\x00\x02\x11\x01\x03\x11\x01"
        )
        yield f"jpeg-{side}", jpeg + b"\xff\xda\x00\x0c\x03\x01\x00\x02\x11\x03\x11\x00\x3f\x00" + bytes(4096), "mjpeg"
        ivf = b"DKIF" + struct.pack("<HH4sHHIIII", 0, 32, b"VP80", side, side, 30, 1, 1, 0)
        vp8 = b"\x10\x02\x00\x9d\x01\x2a" + struct.pack("<HH", side & 0x3FFF, side & 0x3FFF) + bytes(200)
        yield f"vp8-{side}", ivf + struct.pack("<IQ", len(vp8), 0) + vp8, "ivf"
        gif = (
            b"GIF89a"
            + struct.pack("<HHBBB", side, side, 0x80, 0, 0)
            + bytes(6)
            + b","
            + struct.pack("<HHHHB", 0, 0, side, side, 0)
        )
        yield f"gif-{side}", gif + b"\x08" + b"\xff" + bytes(255) * 4 + b"\x00;", "gif"
    for entries in (10**4, 10**6, 0xFFFFFFFF):
        stts = box(b"stts", struct.pack(">II", 0, entries) + struct.pack(">II", 1, 1) * min(entries, 10**5))
        nested = box(b"moov", box(b"trak", box(b"mdia", box(b"minf", box(b"stbl", stts)))))
        yield f"stts-{entries}", box(b"ftyp", b"isom\0\0\2\0isom") + nested, "mp4"
    for depth in (10, 100, 1000, 5000):
        body = b""
        for _ in range(depth):
            body = box(b"moov", body)
        yield f"boxes-{depth}", box(b"ftyp", b"isom\0\0\2\0isom") + body, "mp4"
        inner = b""
        for _ in range(depth):
            inner = b"\x18\x53\x80\x67" + b"\x01" + len(inner).to_bytes(7, "big") + inner
        yield f"ebml-{depth}", b"\x1a\x45\xdf\xa3\x80" + inner, "mkv"
    for size in (1 << 16, 1 << 22, 1 << 24):
        text = box(b"\xa9nam", struct.pack(">HH", size & 0xFFFF, 0) + b"x" * size)
        yield f"metadata-{size}", box(b"ftyp", b"isom\0\0\2\0isom") + box(b"moov", box(b"udta", text)), "mp4"
        yield f"zeros-{size}", bytes(size), "ts"
        yield f"sync-{size}", (b"\x47" + bytes(187)) * (size // 188), "ts"
    for streams in (10, 200, 1000):
        yield f"programmes-{streams}", _programmes(streams), "ts"
    for kind in (
        b"RIFF\xff\xff\xff\xffAVI LIST",
        b"FLV\x01\x05\xff\xff\xff\xff",
        b"OggS\x00\x02",
        b"\x30\x26\xb2\x75\x8e\x66\xcf\x11",
    ):
        yield f"head-{kind[:3].hex()}", kind + b"\xff" * 4096, "mp4"


def _programmes(n: int) -> bytes:
    """A programme table with `n` streams, over several packets."""
    out = b""
    for first in range(0, n, 30):
        entries = b"".join(
            b"\x1b" + struct.pack(">HH", 0xE000 | (0x100 + k) & 0x1FFF, 0xF000) for k in range(first, first + 30)
        )
        section = b"\x00\x01\xc1\x00\x00\xe1\x00\xf0\x00" + entries + b"\0\0\0\0"
        table = b"\x02" + struct.pack(">H", 0xB000 | len(section)) + section
        out += (b"\x47\x50\x00\x10\x00" + table).ljust(PACKET, b"\xff")[:PACKET]
    pat = b"\x00\xb0\x0d\x00\x01\xc1\x00\x00\x00\x01\xf0\x00\0\0\0\0"
    return (b"\x47\x40\x00\x10\x00" + pat).ljust(PACKET, b"\xff") + out


TARGETS = (
    *(
        "/etc/passwd",
        "file:///etc/passwd",
        "film.mp4",
        "../../etc/shadow",
        "concat:a.ts|b.ts",
        "subfile,,start,0,end,9,,:/etc/passwd",
    ),
    *(
        "data:video/mp2t;base64,AAAA",
        "http://127.0.0.1:9/x.ts",
        "http://169.254.169.254/latest",
        "udp://127.0.0.1:9",
        "pipe:0",
    ),
    *(
        "crypto:/etc/passwd",
        "hls+http://127.0.0.1:9/x",
        "tcp://127.0.0.1:9",
        "rtp://127.0.0.1:9",
        "\x00",
        "a" * 5000,
        "%n%s",
    ),
)


def playlists(count: int, luck: random.Random) -> Built:
    """Playlists of every kind, most of them with the extension of another format."""
    for n in range(count):
        targets = [luck.choice(TARGETS) for _ in range(luck.randint(1, 4))]
        match n % 5:
            case 0 | 1:
                lines = ["#EXTM3U", f"#EXT-X-TARGETDURATION:{luck.choice((1, -1, 10**18, 'x'))}"]
                lines += [
                    f'#EXT-X-KEY:METHOD=AES-128,URI="{luck.choice(TARGETS)}",IV=0x{luck.randrange(1 << 128):x}'
                ] * (n % 2)
                for target in targets * luck.choice((1, 1, 1, 1000)):
                    lines += [f"#EXTINF:{luck.choice((1, 0, -5, 1e300))},", target]
                text = "\n".join(lines)
            case 2:
                text = "ffconcat version 1.0\n" + "".join(
                    f"file '{one}'\nduration {luck.uniform(-9, 9)}\n" for one in targets
                )
            case 3:
                text = "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
                text += "".join(
                    f"m=video {luck.randrange(1 << 17)} RTP/AVP {luck.choice((26, 33, 96, 999))}\n" for _ in targets
                )
            case _:
                text = f"<MPD><Period><BaseURL>{targets[0]}</BaseURL></Period></MPD>"
        yield (
            f"playlist-{n}",
            text.encode("utf-8", "replace"),
            luck.choice(("m3u8", "mp4", "sdp", "mpd", "ts", "ffconcat")),
        )


# --- all cases -------------------------------------------------------------------------------------------------------

# Names seed the damage, so a renamed kind is other damage.
DAMAGES: dict[str, tuple[Callable[..., bytes], int]] = {
    "truncated": (truncated, 40),
    "flipped-header": (flipped_header, 40),
    "flipped": (flipped, 40),
    "shuffled": (shuffled, 30),
    "rained-on": (bit_errors, 60),
    "noisy": (noisy, 12),
}
# With seed 0: a damaged programme table names streams that did not exist when the file was opened.
REGRESSIONS = ("rained-on mpeg2-ts 9", *(f"rained-on mpeg4-ts {n}" for n in (18, 23, 35, 40, 41, 48, 53, 54)))
N_TRANSPORTED, N_TIMELINES, N_PLAYLISTS = 300, 60, 400


def cases(seed: int) -> Iterator[Case]:
    """All cases, in an order that does not depend on the machine."""
    with tempfile.TemporaryDirectory() as folder:
        whole = {name: seed_file(name, Path(folder)).read_bytes() for name in SEEDS}
    for kind, (damage, count) in DAMAGES.items():
        for name, content in whole.items():
            ending = SEEDS[name].ending
            for n in range(count):
                luck = random.Random(f"{seed} {kind} {name} {n}")
                extra = (ending,) if damage is noisy else ()
                yield f"{kind} {name} {n}", partial(damage, content, n, luck, *extra), ending
    streams = {name: content for name, content in whole.items() if SEEDS[name].ending == "ts"}
    for n in range(N_TRANSPORTED):
        name, luck = sorted(streams)[n % len(streams)], random.Random(f"{seed} transport {n}")
        yield f"transported {name} {n}", partial(transported, streams[name], n, luck), "ts"
    for n in range(N_TIMELINES):
        yield f"timeline {n}", partial(timelines, streams, n, random.Random(f"{seed} timeline {n}")), "ts"
    for name, content, ending in (*bombs(), *playlists(N_PLAYLISTS, random.Random(f"{seed} playlists"))):
        yield name, partial(bytes, content), ending


def sample_of(seed: int, count: int) -> list[Case]:
    """A sample of every kind, and the cases that failed in the past."""
    everything = list(cases(seed))
    if count >= len(everything):
        return everything
    return random.Random(seed).sample(everything, count) + [case for case in cases(0) if case[0] in REGRESSIONS]


def run(chosen: list[Case]) -> dict[str, Any]:
    """Decodes them all; `failures` counts hangs, unexpected errors and exceeded memory limits."""
    verdicts: Counter[str] = Counter()
    worst: dict[str, Any] = {"rss_mb": 0, "case_s": 0.0}
    names: list[str] = []
    for start in range(0, len(chosen), BATCH):
        batch = chosen[start : start + BATCH]
        while batch:
            done, rss_mb = _decode(batch)
            for (name, _, _), (verdict, took_s) in zip(batch, done, strict=False):
                verdicts[verdict] += 1
                worst["case_s"] = max(worst["case_s"], took_s)
                if verdict == "failed":
                    names.append(name)
            worst["rss_mb"] = max(worst["rss_mb"], rss_mb)
            if rss_mb > MOST_RSS_MB:
                names.append(f"{batch[0][0]} and on: {rss_mb} MB")
            if len(done) < len(batch):  # the next case killed the process
                verdict = _alone(batch[len(done)])
                verdicts[verdict] += 1
                if verdict == "hung":
                    names.append(batch[len(done)][0])
            batch = batch[len(done) + 1 :]
    return {"cases": len(chosen), **verdicts, "failures": len(names), "failed_cases": names[:20], **worst}


def mode_of(name: str) -> tuple[Mode, bool]:
    """The decoding mode of a case, and whether it is decoded as live; fixed for each case."""
    modes: tuple[tuple[Mode, bool], ...] = (("exact", False), ("economy", False), ("auto", True))
    return modes[zlib.crc32(name.encode()) % len(modes)]


def _decode(batch: list[Case]) -> tuple[list[tuple[str, float]], int]:
    """Verdict and seconds of each case until the process died, and its memory in MB."""
    with tempfile.TemporaryDirectory() as folder:
        requests = []
        for n, (name, make, ending) in enumerate(batch):
            path, (mode, live) = Path(folder) / f"{n}.{ending}", mode_of(name)
            path.write_bytes(make())
            requests.append({"url": f"file://{path}" if live else str(path), "mode": mode, "live": live})
        command = [sys.executable, "-m", "tests.chaos.corpus_worker", str(ALARM_S)]
        root = Path(__file__).parents[2]
        process = subprocess.run(command, input=json.dumps(requests), capture_output=True, text=True, cwd=root)
    answers = [json.loads(line) for line in process.stdout.splitlines()]
    return [(one["verdict"], one["took_s"]) for one in answers], max((one["rss_mb"] for one in answers), default=0)


def _alone(case: Case) -> str:
    """The verdict of a real child on a case that killed a shared process."""
    from reference_db.errors import MediaError
    from reference_db.media.decoding import DecodingChild

    with tempfile.TemporaryDirectory() as folder:
        path, (mode, live) = Path(folder) / f"case.{case[2]}", mode_of(case[0])
        path.write_bytes(case[1]())
        url = f"file://{path}" if live else str(path)
        with DecodingChild(url, mode=mode, live=live, no_progress_s=ALARM_S) as child:
            try:
                list(child.frames())
            except MediaError:
                return {"crashed": "child died", "stalled": "hung"}.get(child.failure or "", "refused")
    return "decoded"
