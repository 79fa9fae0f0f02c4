"""Live channels on loopback: MPEG-TS files served in a loop over HTTP in real time, each channel at an offset."""

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
MAX_KEY_S = 1.7  # a video with key frames further apart is re-encoded


@dataclass(frozen=True, slots=True)
class Recording:
    """A transport stream and when its bytes are due: piece k starts at byte at[k] and is sent at dts_s[k]."""

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
    """The video looped to a transport stream of at least this length; re-encoded only if key frames are too rare."""
    ffmpeg = shutil.which("ffmpeg")
    if ffmpeg is None:
        raise SystemExit("bench: this needs ffmpeg; on Debian: apt-get install ffmpeg")
    loop, looped = folder / f"{video.stem}-loop.ts", folder / f"{video.stem}-looped.ts"
    with av.open(str(video)) as container:
        stream = container.streams.video[0]
        fps, codec = float(stream.average_rate or 25), stream.codec_context.name
        keys = [float(p.pts * p.time_base) for p in container.demux(stream) if p.is_keyframe and p.pts is not None]
    has_dense_keys = codec == "h264" and len(keys) > 1 and max(b - a for a, b in pairwise(keys)) <= MAX_KEY_S
    reencode = ["-c:v", "libx264", "-preset", "veryfast", "-g", str(round(KEY_EVERY_S * fps)), "-sc_threshold", "0"]
    quiet = [ffmpeg, "-v", "error", "-nostdin", "-y"]
    subprocess.run(
        [*quiet, "-i", video, *(["-c", "copy"] if has_dense_keys else reencode), "-an", "-f", "mpegts", loop],
        check=True,
    )
    repeat = ["-stream_loop", "-1", "-t", f"{length_s:.0f}"]
    subprocess.run([*quiet, *repeat, "-i", loop, "-c", "copy", "-f", "mpegts", looped], check=True)
    return looped


class LiveChannels:
    """Serves one recording per channel, each from another offset, until `stop`; runs in its own thread."""

    def __init__(self, recordings: Sequence[Recording], apart_s: float) -> None:
        self._recordings = recordings
        self._apart_s = apart_s
        self._clients: list[set[asyncio.StreamWriter]] = [set() for _ in recordings]
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._start_at = 0.0
        self.port = 0
        self._thread = threading.Thread(target=self._run, name="live-channels", daemon=True)
        self._thread.start()
        self._ready.wait()

    def url(self, channel: int) -> str:
        return f"http://127.0.0.1:{self.port}/{channel}.ts"

    def sent_at(self, channel: int, stream_s: float) -> float:
        """When (time.time) the first bytes beyond this stream second of the channel were sent."""
        dts_s = self._recordings[channel].dts_s
        return self._start_at + dts_s[bisect.bisect_right(dts_s, stream_s)] - self._offset_s(channel)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _offset_s(self, channel: int) -> float:
        return self._recordings[channel].dts_s[0] + channel * self._apart_s

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._start_at = time.time()
        senders = [self._loop.create_task(self._send(channel)) for channel in range(len(self._clients))]
        self._ready.set()
        self._loop.run_forever()
        for task in senders:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*senders, return_exceptions=True))
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        channel = int(request.split()[1].strip(b"/").removesuffix(b".ts"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: video/mp2t\r\nConnection: close\r\n\r\n")
        self._clients[channel].add(writer)

    async def _send(self, channel: int) -> None:
        recording, offset_s = self._recordings[channel], self._offset_s(channel)
        for k in range(bisect.bisect_left(recording.dts_s, offset_s), len(recording.at)):
            wait_s = self._start_at + recording.dts_s[k] - offset_s - time.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            for writer in list(self._clients[channel]):
                if writer.is_closing():
                    self._clients[channel].discard(writer)
                else:
                    writer.write(recording.piece(k))
        for writer in self._clients[channel]:
            writer.close()
