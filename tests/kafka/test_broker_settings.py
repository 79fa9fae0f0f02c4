"""Client options from settings: errors name the setting, and passwords are never printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from monitor.config.settings import KafkaSettings, Settings, load_settings
from monitor.errors import ConfigError
from monitor.kafka.broker import client_options

SECRET = "s3cr3t-of-kafka"


def test_the_password_is_in_the_client_options_and_nowhere_else(tmp_path: Path) -> None:
    config = tmp_path / "copywatch.yaml"
    config.write_text(f"kafka: {{bootstrap: 'b:9092', security_protocol: SASL_SSL, sasl_password: {SECRET}}}\n")
    settings = load_settings(config)
    assert client_options(settings.kafka)["sasl_plain_password"] == SECRET
    assert SECRET not in f"{settings!r} {settings} {settings.model_dump_json()}"


def test_the_password_file_is_relative_to_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "password").write_text(SECRET + "\n")
    config = tmp_path / "copywatch.yaml"
    config.write_text("kafka: {bootstrap: 'b:9092', security_protocol: SASL_PLAINTEXT, sasl_password_file: password}\n")
    assert client_options(load_settings(config).kafka)["sasl_plain_password"] == SECRET


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({}, "kafka.bootstrap"),
        ({"bootstrap": "b:1", "security_protocol": "SASL_SSL"}, "kafka.sasl_password"),
        ({"bootstrap": "b:1", "security_protocol": "SSL", "ssl_cafile": "/nowhere/ca.pem"}, "ssl_cafile"),
        ({"bootstrap": "b:1", "security_protocol": "SASL_SSL", "sasl_password_file": "/nowhere/p"}, "/nowhere/p"),
    ],
)
def test_invalid_settings_are_named(values: dict[str, str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        client_options(KafkaSettings.model_validate(values))


def test_an_invalid_password_is_not_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "copywatch.yaml"
    config.write_text("kafka: {sasl_password: 4711}\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(config)
    assert "4711" not in str(caught.value)
    monkeypatch.setenv("COPYWATCH_KAFKA__SASL_PASSWORD", SECRET)
    config.write_text("")
    assert Settings().kafka.sasl_password is not None
