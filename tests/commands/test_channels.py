"""`copywatch channels`: comments of the file survive, a running monitor applies it, and no credentials are printed."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

import pytest
from PIL import Image

from monitor.config.config_file import add_channel, remove_channel
from monitor.config.settings import ChannelSettings, load_settings
from monitor.web.auth.tokens import Tokens
from tests.support.command import copywatch
from tests.support.live_stream import LivePlaylist, LiveStream, WebServer, serve_stream
from tests.support.running_source import LENGTH_S, WAIT_S, write_stream_clip
from tests.support.serve_process import ServeProcess, wait_until
from tests.support.web_only import WebAppServer

COMMENTED = """\
# our channels
data_dir: data            # beside this file

channels:
  # the first
  - name: five            # a name
    url: "http://u:s3cret@10.0.0.5/five.m3u8"   # quoted
  - {name: six, url: 'udp://239.0.0.1:1234', mode: exact}

# where to
alerting:
  min_confidence: 0.25
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "copywatch.yaml"
    path.write_text(COMMENTED)
    path.chmod(0o640)
    return path


def test_adding_and_removing_a_channel_changes_nothing_else_in_the_file(config: Path) -> None:
    added = copywatch("channels", "add", "seven", "-", "--config", str(config), stdin="rtsp://u:s3cret@cam/7\n")
    assert (added.returncode, added.stdout) == (0, "added: seven (rtsp://cam)\n")
    written = config.read_text()
    six = "  - {name: six, url: 'udp://239.0.0.1:1234', mode: exact}\n"
    assert written == COMMENTED.replace(six, six + "  - name: seven\n    url: 'rtsp://u:s3cret@cam/7'\n")
    assert config.stat().st_mode & 0o777 == 0o640
    listed = json.loads(copywatch("channels", "list", "--json", "--config", str(config)).stdout)
    assert [one["name"] for one in listed] == ["five", "six", "seven"]
    assert listed[2]["url"] == "rtsp://***@cam/7"
    assert copywatch("channels", "rm", "seven", "--config", str(config)).returncode == 0
    assert config.read_text() == COMMENTED


def test_a_private_host_is_named_as_such(config: Path) -> None:
    private = ("--private", "--config", str(config))
    assert copywatch("channels", "add", "cam", "rtsp://cam.lan/1", *private).returncode == 0
    assert "    url: 'rtsp://cam.lan/1'\n    private: true\n" in config.read_text()
    assert [one.private for one in load_settings(config).channels] == [False, False, True]


FORMS = [
    "",
    "data_dir: x",
    "channels:\n",
    "channels: []  # none yet\ndata_dir: x\n",
    "channels: null\n",
    "channels: [{name: a, url: udp://h:1}]\n",
    "channels: [{name: a, url: udp://h:1}, {name: b, url: udp://h:2}]  # two\n",
    "channels:\n- name: a\n  url: udp://h:1\n# end\n",
    "channels:\n  -\n    name: a\n    url: >-\n      udp://h:1\n\n"
    "  # of b\n  - url: udp://h:2\n    name: b\n    allow:\n    - h\nweb: {}\n",
    "channels:\n  - name: a\n    url: udp://h:1",
]


@pytest.mark.parametrize("text", FORMS)
@pytest.mark.parametrize("url", ["rtsp://u:p%40s@cam:554/1?a=b&c=d#e", "udp://h:3", "/media/a: b.ts"])
def test_channels_are_added_and_removed_in_every_form_of_file(text: str, url: str, tmp_path: Path) -> None:
    config = tmp_path / "copywatch.yaml"
    config.write_text(text)
    before = load_settings(config).channels
    new = ChannelSettings(name="new", url=url, mode="economy", allow=("10.0.0.0/8", "cdn"))
    add_channel(config, new)
    assert load_settings(config).channels == [*before, new]
    for n, channel in enumerate(before):
        remove_channel(config, channel.name)
        assert load_settings(config).channels == [*before[n + 1 :], new]
    remove_channel(config, "new")
    assert load_settings(config).channels == []
    assert ("# of b" in config.read_text()) == ("# of b" in text)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("add", "five", "http://h/x"), "channel five already exists"),
        (("add", "se ven", "http://h/x"), "name: expected letters, digits, dots"),
        (("add", "seven", "ftp://u:s3cret@h/x"), "starts with one of"),
        (("add", "seven", "srt://h:9000?passphrase=s3cret"), "ffmpeg -i 'srt://HOST:PORT' -c copy -f mpegts"),
        (("add", "seven", "http://h/x", "--mode", "fast"), "mode"),
        (("add", "seven", "example.org/live.m3u8"), "url: an address starts with one of"),
        (("add", "seven", "cam.local:8080/1"), "url: an address starts with one of"),
        (("add", "seven", "notaurl"), "and there is no such file"),
        (("rm", "nine"), "there is no channel nine"),
        (("test", "nine"), "there is no channel nine"),
    ],
)
def test_an_invalid_change_is_reported_and_leaves_the_file_alone(
    config: Path, arguments: tuple[str, ...], error: str
) -> None:
    done = copywatch("channels", *arguments, "--config", str(config))
    assert done.returncode == 3
    assert error in done.stderr
    assert "s3cret" not in done.stderr + done.stdout
    assert config.read_text() == COMMENTED
    assert {path.name for path in config.parent.iterdir()} <= {"copywatch.yaml", "data"}  # with the audit log


