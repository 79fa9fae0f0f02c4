"""Settings: where each value comes from, and the errors for invalid ones."""

from pathlib import Path

import pytest

from monitor.config.settings import ChannelSettings, Settings, load_settings
from monitor.errors import ConfigError
from reference_db.media.addresses import redact_text, redact_url


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("COPYWATCH_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))


def write_config(tmp_path: Path, text: str) -> Path:
    config = tmp_path / "copywatch.yaml"
    config.write_text(text)
    return config


def error_of(config: Path | None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(config)
    return str(caught.value)


def test_defaults_need_no_file(tmp_path: Path) -> None:
    settings = load_settings()
    assert settings.data_dir == tmp_path / "share" / "copywatch"
    assert settings.channels == []
    assert (settings.matching.tau, settings.matching.sigma, settings.matching.gamma) == (0.3, 0.1, 100.0)
    assert (settings.web.host, settings.web.port) == ("127.0.0.1", 8080)


def test_without_xdg_data_home_the_data_folder_is_in_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_settings().data_dir == tmp_path / ".local/share/copywatch"


def test_relative_paths_of_the_file_are_relative_to_its_folder(tmp_path: Path) -> None:
    config = write_config(
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
    assert load_settings(write_config(tmp_path, "# nothing yet\n")) == load_settings()


def test_the_environment_wins_key_by_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = write_config(tmp_path, "data_dir: /a\nmatching: {tau: 0.5, sigma: 0.2}\n")
    monkeypatch.setenv("COPYWATCH_DATA_DIR", "/b")
    monkeypatch.setenv("COPYWATCH_MATCHING__TAU", "0.7")
    monkeypatch.setenv("COPYWATCH_CHANNELS", '[{"name": "one", "url": "http://x/1.ts"}]')
    settings = load_settings(config)
    assert settings.data_dir == Path("/b")
    assert (settings.matching.tau, settings.matching.sigma) == (0.7, 0.2)
    assert settings.channels[0].name == "one"
    assert load_settings(config, data_dir=Path("/c")).data_dir == Path("/c")


def test_an_unknown_key_is_named_with_its_line_and_a_suggestion(tmp_path: Path) -> None:
    config = write_config(tmp_path, "web:\n  host: 127.0.0.1\n  prot: 80\n")
    assert error_of(config) == f"{config}:3: unknown key web.prot; did you mean port?"


def test_a_key_of_another_section_is_suggested(tmp_path: Path) -> None:
    config = write_config(tmp_path, "# top\nmin_confidence: 0.4\n")
    assert error_of(config) == f"{config}:2: unknown key min_confidence; did you mean alerting.min_confidence?"


def test_the_threshold_of_older_versions_is_refused_with_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, "alerting:\n  threshold: 0.12\n")
    said = error_of(config)
    assert said.startswith(f"{config}:2: unknown key alerting.threshold; alerts are chosen by confidence now: ")
    assert "set alerting.min_confidence" in said
    monkeypatch.setenv("COPYWATCH_ALERTING__THRESHOLD", "0.12")
    with pytest.raises(
        ConfigError, match=r"COPYWATCH_ALERTING__THRESHOLD is not a setting; .*alerting\.min_confidence"
    ):
        load_settings(None)


def test_a_key_like_no_other_gets_the_list_of_valid_keys(tmp_path: Path) -> None:
    config = write_config(tmp_path, "compute: {zzz: 1}\n")
    assert error_of(config) == f"{config}:1: unknown key compute.zzz; valid keys: threads."


def test_an_invalid_value_is_named_with_its_line_and_the_expected_ones(tmp_path: Path) -> None:
    config = write_config(tmp_path, "channels:\n  - name: one\n    url: http://x/1.ts\n    mode: quick\n")
    message = error_of(config)
    assert message.startswith(f"{config}:4: channels[0].mode is 'quick': expected 'auto', 'exact' or 'economy'")


def test_all_problems_are_listed_in_the_order_of_the_file(tmp_path: Path) -> None:
    config = write_config(tmp_path, "matching:\n  tau: 2\nchannels:\n  - name: a b\n    url: x.ts\n  - url: y.ts\n")
    lines = error_of(config).splitlines()
    assert [line.removeprefix(f"{config}:")[0] for line in lines] == ["2", "4", "6"]
    assert lines[2].endswith("channels[1].name is missing; add it.")


def test_two_channels_of_one_name_are_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path, "channels:\n  - {name: a, url: x.ts}\n  - {name: a, url: y.ts}\n")
    assert "but a is used twice" in error_of(config)


def test_a_key_twice_in_one_mapping_is_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path, "web:\n  port: 1\n  port: 2\n")
    assert error_of(config) == f"{config}:3: port is set twice; remove one."


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    assert error_of(missing) == f"{missing}: no such file; give an existing one with --config."


