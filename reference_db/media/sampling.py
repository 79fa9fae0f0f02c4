"""Sampling in the decoding child: the packets of one open video in, one picture per second out.

Input: a container that PyAV has opened. Output: records with the pictures of the requested mode. `exact` decodes
everything; `economy` decodes key pictures only and holds each until the next; `auto` is exact until key pictures have
come often enough for long enough, and exact again when they stop. With stills, which need `exact`, two larger pictures
of each second come besides: the first at or after its beginning, and the first at or after its middle.
"""

import math
import time
import zlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NoReturn, TypeAlias, TypeGuard

import av
from av.error import FFmpegError
from av.stream import Disposition
from av.video.reformatter import Interpolation, VideoReformatter

from reference_db.media.frames import (
    JUMP_BACK_S,
    KEY,
    MAX_LONG_SIDE,
    MAX_PIXELS,
    MAX_STILL_HEIGHT,
    PICTURE,
    PICTURE_SHORT_SIDE,
    STILL_WIDTH,
    STILLS_PER_S,
    HeldOneFps,
    Mode,
    OneFps,
    VideoInfo,
)

EARLY_PACKETS = 4  # packets at the start of a live stream that may lack a time stamp; if more do, it has none at all
BAD_PACKETS_IN_A_ROW = 8  # a bad packet is skipped; this many in a row make a bad stream
# The decoders that FFmpeg may use: those of broadcasts, streams, cameras and editing programs. It has 500; the others
# read formats of old games and single pictures, and are the least tested. Audio is only probed, never decoded.
VIDEO_CODECS = (
    *("h264", "hevc", "vvc", "av1", "libdav1d", "vp8", "vp9", "libvpx", "libvpx-vp9", "vp6", "vp6a", "vp6f", "theora"),
    *("mpeg1video", "mpeg2video", "mpegvideo", "mpeg4", "msmpeg4v1", "msmpeg4v2", "msmpeg4", "h263", "h263p", "h263i"),
    *("flv", "vc1", "wmv1", "wmv2", "wmv3", "rv10", "rv20", "rv30", "rv40", "svq1", "svq3", "mjpeg", "mjpegb"),
    *("jpeg2000", "dvvideo", "prores", "dnxhd", "cfhd", "ffv1", "ffvhuff", "huffyuv", "utvideo", "magicyuv", "hap"),
    *("rawvideo", "v210", "v308", "v408", "v410", "yuv4", "r210", "r10k", "qtrle", "gif", "png", "wrapped_avframe"),
)
AUDIO_CODECS = (
    *("aac", "aac_latm", "ac3", "eac3", "dca", "truehd", "mp1", "mp1float", "mp2", "mp2float", "mp3", "mp3float"),
    *("opus", "libopus", "vorbis", "flac", "alac", "wmav1", "wmav2", "wmapro", "s302m", "amrnb", "amrwb", "nellymoser"),
    *("pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_f32le", "pcm_u8", "pcm_alaw", "pcm_mulaw"),
    *("pcm_bluray", "pcm_dvd", "adpcm_ms", "adpcm_ima_wav", "adpcm_ima_qt", "speex", "cook"),
)
CODECS = ",".join((*VIDEO_CODECS, *AUDIO_CODECS))
KEY_EVERY_S = 2.1  # economy needs key pictures this often: 2 s, and 60 pictures at 29.97
STEADY_S = 10.0  # for this long, before `auto` relies on them