def test_a_missing_file_is_created_for_its_owner_only(tmp_path: Path) -> None:
    config = tmp_path / "new.yaml"
    assert copywatch("channels", "add", "one", "http://h/x", "--config", str(config)).returncode == 0
    assert config.stat().st_mode & 0o777 == 0o600
    assert copywatch("config", "check", "--config", str(config)).returncode == 0


@pytest.mark.slow
def test_testing_a_channel_describes_it_and_saves_a_picture(tmp_path: Path) -> None:
    playlist = LivePlaylist(LiveStream(write_stream_clip(tmp_path / "air.ts"), LENGTH_S))
    time.sleep(4)  # until there is a segment
    with WebServer(playlist.answer) as web:
        url = f"http://u:s3cret@127.0.0.1:{web.port}/live.m3u8"
        options = ("--seconds", "4", "--json", "--thumbnail", "first picture")
        done = copywatch("channels", "test", "-", *options, stdin=url, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["codec"], found["size"], found["container"]) == ("h264", "160x90", "hls")
    assert found["fps"] == pytest.approx(5, abs=0.5)
    assert found["key_frame_every_s"] == pytest.approx(1.0, abs=0.1)
    assert found["lag_s"] >= 0
    assert Image.open(tmp_path / found["thumbnail"]).size == Image.open(tmp_path / "first picture").size == (341, 192)
    assert "s3cret" not in done.stdout + done.stderr


def test_testing_an_unreachable_channel_exits_with_4(tmp_path: Path) -> None:
    done = copywatch("channels", "test", "http://u:s3cret@127.0.0.1:9/x?token=s3cret", cwd=tmp_path)
    assert done.returncode == 4
    assert "refuses the connection" in done.stderr
    assert "s3cret" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_running_monitor_applies_changes_of_the_file(tmp_path: Path) -> None:
    config = tmp_path / "copywatch.yaml"
    with serve_stream(LiveStream(write_stream_clip(tmp_path / "air.ts"), LENGTH_S)) as web:
        url = f"http://u:s3cret@127.0.0.1:{web.port}/x.ts"
        config.write_text(f"data_dir: data\nweb: {{port: 0}}\nchannels:\n  - {{name: one, url: '{url}'}}\n")
        with ServeProcess(config) as serving:
            wait_for(serving, 'copywatch_channel_state{channel="one",state="up"} 1.0')
            assert copywatch("channels", "add", "two", url, "--config", str(config)).returncode == 0
            wait_for(serving, 'copywatch_channel_state{channel="two",state="up"} 1.0')
            command_lines = process_command_lines()
            assert any("reference_db.media.decoder" in line for line in command_lines)
            assert not any("s3cret" in line for line in command_lines)
            wait_for(serving, 'copywatch_frames_processed_total{channel="two"}')
            assert serving.get("/api/v1/channels/two/thumbnail")[0] == 200
            assert copywatch("channels", "rm", "two", "--config", str(config)).returncode == 0
            wait_for(serving, 'channel="two"', there=False)
            assert copywatch("channels", "add", "two", "http://127.0.0.1:9/x", "--config", str(config)).returncode == 0
            wait_for(serving, 'copywatch_channel_state{channel="two",state="starting"} 0.0')
            assert serving.get("/api/v1/channels/two/thumbnail")[0] == 404  # the old picture is not shown
            assert copywatch("channels", "rm", "two", "--config", str(config)).returncode == 0
            wait_for(serving, 'channel="two"', there=False)
            config.write_text("channels: [wrong\n")  # an invalid file changes nothing
            serving.wait_for("channels unchanged")
            metrics = serving.get("/metrics")[1]
            assert 'copywatch_channel_state{channel="one",state="up"} 1.0' in metrics
            assert 'copywatch_gap_seconds_total{channel="one"}' not in metrics
            assert 'copywatch_reconnects_total{channel="one"' not in metrics
            serving.process.terminate()
            assert serving.process.wait(timeout=WAIT_S) == 0
    assert "s3cret" not in "".join(serving.log) + metrics


def test_the_list_has_the_states_of_a_running_serve_without_a_token(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    Tokens(tmp_path / "data").add("ada", "admin")  # the REST API is closed to callers without one
    config = tmp_path / "copywatch.yaml"
    with WebAppServer(tmp_path / "data") as server:
        server.context.metrics.channels.of("five").enter("stalled", "http://10.0.0.5 closed the connection", "lost")
        server.context.metrics.channels.of("other").enter("up")
        config.write_text(COMMENTED + f"web: {{port: {server.port}}}\n")
        listed = json.loads(copywatch("channels", "list", "--json", "--config", str(config)).stdout)
        assert [(one["name"], one["state"]) for one in listed] == [("five", "stalled"), ("six", None)]
        assert [one["reason"] for one in listed] == ["http://10.0.0.5 closed the connection", None]
        assert "http://10.0.0.5 closed" in copywatch("channels", "list", "--config", str(config)).stdout
    listed = json.loads(copywatch("channels", "list", "--json", "--config", str(config)).stdout)
    assert [(one["name"], one["state"]) for one in listed] == [("five", None), ("six", None)]  # it has stopped


def process_command_lines() -> list[str]:
    """The arguments of every process of this machine."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # the process has ended meanwhile
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return lines


def wait_for(serving: ServeProcess, line: str, *, there: bool = True) -> None:
    wait_until(lambda: (line in serving.get("/metrics")[1]) == there, lambda: serving.get("/metrics")[1])