def test_a_folder_is_not_a_configuration_file(tmp_path: Path) -> None:
    assert error_of(tmp_path) == f"{tmp_path}: cannot be read: Is a directory."


def test_invalid_yaml_is_reported_with_its_line(tmp_path: Path) -> None:
    config = write_config(tmp_path, "web:\n  port: [1\nlogging: {}\n")
    assert error_of(config).startswith(f"{config}:3: not valid YAML: ")


def test_a_list_at_the_top_is_refused(tmp_path: Path) -> None:
    assert "expected `key: value` lines at the top, got a list" in error_of(write_config(tmp_path, "- a\n"))


def test_an_error_of_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COPYWATCH_WEB__PORT", "many")
    message = error_of(write_config(tmp_path, "web:\n  port: 80\n"))
    assert message.startswith("environment variable COPYWATCH_WEB__PORT: web.port is 'many': expected a valid integer")


def test_an_unknown_variable_is_refused_with_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPYWATCH_WEB__PROT", "80")
    assert error_of(None) == (
        "environment variable COPYWATCH_WEB__PROT is not a setting; did you mean COPYWATCH_WEB__PORT?"
    )


def test_a_variable_with_invalid_json_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPYWATCH_CHANNELS", "[oops")
    assert error_of(None) == "environment variable COPYWATCH_CHANNELS is not valid JSON."


def test_variables_that_kubernetes_sets_for_a_service_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPYWATCH_SERVICE_HOST", "10.0.0.7")
    monkeypatch.setenv("COPYWATCH_PORT", "tcp://10.0.0.7:8080")
    monkeypatch.setenv("COPYWATCH_PORT_8080_TCP_ADDR", "10.0.0.7")
    assert load_settings().web.port == 8080


def test_a_host_name_to_listen_on_is_refused(tmp_path: Path) -> None:
    message = error_of(write_config(tmp_path, "web:\n  host: 'example.org'\n"))
    assert "web.host is 'example.org': expected an IP address such as 127.0.0.1" in message


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost", "0.0.0.0", "::"])
def test_any_ip_address_is_accepted(tmp_path: Path, host: str) -> None:
    assert load_settings(write_config(tmp_path, f"web:\n  host: '{host}'\n")).web.host == host


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("srt://x:9", "run `ffmpeg -i 'srt://HOST:PORT' -c copy -f mpegts 'udp://127.0.0.1:5000"),
        ("ftp://x/y", "http://, https"),
        ("example.org/live.m3u8", "an address starts with one of"),
        ("127.0.0.1:8080", "an address starts with one of"),
        ("live.m3u8", "an address starts with one of"),
        ("http://", "expected scheme://host"),
        ("http://x/\u202ea.ts", "expected printable characters"),
        ("rtsp://u:pa/ss@cam/1", "inside a password as %40"),
    ],
)
def test_a_url_that_cannot_be_opened_is_refused_early(tmp_path: Path, url: str, message: str) -> None:
    assert message in error_of(write_config(tmp_path, f"channels:\n  - {{name: a, url: '{url}'}}\n"))


def test_a_file_may_be_named_like_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "example.org").mkdir()
    (tmp_path / "example.org" / "film.ts").touch()
    monkeypatch.chdir(tmp_path)
    for url in ("example.org/film.ts", "/media/example.org/live.ts", "film.ts"):
        config = write_config(tmp_path, f"channels:\n  - {{name: a, url: '{url}'}}\n")
        assert load_settings(config).channels[0].url == url


@pytest.mark.parametrize(
    ("url", "redacted"),
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
def test_credentials_of_a_url_are_redacted(url: str, redacted: str) -> None:
    assert redact_url(url) == redacted


def test_urls_inside_a_text_are_redacted() -> None:
    assert redact_text("cannot open 'http://u:p@h/a' or rtmp://h/b?k=1: refused") == (
        "cannot open 'http://***@h/a' or rtmp://h/b?k=***: refused"
    )


def test_neither_repr_nor_dump_nor_error_contains_a_password(tmp_path: Path) -> None:
    text = "channels:\n  - {name: a, url: 'rtsp://u:hunter2@h/a'}\n"
    settings = load_settings(write_config(tmp_path, text))
    assert settings.channels[0].url == "rtsp://u:hunter2@h/a"
    texts = [repr(settings), str(settings), repr(settings.channels), str(settings.model_dump())]
    texts += [settings.model_dump_json(), error_of(write_config(tmp_path, text.replace("rtsp", "ftp")))]
    assert not [one for one in texts if "hunter2" in one]
    assert all("***@h/a" in one for one in texts)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().web.port = 1