class MediaRefused(Exception):
    """A video that cannot be used: a kind and a sentence."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)


class _Clock:
    """Converts the stream's ticks to seconds: unchanged when live, else counted from the file's first picture.

    A file whose clock jumps back (two recordings in one) continues from its last picture.
    """

    def __init__(self, live: bool, time_base: Fraction, fps: float) -> None:
        self._live, self._step_s = live, 1 / fps
        self._numerator, self._denominator = time_base.numerator, time_base.denominator  # a Fraction is slow
        self._origin = 0 if live else None
        self._shift_s = 0.0
        self._last_s: float | None = None

    def of_picture(self, ticks: int | None) -> float:
        if ticks is None:  # a raw stream has no time stamps, only an order
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
    """Decides whether key pictures have come often enough, for long enough, to skip the others."""

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


class VideoSampler:
    """Samples one open video: packets in, records out."""

    def __init__(
        self,
        container: av.container.InputContainer,
        name: str,
        live: bool,
        mode: Mode,
        no_video_s: float,
        stills: bool = False,
        is_fresh: Callable[[], bool] = lambda: True,
    ) -> None:
        stream = container.streams.best("video")
        if not isinstance(stream, av.VideoStream) or stream.disposition & Disposition.attached_pic:
            raise MediaRefused("no_video", f"{name} has no video, only audio or data.")
        if stream.codec_context is None:
            raise MediaRefused("unreadable", f"{name} has a video that no decoder supports.")
        self._container, self._stream, self._name = container, stream, name
        self._is_fresh = is_fresh
        self._decoder = stream.codec_context
        if self._decoder.codec.name not in VIDEO_CODECS:
            raise MediaRefused("unreadable", f"{name} has a video in a format that is not supported.")
        self._decoder.thread_count = 1
        self._decoder.thread_type = "NONE"
        self._decoder.options = {
            "max_pixels": str(MAX_PIXELS),
            "skip_loop_filter": "all",
            "codec_whitelist": ",".join(VIDEO_CODECS),
        }
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
        self._small, self._large = _Scaler(), _Scaler()  # one for each size, since they cache their tables
        self._stills = stills
        self._last_still: int | None = None
        self._new_stills: list[tuple[int, float, av.VideoFrame]] = []  # number, pts_s, picture
        self._last_second: int | None = None
        self._end_ticks: int | None = None  # of the last packet
        self._n_bad = 0
        self._n_damaged = 0
        self._has_pictures = False

    @property
    def has_pictures(self) -> bool:
        """Whether a picture was decoded."""
        return self._has_pictures

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
                if self._can_skip(packet):
                    continue
                if self._live and packet.is_keyframe and packet.pts is not None:
                    key_s = self._clock.of_packet(packet.pts)
                    yield b"K", KEY.pack(self._n_damaged, key_s, _fingerprint(packet, packet.pts), self._is_fresh())
                yield from self._records_of(self._picks(packet))
        except FFmpegError as caught:
            error = caught  # the pictures before it still count
        yield from self._records_of(self._last_picks())
        if error is not None:
            raise error
        if not self._has_pictures:
            limit = "pictures beyond 8192x4352 are not decoded"
            raise MediaRefused("unreadable", f"{self._name} has no picture that can be decoded; {limit}.")

    def _packets(self) -> "Iterator[av.Packet[av.VideoStream]]":
        """The packets of the video; if live, also watches the audio, which may continue alone."""
        audio = self._container.streams.audio[:1] if self._live else ()
        last_at, is_new = time.monotonic(), False
        for packet in _until_end(self._container.demux(self._stream, *audio)):
            if _is_video(packet):
                is_new = True
                if packet.size:  # the last one is empty
                    yield packet
            elif is_new:
                last_at, is_new = time.monotonic(), False
            elif time.monotonic() - last_at > self._no_video_s:
                raise MediaRefused("no_video", f"{self._name} has audio but no pictures any more.")

    def _timed(self, packets: "Iterator[av.Packet[av.VideoStream]]") -> "Iterator[av.Packet[av.VideoStream]]":
        """The packets; if live, the first ones may lack a time stamp (RTSP) and get one that counts back from the next.

        A connection that ends before the first time stamp yields nothing: when it was on air is unknown. A file's time
        starts with its first picture, whatever that is.
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

    def _can_skip(self, packet: "av.Packet[av.VideoStream]") -> bool:
        """Whether nothing is to do for this packet, as for most in economy: not a key, and it completes no second."""
        if not self._economy or packet.is_keyframe or packet.pts is None or not self._has_pictures:
            return False
        self._end_ticks = packet.pts
        return not self._held.settles(self._clock.of_packet(packet.pts if packet.dts is None else packet.dts))

    def _records_of(self, picks: Iterator[Pick]) -> Iterator[tuple[bytes, bytes]]:
        """The records of the picks, one per second."""
        for second, pts_s, picture, held in picks:
            if self._last_second is None or not self._last_second - JUMP_BACK_S <= second <= self._last_second:
                self._last_second = second
                # `_economy` is still that of the pick: the mode switches only after its picks are out.
                age_s = round(second + 0.5 - pts_s, 3) if self._economy else 0.0
                times = second, pts_s, age_s
                yield (b"H", PICTURE.pack(*times, 0, 0)) if held else self._record(times, picture)
        for number, pts_s, picture in self._new_stills:
            yield self._still_record(number, pts_s, picture)
        self._new_stills.clear()

    def _picks(self, packet: "av.Packet[av.VideoStream]") -> Iterator[Pick]:
        if packet.has_sidedata("encryption_info"):
            self._refuse_encrypted()
        if packet.pts is None:
            self._economy = False  # a picture cannot be held without time stamps
        elif packet.is_keyframe:
            yield from self._switch(packet.pts)
        if not self._economy:
            yield from self._push(self._decode(packet))
            return
        if packet.is_keyframe:
            for picture in self._decode(packet) + self._drain():
                yield from self._held.push(self._clock.of_picture(picture.pts), picture)
        if packet.pts is not None and self._has_pictures:
            self._end_ticks = packet.pts
            yield from self._held.reach(self._clock.of_packet(packet.pts if packet.dts is None else packet.dts))

    def _last_picks(self) -> Iterator[Pick]:
        if self._economy:
            yield from self._held.finish(0.0 if self._end_ticks is None else self._clock.of_packet(self._end_ticks))
        else:
            yield from self._push(self._drain())
            yield from ((*pick, False) for pick in self._one_fps.finish())

    def _switch(self, key_pts: int) -> Iterator[Pick]:
        """Switches `auto` to economy or back; only a key picture can be decoded without those before it."""
        if self._mode != "auto":
            return
        self._pace.push(float(key_pts * self._time_base))
        if self._pace.is_steady() and not self._economy:
            yield from self._last_picks()
            self._economy, self._held = True, HeldOneFps()
        elif self._economy and not self._pace.is_steady():
            yield from self._held.reach(self._clock.of_packet(key_pts))
            self._economy, self._one_fps = False, OneFps()

    def _push(self, pictures: list[av.VideoFrame]) -> Iterator[Pick]:
        for picture in pictures:
            time_s = self._clock.of_picture(picture.pts)
            if self._stills:
                self._note_still(time_s, picture)
            for pick in self._one_fps.push(time_s, picture):
                yield (*pick, False)

    def _note_still(self, time_s: float, picture: av.VideoFrame) -> None:
        """Keeps the first picture of each half second."""
        number = math.floor(time_s * STILLS_PER_S)
        if self._last_still is None or number > self._last_still:
            self._last_still = number
            self._new_stills.append((number, time_s, picture))

    def _decode(self, packet: "av.Packet[av.VideoStream]") -> list[av.VideoFrame]:
        try:
            pictures = packet.decode()
        except FFmpegError as error:
            self._n_bad += self._has_pictures  # before the first key picture all are bad
            self._n_damaged += self._has_pictures
            if self._n_bad >= BAD_PACKETS_IN_A_ROW:
                raise MediaRefused("unreadable", f"{self._name} has too many damaged pictures in a row.") from error
            return []
        if pictures:
            self._has_pictures, self._n_bad = True, 0
            self._n_damaged += sum(picture.is_corrupt for picture in pictures)
        return pictures

    def _drain(self) -> list[av.VideoFrame]:
        """The pictures that the decoder holds back for reordering; then resets the decoder."""
        try:
            pictures = self._decoder.decode(None)
        except FFmpegError:
            pictures = []
        self._decoder.flush_buffers()
        self._has_pictures = self._has_pictures or bool(pictures)
        return pictures

    def _record(self, times: tuple[int, float, float], picture: av.VideoFrame) -> tuple[bytes, bytes]:
        width, height = self._shape(picture)
        scale = PICTURE_SHORT_SIDE / min(width, height)
        size = [min(MAX_LONG_SIDE, max(PICTURE_SHORT_SIDE, round(side * scale))) for side in (width, height)]
        scaled = self._small.scale(picture, *size)
        return b"P", PICTURE.pack(*times, *scaled[:2]) + scaled[2]

    def _still_record(self, number: int, pts_s: float, picture: av.VideoFrame) -> tuple[bytes, bytes]:
        width, height = self._shape(picture)
        shown = (height, width) if round(picture.rotation / 90) % 2 else (width, height)
        scale = min(1.0, STILL_WIDTH / shown[0], MAX_STILL_HEIGHT / shown[1])
        scaled = self._large.scale(picture, max(1, round(width * scale)), max(1, round(height * scale)))
        return b"T", PICTURE.pack(number, pts_s, 0.0, *scaled[:2]) + scaled[2]

    def _shape(self, picture: av.VideoFrame) -> tuple[float, float]:
        """Width and height in square pixels, before it is turned upright."""
        return picture.width * float(self._stream.sample_aspect_ratio or Fraction(1)), float(picture.height)

    def _refuse_encrypted(self) -> NoReturn:
        raise MediaRefused("unreadable", f"{self._name} is encrypted; use a copy without encryption.")


