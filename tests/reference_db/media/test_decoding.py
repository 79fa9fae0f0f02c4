"""The decoding child: what it refuses, how it ends, and that nothing it does can hang or crash its parent."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from reference_db.errors import MediaError
from reference_db.media.addresses import display_name
from reference_db.media.decoding import DecodingChild, decode_file, probe
from tests.support.media import CENC, number_of, picture, write_clip, write_film, write_numbered, write_sound


def refusal(path: Path) -> str:
    with pytest.raises(MediaError) as caught:
        list(decode_file(path))
    message = str(caught.value)
    assert message.startswith(path.name)
    assert message.endswith(".")
    return message


def test_a_missing_file(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "missing.mp4")
    with pytest.raises(MediaError, match="does not exist"):
        probe(tmp_path / "missing.mp4")


def test_a_directory(tmp_path: Path) -> None:
    assert "is a directory" in refusal(tmp_path)


def test_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.mp4")
    assert "not a regular file" in refusal(tmp_path / "pipe.mp4")


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty.mp4").touch()
    assert "is empty" in refusal(tmp_path / "empty.mp4")


@pytest.mark.parametrize(
    "content", [b"just words\n" * 500, bytes(np.random.default_rng(1).bytes(50_000)), b"\0" * 9000]
)
def test_a_file_that_is_not_a_video(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "words.mp4").write_bytes(content)
    assert "not a video" in refusal(tmp_path / "words.mp4")


@pytest.mark.parametrize("name", ["sound.wav", "sound.m4a"])
def test_audio_without_video(tmp_path: Path, name: str) -> None:
    assert "has no video" in refusal(write_sound(tmp_path / name))


def test_an_encrypted_video(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "locked.mp4", [n / 10 for n in range(20)], options=CENC)
    assert "is encrypted" in refusal(path)


def test_pictures_too_large_to_decode(tmp_path: Path) -> None:
    huge = np.zeros((4096, 9000, 3), np.uint8)
    path = write_clip(tmp_path / "huge.mkv", [(0.0, huge), (0.1, huge)], codec="mjpeg", b_frames=0)
    assert "beyond 8192x4352" in refusal(path)


@pytest.mark.parametrize(
    "playlist",
    [
        "ffconcat version 1.0\nfile film.mp4\n",
        "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:2,\nfilm.mp4\n#EXT-X-ENDLIST\n",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 33\n",
    ],
)
def test_a_playlist_named_like_a_video_opens_nothing(tmp_path: Path, playlist: str) -> None:
    write_film(tmp_path / "film.mp4", 1, 2)
    (tmp_path / "disguised.mp4").write_text(playlist)
    assert "not a video" in refusal(tmp_path / "disguised.mp4")


def test_a_path_is_never_treated_as_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    film = write_film(tmp_path / "film.mp4", 1, 2)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MediaError, match="does not exist"):
        list(decode_file(Path(f"concat:{film.name}|{film.name}")))
    (tmp_path / "http:x%d.mp4").write_bytes(film.read_bytes())
    assert len(list(decode_file(Path("http:x%d.mp4")))) == 2


def test_a_file_name_that_is_not_utf_8(tmp_path: Path) -> None:
    film = write_film(tmp_path / "film.mp4", 1, 2)
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9\n.mp4"))
    film.rename(odd)
    assert len(list(decode_file(odd))) == 2


def test_damage_in_the_middle_loses_seconds_not_the_file(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "scratched.ts", [n / 10 for n in range(100)], gop=10)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2 // 188 * 188
    content[middle : middle + 188] = os.urandom(188)
    path.write_bytes(content)
    seconds = [frame.second for frame in decode_file(path)]
    assert seconds[0] == 0
    assert seconds[-1] == 9
    assert len(seconds) >= 8


def test_a_truncated_file_yields_its_readable_part(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "short.ts", [n / 10 for n in range(100)], gop=10)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    seconds = [frame.second for frame in decode_file(path)]
    assert seconds == list(range(len(seconds)))
    assert 3 <= len(seconds) <= 7


def test_the_child_imports_no_torch() -> None:
    code = (
        "import reference_db.media.decoder, reference_db.media.decoding_session\n"
        "import json, sys; print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = json.loads(done.stdout)
    assert "av" in modules
    assert not {"torch", "faiss", "monitor", "apsw", "numpy", "reference_db.media.http_relay"} & set(modules)


def test_a_killed_child_is_an_error(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "film.mp4", [n / 2 for n in range(120)])  # more than the pipe holds
    with DecodingChild(str(path)) as child:
        frames = child.frames()
        next(frames)
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(MediaError, match=r"film.mp4 died \(signal SIGKILL\)"):
            list(frames)
        assert child.failure == "crashed"


def test_a_reader_that_stops_early_leaves_no_process(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "film.mp4", [n / 2 for n in range(120)])
    with DecodingChild(str(path)) as child:
        assert next(child.frames()).second == 0
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_the_child_dies_with_its_parent() -> None:
    code = (
        "from reference_db.media.decoding import DecodingChild\n"
        "child = DecodingChild('udp://127.0.0.1:0', live=True)\n"
        "print(child.pid, flush=True)\n"
        "list(child.frames())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        handle = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    try:
        assert select.select([handle], [], [], 20)[0], "the child outlived its parent"
    finally:
        os.close(handle)


@contextmanager
def server(answer: "type[BaseHTTPRequestHandler]") -> Iterator[str]:
    """Serves on a free port of this host; yields host and port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), answer) as http:
        http.daemon_threads = True
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{http.server_address[1]}"
        finally:
            http.shutdown()
            thread.join()


