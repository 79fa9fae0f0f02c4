"""Paced live channels on loopback: MPEG-TS files, aired in a loop over HTTP, each channel at another place."""

from __future__ import annotations

import asyncio
import bisect
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import av

KEY_EVERY_S = 1.6
MAX_KEY_S = 1.7  # key pictures further apart are made anew


@dataclass(frozen=True, slots=True)
class Recording:
    """A transport stream and when its bytes are due: piece k begins at byte at[k] and is sent at dts_s[k]."""

    content: bytes
    at: list[int]
    dts_s: list[float]

    @classmethod
    def of(cls, path: Path) -> Recording:
        at, dts_s = [], []
        with av.open(str(path)) as container:
            for packet in container.demux(container.streams.video[0]):
                if packet.pos is not None and packet.dts is not None and packet.time_base is not None:
                    at.append(packet.pos)
                    dts_s.append(float(packet.dts * packet.time_base))
        return cls(path.read_bytes(), at, dts_s)

    def piece(self, k: int) -> bytes:
        return self.content[self.at[k] : self.at[k + 1] if k + 1 < len(self.at) else None]


def prepare(video: Path, length_s: float, folder: Path) -> Path:
    """The video as a transport stream of at least this length: looped, and as it is where its key pictures are near."""
    ffmpeg = shutil.which("ffmpeg")
    if ffmpeg is None:
        raise SystemExit("bench: this needs ffmpeg; on Debian: apt-get install ffmpeg")
    loop, air = folder / f"{video.stem}-loop.ts", folder / f"{video.stem}-air.ts"
    with av.open(str(video)) as container:
        stream = container.streams.video[0]
        fps, codec = float(stream.average_rate or 25), stream.codec_context.name
        keys = [float(p.pts * p.time_base) for p in container.demux(stream) if p.is_keyframe and p.pts is not None]
    near = codec == "h264" and len(keys) > 1 and max(b - a for a, b in pairwise(keys)) <= MAX_KEY_S
    anew = ["-c:v", "libx264", "-preset", "veryfast", "-g", str(round(KEY_EVERY_S * fps)), "-sc_threshold", "0"]
    quiet = [ffmpeg, "-v", "error", "-nostdin", "-y"]
    subprocess.run([*quiet, "-i", video, *(["-c", "copy"] if near else anew), "-an", "-f", "mpegts", loop], check=True)
    again = ["-stream_loop", "-1", "-t", f"{length_s:.0f}"]
    subprocess.run([*quiet, *again, "-i", loop, "-c", "copy", "-f", "mpegts", air], check=True)
    return air


class Air:
    """Channels that air a recording each, each from another second on, until `stop`; run in a thread of its own."""

    def __init__(self, recordings: Sequence[Recording], apart_s: float) -> None:
        self._recordings = recordings
        self._apart_s = apart_s
        self._clients: list[set[asyncio.StreamWriter]] = [set() for _ in recordings]
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._began = 0.0
        self.port = 0
        self._thread = threading.Thread(target=self._run, name="air", daemon=True)
        self._thread.start()
        self._ready.wait()

    def url(self, channel: int) -> str:
        return f"http://127.0.0.1:{self.port}/{channel}.ts"

    def sent_at(self, channel: int, stream_s: float) -> float:
        """When (time.time) the first bytes of this channel beyond this second of its own clock went out."""
        dts_s = self._recordings[channel].dts_s
        return self._began + dts_s[bisect.bisect_right(dts_s, stream_s)] - self._offset_s(channel)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _offset_s(self, channel: int) -> float:
        return self._recordings[channel].dts_s[0] + channel * self._apart_s

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._began = time.time()
        airing = [self._loop.create_task(self._air(channel)) for channel in range(len(self._clients))]
        self._ready.set()
        self._loop.run_forever()
        for task in airing:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*airing, return_exceptions=True))
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        channel = int(request.split()[1].strip(b"/").removesuffix(b".ts"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: video/mp2t\r\nConnection: close\r\n\r\n")
        self._clients[channel].add(writer)

    async def _air(self, channel: int) -> None:
        recording, offset_s = self._recordings[channel], self._offset_s(channel)
        for k in range(bisect.bisect_left(recording.dts_s, offset_s), len(recording.at)):
            wait_s = self._began + recording.dts_s[k] - offset_s - time.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            for writer in list(self._clients[channel]):
                if writer.is_closing():
                    self._clients[channel].discard(writer)
                else:
                    writer.write(recording.piece(k))
        for writer in self._clients[channel]:
            writer.close()