class _Scaler:
    """Scales pictures to one size and turns them upright."""

    def __init__(self) -> None:
        self._scaler, self._packer = VideoReformatter(), VideoReformatter()

    def scale(self, picture: av.VideoFrame, width: int, height: int) -> tuple[int, int, bytes]:
        """Height, width and RGB pixels of the upright picture; `width` and `height` are those before it is turned."""
        planes = self._scaler.reformat(
            picture,
            width=width,
            height=height,
            format="gbrp",  # scaling to packed pixels directly takes twice as long
            interpolation=Interpolation.AREA,
            threads=1,
        )
        packed = self._packer.reformat(planes, format="rgb24", threads=1)
        return rotate(packed.height, packed.width, _pixels(packed), round(picture.rotation / 90) % 4)


def _pixels(picture: av.VideoFrame) -> bytes:
    """The rows of an RGB picture without their padding."""
    plane, row = picture.planes[0], 3 * picture.width
    padded = memoryview(plane)
    if plane.line_size == row:
        return bytes(padded[: row * picture.height])
    return b"".join(padded[at : at + row] for at in range(0, picture.height * plane.line_size, plane.line_size))


def rotate(height: int, width: int, pixels: bytes, turns: int) -> tuple[int, int, bytes]:
    """An RGB picture turned by so many quarters against the clock: height, width, pixels."""
    for _ in range(turns):
        turned = bytearray(len(pixels))
        for colour in range(3):  # the last column becomes the first row
            plane = pixels[colour::3]
            turned[colour::3] = b"".join(plane[column::width] for column in reversed(range(width)))
        height, width, pixels = width, height, bytes(turned)
    return height, width, pixels


def _fingerprint(packet: "av.Packet[av.VideoStream]", ticks: int) -> int:
    """Time stamp and checksum of the bytes, 32 bits each; FFmpeg may add a wrap of 2^33 ticks to the time stamp."""
    return (ticks % (1 << 32)) << 32 | zlib.crc32(packet)


def _until_end(packets: "Iterator[av.Packet[Any]]") -> "Iterator[av.Packet[Any]]":
    """The packets; PyAV raises IndexError at the end if streams appeared after the opening."""
    try:
        yield from packets
    except IndexError:
        return


def _is_video(packet: "av.Packet[Any]") -> "TypeGuard[av.Packet[av.VideoStream]]":
    return isinstance(packet.stream, av.VideoStream)
