"""Settings: where each value comes from, and what is said when one is wrong."""

from pathlib import Path

import pytest

from monitor.config.settings import ChannelSettings, Settings, load_settings
from monitor.errors import ConfigError
from reference_db.media.addresses import redact_text, redact_url


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("COPYWATCH_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))


def written(tmp_path: Path, text: str) -> Path:
    config = tmp_path / "copywatch.yaml"
    config.write_text(text)
    return config


def complaint(config: Path | None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(config)
    return str(caught.value)


def test_defaults_need_no_file(tmp_path: Path) -> None:
    settings = load_settings()
    assert settings.data_dir == tmp_path / "share" / "copywatch"
    assert settings.channels == []
    assert (settings.matching.tau, settings.matching.sigma, settings.matching.gamma) == (0.3, 0.1, 100.0)
    assert (settings.web.host, settings.web.port) == ("127.0.0.1", 8080)


def test_without_a_data_folder_of_the_desktop_the_home_has_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_settings().data_dir == tmp_path / ".local/share/copywatch"


def test_the_file_is_read_and_its_paths_start_at_its_folder(tmp_path: Path) -> None:
    config = written(
        tmp_path,
        "data_dir: state\nencoder: /opt/sscd.onnx\nchannels:\n  - {name: five, url: 'udp://239.0.0.1:1234'}\n"
        "alerting:\n  output: ../alerts.jsonl\nweb:\nlogging:\n  level: debug\n",
    )
    settings = load_settings(config)
    assert settings.data_dir == tmp_path / "state"
    assert settings.encoder == Path("/opt/sscd.onnx")
    assert settings.channels == [ChannelSettings(name="five", url="udp://239.0.0.1:1234", mode="auto")]
    assert settings.alerting.output == tmp_path.parent / "alerts.jsonl"
    assert settings.web.port == 8080  # `web:` with nothing under it means its defaults
    assert settings.logging.level == "debug"


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    assert load_settings(written(tmp_path, "# nothing yet\n")) == load_settings()


def test_the_environment_wins_key_by_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = written(tmp_path, "data_dir: /a\nmatching: {tau: 0.5, sigma: 0.2}\n")
    monkeypatch.setenv("COPYWATCH_DATA_DIR", "/b")
    monkeypatch.setenv("COPYWATCH_MATCHING__TAU", "0.7")
    monkeypatch.setenv("COPYWATCH_CHANNELS", '[{"name": "one", "url": "http://x/1.ts"}]')
    settings = load_settings(config)
    assert settings.data_dir == Path("/b")
    assert (settings.matching.tau, settings.matching.sigma) == (0.7, 0.2)
    assert settings.channels[0].name == "one"
    assert load_settings(config, data_dir=Path("/c")).data_dir == Path("/c")


def test_an_unknown_key_is_named_with_its_line_and_a_suggestion(tmp_path: Path) -> None:
    config = written(tmp_path, "web:\n  host: 127.0.0.1\n  prot: 80\n")
    assert complaint(config) == f"{config}:3: unknown key web.prot; did you mean port?"


def test_a_key_of_another_section_is_found_there(tmp_path: Path) -> None:
    config = written(tmp_path, "# top\nthreshold: 0.4\n")
    assert complaint(config) == f"{config}:2: unknown key threshold; did you mean alerting.threshold?"


def test_a_key_like_no_other_gets_the_list(tmp_path: Path) -> None:
    config = written(tmp_path, "compute: {zzz: 1}\n")
    assert complaint(config) == f"{config}:1: unknown key compute.zzz; known here: threads."


def test_a_wrong_value_is_named_with_its_line_and_the_expectation(tmp_path: Path) -> None:
    config = written(tmp_path, "channels:\n  - name: one\n    url: http://x/1.ts\n    mode: quick\n")
    said = complaint(config)
    assert said.startswith(f"{config}:4: channels[0].mode is 'quick': expected 'auto', 'exact' or 'economy'")


def test_every_problem_is_told_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    config = written(tmp_path, "matching:\n  tau: 2\nchannels:\n  - name: a b\n    url: x.ts\n  - url: y.ts\n")
    lines = complaint(config).splitlines()
    assert [line.removeprefix(f"{config}:")[0] for line in lines] == ["2", "4", "6"]
    assert lines[2].endswith("channels[1].name is missing; add it.")


def test_two_channels_of_one_name_are_refused(tmp_path: Path) -> None:
    config = written(tmp_path, "channels:\n  - {name: a, url: x.ts}\n  - {name: a, url: y.ts}\n")
    assert "but a is there twice" in complaint(config)


def test_a_key_twice_in_one_mapping_is_refused(tmp_path: Path) -> None:
    config = written(tmp_path, "web:\n  port: 1\n  port: 2\n")
    assert complaint(config) == f"{config}:3: port is set twice; keep one."


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    assert complaint(missing) == f"{missing}: no such file; name an existing one with --config."


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert complaint(tmp_path) == f"{tmp_path}: cannot be read: Is a directory."


def test_broken_yaml_has_its_line(tmp_path: Path) -> None:
    config = written(tmp_path, "web:\n  port: [1\nlogging: {}\n")
    assert complaint(config).startswith(f"{config}:3: not valid YAML: ")


def test_a_list_at_the_top_is_refused(tmp_path: Path) -> None:
    assert "expected `key: value` lines at the top, got a list" in complaint(written(tmp_path, "- a\n"))


def test_an_error_of_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COPYWATCH_WEB__PORT", "many")
    said = complaint(written(tmp_path, "web:\n  port: 80\n"))
    assert said.startswith("environment variable COPYWATCH_WEB__PORT: web.port is 'many': expected a valid integer")


def test_an_unknown_variable_is_refused_with_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPYWATCH_WEB__PROT", "80")
    assert complaint(None) == (
        "environment variable COPYWATCH_WEB__PROT names no setting; did you mean COPYWATCH_WEB__PORT?"
    )


def test_a_variable_that_is_no_json_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPYWATCH_CHANNELS", "[oops")
    assert complaint(None) == "environment variable COPYWATCH_CHANNELS holds no valid JSON."


def test_variables_that_kubernetes_sets_beside_a_service_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPYWATCH_SERVICE_HOST", "10.0.0.7")
    monkeypatch.setenv("COPYWATCH_PORT", "tcp://10.0.0.7:8080")
    monkeypatch.setenv("COPYWATCH_PORT_8080_TCP_ADDR", "10.0.0.7")
    assert load_settings().web.port == 8080


def test_the_web_server_listens_on_an_address(tmp_path: Path) -> None:
    said = complaint(written(tmp_path, "web:\n  host: 'example.org'\n"))
    assert "web.host is 'example.org': expected an address such as 127.0.0.1" in said


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost", "0.0.0.0", "::"])
def test_any_address_will_do(tmp_path: Path, host: str) -> None:
    assert load_settings(written(tmp_path, f"web:\n  host: '{host}'\n")).web.host == host


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("srt://x:9", "run `ffmpeg -i 'srt://HOST:PORT' -c copy -f mpegts 'udp://127.0.0.1:5000"),
        ("ftp://x/y", "http://, https"),
        ("http://", "expected scheme://host"),
        ("rtsp://u:pa/ss@cam/1", "are written %40"),
    ],
)
def test_an_address_that_cannot_be_opened_is_refused_early(tmp_path: Path, url: str, said: str) -> None:
    assert said in complaint(written(tmp_path, f"channels:\n  - {{name: a, url: '{url}'}}\n"))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("rtsp://admin:hunter2@10.0.0.5:554/live", "rtsp://***@10.0.0.5:554/live"),
        ("rtsp://admin@10.0.0.5/live", "rtsp://***@10.0.0.5/live"),
        ("rtsp://admin:hun/ter@2@cam/live?x", "rtsp://***@cam/live?***"),
        ("https://cdn/5.m3u8?token=hunter2&rendition=hunter2", "https://cdn/5.m3u8?token=***&rendition=***"),
        ("https://cdn/hdnts=exp=1~hmac=hunter2/5.m3u8", "https://cdn/hdnts=***/5.m3u8"),
        ("https://cdn/5.m3u8;session=hunter2", "https://cdn/5.m3u8;session=***"),
        ("https://cdn/5.m3u8#hunter2", "https://cdn/5.m3u8#***"),
        ("udp://239.0.0.1:1234?fifo_size=1000", "udp://239.0.0.1:1234?fifo_size=1000"),
        ("http://[::1]:8080/5.ts", "http://[::1]:8080/5.ts"),
        ("http://host/@someone/5.ts", "http://host/@someone/5.ts"),
        ("films/a@b.ts", "films/a@b.ts"),
        ("http://", "http://"),
    ],
)
def test_no_credential_of_an_address_is_shown(url: str, shown: str) -> None:
    assert redact_url(url) == shown


def test_addresses_inside_a_text_are_redacted() -> None:
    assert redact_text("cannot open 'http://u:p@h/a' or rtmp://h/b?k=1: refused") == (
        "cannot open 'http://***@h/a' or rtmp://h/b?k=***: refused"
    )


def test_neither_repr_nor_dump_nor_complaint_shows_a_password(tmp_path: Path) -> None:
    text = "channels:\n  - {name: a, url: 'rtsp://u:hunter2@h/a'}\n"
    settings = load_settings(written(tmp_path, text))
    assert settings.channels[0].url == "rtsp://u:hunter2@h/a"
    shown = [repr(settings), str(settings), repr(settings.channels), str(settings.model_dump())]
    shown += [settings.model_dump_json(), complaint(written(tmp_path, text.replace("rtsp", "ftp")))]
    assert not [one for one in shown if "hunter2" in one]
    assert all("***@h/a" in one for one in shown)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().web.port = 1