class Quiet(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def test_live_frames_come_at_once_and_in_the_stream_s_own_time(tmp_path: Path) -> None:
    content = write_numbered(tmp_path / "live.ts", [100 + n / 10 for n in range(200)], gop=10).read_bytes()
    half = len(content) // 2 // 188 * 188
    release = threading.Event()

    class Stream(Quiet):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:half])
            release.wait(30)
            self.wfile.write(content[half:])

    with server(Stream) as host, DecodingChild(f"http://{host}/live.ts", live=True) as child:
        frames = child.frames()
        early = [next(frames) for _ in range(8)]
        release.set()
        rest = list(frames)
    assert [frame.second for frame in early + rest] == list(range(100, 120))
    assert [number_of(frame.picture) for frame in early + rest] == list(range(5, 205, 10))


def test_a_stream_opened_between_two_key_pictures_reports_its_size_later(tmp_path: Path) -> None:
    """A key picture every 8 s: opening does not wait for it, and decoding starts with it."""
    pictures = ((n / 10, picture(3, n / 10)) for n in range(160))
    seldom = {"x264-params": "keyint=80:min-keyint=80:scenecut=0"}
    content = write_clip(tmp_path / "live.ts", pictures, gop=80, b_frames=0, codec_options=seldom).read_bytes()
    joined = content[: 3 * 188] + content[len(content) // 8 // 188 * 188 :]  # the tables, then from second 2

    class Stream(Quiet):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(joined)

    with server(Stream) as host, DecodingChild(f"http://{host}/live.ts", live=True) as child:
        assert child.info().width == 0
        assert next(child.frames()).second == 8
        assert (child.info().width, child.info().height) == (320, 180)


@pytest.mark.parametrize(("n_pictures", "expected"), [(3, []), (50, [0, 1])])
def test_a_stream_that_ends_before_its_first_time_stamp_yields_nothing(
    n_pictures: int, expected: list[int], tmp_path: Path
) -> None:
    """A raw stream has no time stamps at all: its pictures are numbered once that is clear."""
    content = write_numbered(tmp_path / "a.h264", [n / 25 for n in range(n_pictures)], b_frames=0, fps=25).read_bytes()

    class Stream(Quiet):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

    seconds = []
    with server(Stream) as host, DecodingChild(f"http://{host}/a.h264", live=True) as child:
        try:
            seconds += [frame.second for frame in child.frames()]
        except MediaError:
            assert not expected
    assert seconds == expected


@pytest.mark.parametrize("trickle", [False, True])
def test_a_stream_without_pictures_times_out(trickle: bool) -> None:
    gone = threading.Event()

    class Stalled(Quiet):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            try:
                while trickle:
                    self.wfile.write(b"\x47")
                    if gone.wait(0.05):
                        return
            except OSError:
                return
            gone.wait(30)

    try:
        with (
            server(Stalled) as host,
            DecodingChild(f"http://u:secret@{host}/x?token=secret", live=True, opening_s=1.5) as child,
        ):
            with pytest.raises(MediaError, match=r"sent no picture for 1.5 s") as caught:
                list(child.frames())
            gone.set()
    finally:
        gone.set()
    assert "secret" not in str(caught.value)
    assert child.failure == "stalled"


@pytest.mark.parametrize(("status", "failure"), [(401, "denied"), (403, "denied"), (404, "missing"), (500, "failed")])
def test_a_server_that_refuses(status: int, failure: str) -> None:
    class Refusing(Quiet):
        def do_GET(self) -> None:
            self.send_error(status)

    with server(Refusing) as host, DecodingChild(f"http://u:secret@{host}/x?token=secret", live=True) as child:
        with pytest.raises(MediaError) as caught:
            list(child.frames())
        assert child.failure == failure
    assert "secret" not in str(caught.value)
    assert host in str(caught.value)


@pytest.mark.parametrize(
    "url", ["gopher://host/x", "concat:/etc/passwd", "subfile:,,:/etc/passwd", "film.mp4", "data:x"]
)
def test_other_schemes_are_refused(url: str) -> None:
    with DecodingChild(url, live=True) as child, pytest.raises(MediaError, match="address begins with one of"):
        list(child.frames())


def test_srt_is_refused_with_the_remedy() -> None:
    with (
        DecodingChild("srt://u:secret@host:1", live=True) as child,
        pytest.raises(MediaError, match="ffmpeg -i 'srt://HOST:PORT' -c copy -f mpegts"),
    ):
        list(child.frames())


def test_the_url_is_in_no_process_list() -> None:
    with DecodingChild("udp://127.0.0.1:0?secret", live=True) as child:
        assert b"secret" not in Path(f"/proc/{child.pid}/cmdline").read_bytes()
        assert b"secret" not in Path(f"/proc/{child.pid}/environ").read_bytes()


def test_kill_ends_a_waiting_reader_quietly() -> None:
    with DecodingChild("udp://127.0.0.1:0", live=True) as child:
        thread = threading.Timer(0, child.kill)
        thread.start()
        assert list(child.frames()) == []
        thread.join()


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("rtsp://user:pa%40ss@cam.example:554/live?token=x", "rtsp://cam.example:554"),
        ("rtmp://host/app/streamkey", "rtmp://host"),
        ("http://host:notaport/", "http://host:***"),
        ("/media/film.mp4", "film.mp4"),
        ("file:///media/film.mp4", "film.mp4"),
    ],
)
def test_display_names_contain_no_secret(url: str, name: str) -> None:
    assert display_name(url) == name
