"""One open video's way from packets to pictures: the part of the decoding child that chooses what to hand over.

In goes a container that PyAV has opened, out come records: pictures, one per second, in the mode that was asked for.
`exact` decodes everything; `economy` decodes key pictures only and holds each until the next; `auto` is exact until key
pictures have come often enough for long enough, and turns back when they stop.
"""

import struct
import time
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NoReturn, TypeAlias, TypeGuard

import av
from av.error import FFmpegError
from av.stream import Disposition
from av.video.reformatter import Interpolation, VideoReformatter

from reference_db.media.frames import (
    JUMP_BACK_S,
    MAX_LONG_SIDE,
    MAX_PIXELS,
    PICTURE_SHORT_SIDE,
    HeldOneFps,
    Mode,
    OneFps,
    VideoInfo,
)

EARLY_PACKETS = 4  # of a live stream that may come without a time before one has it; if more do, it has none at all
BAD_PACKETS_IN_A_ROW = 8  # one bad packet is skipped, so many are a bad stream
KEY_EVERY_S = 2.1  # economy needs key pictures this often: 2 s, and 60 pictures at 29.97
STEADY_S = 10.0  # and for so long, before `auto` trusts them

RECORD = struct.Struct("<cI")  # kind, length of what follows
PICTURE = struct.Struct("<qddHH")  # second, pts_s, age_s, height, width; then the pixels
KEY = struct.Struct("<dI")  # pts_s of a key picture, pictures that came out damaged so far


class Refused(Exception):
    """What is wrong, as a kind and a sentence."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)


class _Clock:
    """Ticks of the stream to seconds: as they are when live, else counted from the file's first picture.

    A file whose clock jumps back (two recordings in one) goes on where it was.
    """

    def __init__(self, live: bool, time_base: Fraction, fps: float) -> None:
        self._live, self._step_s = live, 1 / fps
        self._numerator, self._denominator = time_base.numerator, time_base.denominator  # a Fraction is slow
        self._origin = 0 if live else None
        self._shift_s = 0.0
        self._last_s: float | None = None

    def of_picture(self, ticks: int | None) -> float:
        if ticks is None:  # a raw stream has no times, only an order
            time_s = 0.0 if self._last_s is None else self._last_s + self._step_s
        else:
            if self._origin is None:
                self._origin = ticks
            time_s = self.of_packet(ticks)
            if not self._live and self._last_s is not None and time_s < self._last_s - JUMP_BACK_S:
                self._shift_s += self._last_s + self._step_s - time_s
                time_s = self._last_s + self._step_s
        self._last_s = time_s
        return time_s

    def of_packet(self, ticks: int) -> float:
        return (ticks - (self._origin or 0)) * self._numerator / self._denominator + self._shift_s


class _KeyPace:
    """Tells whether key pictures have been coming often enough, for long enough, to do without the others."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._steady_from_s = 0.0

    def push(self, key_s: float) -> None:
        if self._last_s is None or not 0 <= key_s - self._last_s <= KEY_EVERY_S:
            self._steady_from_s = key_s
        self._last_s = key_s

    def is_steady(self) -> bool:
        return self._last_s is not None and self._last_s - self._steady_from_s >= STEADY_S


Pick: TypeAlias = tuple[int, float, av.VideoFrame, bool]  # second, pts_s, picture, held


class Sampling:
    """One open video's way from packets to records."""

    def __init__(
        self, container: av.container.InputContainer, name: str, live: bool, mode: Mode, no_video_s: float
    ) -> None:
        stream = container.streams.best("video")
        if not isinstance(stream, av.VideoStream) or stream.disposition & Disposition.attached_pic:
            raise Refused("no_video", f"{name} has no video, only sound or data.")
        if stream.codec_context is None:
            raise Refused("unreadable", f"{name} has a video that no decoder here can read.")
        self._container, self._stream, self._name = container, stream, name
        self._decoder = stream.codec_context
        self._decoder.thread_count = 1
        self._decoder.thread_type = "NONE"
        self._decoder.options = {"max_pixels": str(MAX_PIXELS), "skip_loop_filter": "all"}
        if stream.codec_tag == "encv":
            self._refuse_encrypted()
        rate = stream.average_rate or stream.guessed_rate
        self._fps = float(rate) if rate else None
        self._time_base = stream.time_base or Fraction(1, 90_000)
        self._clock = _Clock(live, self._time_base, self._fps or 25.0)
        self._live, self._mode, self._no_video_s = live, mode, no_video_s
        self._economy = mode == "economy"
        self._pace = _KeyPace()
        self._one_fps: OneFps[av.VideoFrame] = OneFps()
        self._held: HeldOneFps[av.VideoFrame] = HeldOneFps()
        self._scaler, self._packer = VideoReformatter(), VideoReformatter()  # one of each, since they keep their tables
        self._last_second: int | None = None
        self._end_ticks: int | None = None  # of the last packet
        self._n_bad = 0
        self._n_damaged = 0
        self._seen = False

    @property
    def has_begun(self) -> bool:
        """Whether a picture was decoded."""
        return self._seen

    def info(self) -> VideoInfo:
        duration_s = None
        if self._stream.duration is not None:
            duration_s = float(self._stream.duration * self._time_base)
        elif self._container.duration is not None:
            duration_s = self._container.duration / av.time_base
        decoder = self._decoder
        return VideoInfo(
            duration_s, decoder.width, decoder.height, decoder.name, self._fps, self._container.format.name
        )

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        error: FFmpegError | None = None
        try:
            for packet in self._timed(self._packets()):
                if self._is_uneventful(packet):
                    continue
                if self._live and packet.is_keyframe and packet.pts is not None:
                    yield b"K", KEY.pack(self._clock.of_packet(packet.pts), self._n_damaged)
                yield from self._numbered(self._picks(packet))
        except FFmpegError as caught:
            error = caught  # what was read before it still counts
        yield from self._numbered(self._last_picks())
        if error is not None:
            raise error
        if not self._seen:
            limit = "pictures beyond 8192x4352 are not read"
            raise Refused("unreadable", f"{self._name} holds no picture that can be decoded; {limit}.")

    def _packets(self) -> "Iterator[av.Packet[av.VideoStream]]":
        """The packets of the video; live, sound is listened to as well, since it may go on alone."""
        sound = self._container.streams.audio[:1] if self._live else ()
        last_at, is_new = time.monotonic(), False
        for packet in _to_the_end(self._container.demux(self._stream, *sound)):
            if _is_video(packet):
                is_new = True
                if packet.size:  # the last one is empty
                    yield packet
            elif is_new:
                last_at, is_new = time.monotonic(), False
            elif time.monotonic() - last_at > self._no_video_s:
                raise Refused("no_video", f"{self._name} has sound but no pictures any more.")

    def _timed(self, packets: "Iterator[av.Packet[av.VideoStream]]") -> "Iterator[av.Packet[av.VideoStream]]":
        """The packets; live, those at the front that came before their clock was known (RTSP) count back from the next.

        A connection that ends before it was known has shown nothing: nobody can tell when that was on air. A file's
        time begins with its first picture, whatever that is.
        """
        early: list[av.Packet[av.VideoStream]] = []
        if self._live:
            for packet in packets:
                early.append(packet)
                if packet.pts is not None or len(early) > EARLY_PACKETS:
                    break
            else:
                return
        if early and (known := early[-1].pts) is not None:
            step = max(1, round(1 / ((self._fps or 25.0) * self._time_base)))
            for n, packet in enumerate(reversed(early)):
                packet.pts = known - n * step
        yield from early
        yield from packets

    def _is_uneventful(self, packet: "av.Packet[av.VideoStream]") -> bool:
        """Whether there is nothing to do for this packet, as for most in economy: no key, and it settles no second."""
        if not self._economy or packet.is_keyframe or packet.pts is None or not self._seen:
            return False
        self._end_ticks = packet.pts
        return not self._held.settles(self._clock.of_packet(packet.pts if packet.dts is None else packet.dts))

    def _numbered(self, picks: Iterator[Pick]) -> Iterator[tuple[bytes, bytes]]:
        """The records of the picks, each second once."""
        for second, pts_s, picture, held in picks:
            if self._last_second is None or not self._last_second - JUMP_BACK_S <= second <= self._last_second:
                self._last_second = second
                age_s = round(second + 0.5 - pts_s, 3) if self._economy else 0.0  # no switch before its picks are out
                times = second, pts_s, age_s
                yield (b"H", PICTURE.pack(*times, 0, 0)) if held else self._record(times, picture)

    def _picks(self, packet: "av.Packet[av.VideoStream]") -> Iterator[Pick]:
        if packet.has_sidedata("encryption_info"):
            self._refuse_encrypted()
        if packet.pts is None:
            self._economy = False  # without times there is nothing to hold a picture for
        elif packet.is_keyframe:
            yield from self._switch(packet.pts)
        if not self._economy:
            yield from self._pushed(self._decoded(packet))
            return
        if packet.is_keyframe:
            for picture in self._decoded(packet) + self._drained():
                yield from self._held.push(self._clock.of_picture(picture.pts), picture)
        if packet.pts is not None and self._seen:
            self._end_ticks = packet.pts
            yield from self._held.reach(self._clock.of_packet(packet.pts if packet.dts is None else packet.dts))

    def _last_picks(self) -> Iterator[Pick]:
        if self._economy:
            yield from self._held.finish(0.0 if self._end_ticks is None else self._clock.of_packet(self._end_ticks))
        else:
            yield from self._pushed(self._drained())
            yield from ((*pick, False) for pick in self._one_fps.finish())

    def _switch(self, key_pts: int) -> Iterator[Pick]:
        """Turns `auto` to economy or back; only a key picture can be decoded without those before it."""
        if self._mode != "auto":
            return
        self._pace.push(float(key_pts * self._time_base))
        if self._pace.is_steady() and not self._economy:
            yield from self._last_picks()
            self._economy, self._held = True, HeldOneFps()
        elif self._economy and not self._pace.is_steady():
            yield from self._held.reach(self._clock.of_packet(key_pts))
            self._economy, self._one_fps = False, OneFps()

    def _pushed(self, pictures: list[av.VideoFrame]) -> Iterator[Pick]:
        for picture in pictures:
            for pick in self._one_fps.push(self._clock.of_picture(picture.pts), picture):
                yield (*pick, False)

    def _decoded(self, packet: "av.Packet[av.VideoStream]") -> list[av.VideoFrame]:
        try:
            pictures = packet.decode()
        except FFmpegError as error:
            self._n_bad += self._seen  # before the first key picture all are bad
            self._n_damaged += self._seen
            if self._n_bad >= BAD_PACKETS_IN_A_ROW:
                raise Refused("unreadable", f"{self._name} has too many damaged pictures in a row.") from error
            return []
        if pictures:
            self._seen, self._n_bad = True, 0
            self._n_damaged += sum(picture.is_corrupt for picture in pictures)
        return pictures

    def _drained(self) -> list[av.VideoFrame]:
        """The pictures that the decoder keeps back for reordering; it then starts anew."""
        try:
            pictures = self._decoder.decode(None)
        except FFmpegError:
            pictures = []
        self._decoder.flush_buffers()
        self._seen = self._seen or bool(pictures)
        return pictures

    def _record(self, times: tuple[int, float, float], picture: av.VideoFrame) -> tuple[bytes, bytes]:
        ratio = self._stream.sample_aspect_ratio or Fraction(1)
        width, height = picture.width * float(ratio), float(picture.height)
        scale = PICTURE_SHORT_SIDE / min(width, height)
        planes = self._scaler.reformat(
            picture,
            width=min(MAX_LONG_SIDE, max(PICTURE_SHORT_SIDE, round(width * scale))),
            height=min(MAX_LONG_SIDE, max(PICTURE_SHORT_SIDE, round(height * scale))),
            format="gbrp",  # scaled to packed pixels at once, the same picture takes twice as long
            interpolation=Interpolation.AREA,
            threads=1,
        )
        small = self._packer.reformat(planes, format="rgb24", threads=1)
        if turns := round(picture.rotation / 90) % 4:
            import numpy as np  # seldom needed, and dear to import

            upright = np.rot90(small.to_ndarray(), turns)
            return b"P", PICTURE.pack(*times, *upright.shape[:2]) + upright.tobytes()
        return b"P", PICTURE.pack(*times, small.height, small.width) + _pixels(small)

    def _refuse_encrypted(self) -> NoReturn:
        raise Refused("unreadable", f"{self._name} is encrypted; register a copy without protection.")


def _pixels(picture: av.VideoFrame) -> bytes:
    """The rows of an RGB picture without the padding behind each."""
    plane, row = picture.planes[0], 3 * picture.width
    padded = memoryview(plane)
    if plane.line_size == row:
        return bytes(padded[: row * picture.height])
    return b"".join(padded[at : at + row] for at in range(0, picture.height * plane.line_size, plane.line_size))


def _to_the_end(packets: "Iterator[av.Packet[Any]]") -> "Iterator[av.Packet[Any]]":
    """The packets; where streams came up after the opening, PyAV trips over them at the end."""
    try:
        yield from packets
    except IndexError:
        return


def _is_video(packet: "av.Packet[Any]") -> "TypeGuard[av.Packet[av.VideoStream]]":
    return isinstance(packet.stream, av.VideoStream)
