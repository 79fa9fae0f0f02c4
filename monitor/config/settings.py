"""Settings: one YAML file and the environment in, one frozen Settings out, or a ConfigError that names the place.

`COPYWATCH_<KEY>` and `COPYWATCH_<SECTION>__<KEY>` override the keys of the file. An unknown key is an error in either,
so a misspelt one never silently leaves a default in force. Relative paths in the file are relative to the file's
folder, those in the environment to the working directory.
"""

import difflib
import ipaddress
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_serializer
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from monitor.errors import ConfigError
from reference_db.media.addresses import SCHEMES, SRT_ADVICE, redact_text, redact_url
from reference_db.text import is_printable

ENV_PREFIX = "COPYWATCH_"
CHANNEL_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
NO_ADDRESS = f"an address starts with one of {', '.join(scheme + '://' for scheme in SCHEMES)}"
# HOST.DOMAIN/, HOST:PORT or a playlist, without a scheme; only a file that exists may be named like this.
_NO_SCHEME = re.compile(r"(?i)[a-z0-9-]+(\.[a-z0-9-]+)+(:\d+)?/|[a-z0-9.-]+:\d+(/|$)|.*\.m3u8?$")
# Variables that Kubernetes sets in every pod beside a service called "copywatch", and ours that are not settings.
_NOT_SETTINGS = re.compile(r"COPYWATCH_(CONFIG|KAFKA_HOME|TEST_KAFKA|SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_.*)?)")


def default_data_dir() -> Path:
    """The default of `data_dir`: `copywatch` in the user's data folder."""
    base = os.environ.get("XDG_DATA_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "share") / "copywatch"


def _absolute_path(path: Path) -> Path:
    return Path(os.path.abspath(path.expanduser()))


def _check_url(url: str) -> str:
    if not is_printable(url):
        raise ValueError("expected printable characters; write others as %XX")
    scheme, mark, _ = url.partition("://")
    scheme = scheme.lower()
    if _NO_SCHEME.match(url) and is_bare_word(url):
        raise ValueError(NO_ADDRESS)
    if not mark or scheme == "file":
        return url
    if scheme == "srt":
        raise ValueError(SRT_ADVICE)
    if scheme not in SCHEMES:
        raise ValueError(f"expected a URL that starts with one of {', '.join(s + '://' for s in SCHEMES)}")
    try:
        named = urlsplit(url).hostname and urlsplit(url).port != 0
    except ValueError:
        named = False
    if not named and scheme not in ("udp", "rtp"):  # these may listen on any address
        raise ValueError("expected scheme://host:port/path; write @ : / ? # inside a password as %40 %3A %2F %3F %23")
    return url


def is_bare_word(url: str) -> bool:
    """Whether the URL of a channel is neither an address nor an absolute path nor a file that exists now."""
    return "://" not in url and not os.path.isabs(url) and not os.path.exists(url)


def _check_host(host: str) -> str:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if host != "localhost":
            raise ValueError("expected an IP address such as 127.0.0.1, or 0.0.0.0 for all interfaces") from None
    return host


def _check_network(text: str) -> str:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError("expected an IP address or a network such as 10.0.0.0/8") from None
    return text


AbsolutePath = Annotated[Path, AfterValidator(_absolute_path)]


# Settings of older versions, and what to write instead.
REMOVED = {
    "alerting.threshold": (
        "alerts are chosen by confidence now: remove it, or set alerting.min_confidence, the chance that an alert is "
        "right (0 to 0.99; the default 0.7 gives about the alerts of threshold 0.12)"
    )
}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def _check_channel_name(name: str) -> str:
    if not re.fullmatch(CHANNEL_NAME, name):
        raise ValueError(
            "expected letters, digits, dots, dashes and underscores, 64 at most, the first a letter or a digit"
        )
    return name


class ChannelSettings(_Section):
    """One broadcast to monitor."""

    name: Annotated[str, AfterValidator(_check_channel_name)] = Field(
        json_schema_extra={"pattern": f"^{CHANNEL_NAME}$"},
        description="Unique name: letters, digits, dot, dash, underscore. Metrics and alerts are labelled with it.",
    )
    url: Annotated[str, AfterValidator(_check_url)] = Field(
        min_length=1, description="URL of the stream: http(s) (TS or HLS), rtmp(s), rtsp(s), udp or rtp; or a file."
    )
    mode: Literal["auto", "exact", "economy"] = Field(
        default="auto",
        description="`exact` decodes all frames, `economy` key frames only; `auto` chooses by key-frame distance.",
    )
    allow: tuple[str, ...] = Field(
        default=(),
        description="Private hosts or networks that its playlists and redirects may use, besides its own host.",
    )
    private: bool = Field(
        default=False,
        description="Whether its own host name may have a private address; without it only public ones are used.",
    )

    @field_serializer("url")
    def _redact(self, url: str) -> str:
        return redact_url(url)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, redact_url(value) if name == "url" else value


def _check_unique_names(channels: list[ChannelSettings]) -> list[ChannelSettings]:
    names = [channel.name for channel in channels]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"expected unique channel names, but {', '.join(twice)} is used twice")
    return channels


class MatchingSettings(_Section):
    """How alignment paths are found; the names are those of the paper."""

    tau: float = Field(default=0.3, ge=0, le=1, description="Mask value above which a cell may start a path.")
    sigma: float = Field(default=0.1, ge=0, le=1, description="Similarity times mask from which a cell joins a path.")
    gamma: float = Field(default=100.0, ge=0, description="How strongly the score penalises short paths.")


class AlertingSettings(_Section):
    """Which copies raise an alert, and where alerts are written."""

    min_confidence: float = Field(
        default=0.7,
        ge=0,
        le=0.99,
        description="Minimum confidence of an alert: the chance that it is right, 0 to 0.99.",
    )
    update_every_s: float = Field(
        default=10.0, gt=0, description="Minimum stream time between two updates of an alert."
    )
    output: AbsolutePath | None = Field(
        default=None, description="File to which every alert event is appended as a line of JSON."
    )
    keep_days: float = Field(default=30.0, gt=0, description="Days for which an alert is stored after its end.")


class EvidenceSettings(_Section):
    """Pictures and similarities stored with each alert."""

    enabled: bool = Field(default=True, description="Store pictures and similarities of each alert.")
    quota_bytes: int = Field(
        default=2_000_000_000, ge=0, description="Maximum size of all evidence; the oldest is deleted first."
    )
    keep_days: float = Field(
        default=30.0,
        gt=0,
        description="Days for which evidence is stored; longer for alerts that a reviewer confirmed.",
    )


class RegistrationSettings(_Section):
    """What is stored of a reference, and what registering it may cost."""

    thumbnails: bool = Field(
        default=True,
        description="Store two small pictures per reference second, shown in evidence; some 60 MB an hour.",
    )
    memory_bytes: int = Field(
        default=5 << 29,
        ge=1 << 30,
        description="Memory that registering or importing may use, besides the library's index; what needs more fails.",
    )


class WebSettings(_Section):
    """The API, the dashboard, health and metrics over HTTP."""

    host: Annotated[str, AfterValidator(_check_host)] = Field(
        default="127.0.0.1",
        description="IP address to listen on; other than loopback only after `copywatch tokens add`.",
    )
    port: int = Field(default=8080, ge=0, le=65535, description="Port to listen on; 0 for any free port.")
    probes_host: str = Field(
        default="127.0.0.1",
        description="IP address of `web.probes_port`; 0.0.0.0 lets Kubernetes and Prometheus connect.",
    )
    probes_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Second port with only /livez, /readyz, /channelz and /metrics; 0 for any free port.",
    )
    metrics_token: bool = Field(
        default=False,
        description="Whether /metrics, /channelz and /readyz?verbose of `serve` need a token, on both ports.",
    )
    max_connections: int = Field(
        default=1000, ge=10, description="Maximum of open connections; at most half of the files that it may open."
    )
    max_connections_per_client: int = Field(
        default=250, ge=1, description="Maximum of open connections of one address (of IPv6, of one /64 network)."
    )
    trusted_proxies: tuple[Annotated[str, AfterValidator(_check_network)], ...] = Field(
        default=(),
        description="Addresses or networks of reverse proxies whose `X-Forwarded-For` and `-Proto` are believed.",
    )
    max_channels: int = Field(
        default=200,
        ge=0,
        description="Channels in all up to which the API may add one; each is a process.",
    )
    session_idle_hours: float = Field(
        default=12.0, gt=0, description="Hours without a request after which a browser must log in again."
    )
    session_hours: float = Field(
        default=168.0, gt=0, description="Hours after its login after which a browser must log in again."
    )
    max_upload_bytes: int = Field(default=8 << 30, ge=1, description="Maximum size of an uploaded video.")
    max_upload_s: float = Field(
        default=21_600.0, gt=0, description="Maximum duration of an upload; 6 hours are 8 GiB at 3 Mbit/s."
    )
    upload_reserve_bytes: int = Field(
        default=1 << 30, ge=0, description="Disk space that uploads leave free for everything else."
    )
    upload_quota_bytes: int = Field(
        default=64 << 30, ge=1, description="Maximum size of all uploads that are not registered yet."
    )
    upload_token_quota_bytes: int = Field(
        default=24 << 30, ge=1, description="Maximum size of one token's uploads that are not registered yet."
    )


class AuditSettings(_Section):
    """The log of changes, sign-ins and refused requests."""

    keep_days: float = Field(default=365.0, gt=0, description="Days for which entries of the audit log are stored.")


class WebhookSettings(_Section):
    """Limits of webhooks; `copywatch webhooks add` adds their URLs."""

    allow: tuple[str, ...] = Field(
        default=(), description="Private hosts or networks that webhooks may use; public ones are always allowed."
    )
    channel_down_s: float = Field(
        default=30.0,
        ge=0,
        description="How long a channel must have had no new frame before webhooks get `channel.down`.",
    )


class LoggingSettings(_Section):
    """The log on stderr."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Minimum level of logged lines."
    )
    format: Literal["auto", "json", "console"] = Field(
        default="auto", description="`auto` means `console` on a terminal, else `json`."
    )


class ComputeSettings(_Section):
    """Use of the CPU."""

    threads: int = Field(default=1, ge=1, le=256, description="CPU threads for the encoder and the matching network.")


TOPIC = r"^[A-Za-z0-9._-]{1,200}$"


class KafkaSettings(_Section):
    """The broker between `ingest` and `match`; `serve` needs none."""

    bootstrap: str | None = Field(default=None, description="Bootstrap brokers, `host:port,host:port`.")
    frames: str = Field(default="copywatch.frames", pattern=TOPIC, description="Topic of sampled frames.")
    alerts: str = Field(default="copywatch.alerts", pattern=TOPIC, description="Topic of alerts.")
    state: str = Field(default="copywatch.state", pattern=TOPIC, description="Compacted topic of channel state.")
    channels: str = Field(
        default="copywatch.channels",
        pattern=TOPIC,
        description="Compacted topic of the channels that `ingest` processes share.",
    )
    partitions: int = Field(
        default=12,
        ge=1,
        le=1000,
        description="Partitions of newly created topics. Matchers beyond this number stay idle.",
    )
    group: str = Field(
        default="copywatch", pattern=TOPIC, description="Consumer group of `match`; other roles append their name."
    )
    instance: str | None = Field(
        default=None,
        pattern=TOPIC,
        description="Static group member name: a restart within the session time-out keeps the partitions.",
    )
    session_timeout_s: float = Field(
        default=30.0, ge=1, description="Time without a heartbeat after which other members take over the partitions."
    )
    rebalance_timeout_s: float = Field(
        default=60.0, ge=1, description="Time that members have to release their partitions in a rebalance."
    )
    policy: Literal["catch_up", "live"] = Field(
        default="catch_up",
        description="When `match` is behind: `catch_up` reads all records, `live` skips to now with a gap.",
    )
    live_lag_s: float = Field(default=60.0, gt=0, description="Lag at which `live` skips.")
    follow_alerts: bool = Field(default=False, description="`serve` shows the alerts of all `match` members.")
    publish_alerts: bool = Field(default=False, description="`serve` also writes its own alerts to the topic.")
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        default="PLAINTEXT", description="Whether the connection uses TLS (SSL) and SASL."
    )
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        default="PLAIN", description="SASL mechanism: PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512."
    )
    sasl_username: str | None = Field(default=None, description="SASL user name.")
    sasl_password: SecretStr | None = Field(default=None, description="SASL password.")
    sasl_password_file: AbsolutePath | None = Field(
        default=None, description="File with the SASL password, instead of `kafka.sasl_password`."
    )
    ssl_cafile: AbsolutePath | None = Field(
        default=None, description="CA certificates for the broker (PEM); by default those of the system."
    )
    ssl_certfile: AbsolutePath | None = Field(default=None, description="Client certificate for mutual TLS (PEM).")
    ssl_keyfile: AbsolutePath | None = Field(default=None, description="Key of the client certificate (PEM).")


class Settings(BaseSettings):
    """All settings, validated."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    data_dir: AbsolutePath = Field(
        default_factory=default_data_dir, description="Folder of all data: references, features, alerts, state."
    )
    encoder: AbsolutePath | None = Field(
        default=None, description="ONNX file of another encoder with 512 outputs; by default the shipped one."
    )
    channels: Annotated[list[ChannelSettings], AfterValidator(_check_unique_names)] = Field(
        default_factory=list, description="The broadcasts to monitor."
    )
    registration: RegistrationSettings = RegistrationSettings()
    matching: MatchingSettings = MatchingSettings()
    alerting: AlertingSettings = AlertingSettings()
    evidence: EvidenceSettings = EvidenceSettings()
    web: WebSettings = WebSettings()
    audit: AuditSettings = AuditSettings()
    webhooks: WebhookSettings = WebhookSettings()
    logging: LoggingSettings = LoggingSettings()
    compute: ComputeSettings = ComputeSettings()
    kafka: KafkaSettings = KafkaSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return env_settings, init_settings  # the first wins


def load_settings(config: Path | None = None, *, data_dir: Path | None = None) -> Settings:
    """Settings from the file (if any) and the environment; the argument `data_dir` wins over both.

    Raises ConfigError with one line per problem: file and line or variable, value, expected value.
    """
    _refuse_unknown_variables(os.environ)
    values, root = _read(config) if config is not None else ({}, None)
    try:
        settings = Settings(**values)
    except SettingsError as error:
        found = re.search(r'field "(\w+)"', str(error))
        name = ENV_PREFIX + (found.group(1).upper() if found else "*")
        raise ConfigError(f"environment variable {name} is not valid JSON.") from error
    except ValidationError as error:
        problems = sorted(error.errors(), key=lambda problem: _line(root, problem["loc"]))
        raise ConfigError("\n".join(_sentence(problem, config, root) for problem in problems)) from error
    return settings.model_copy(update={"data_dir": _absolute_path(data_dir)}) if data_dir is not None else settings


def _read(config: Path) -> tuple[dict[str, Any], yaml.Node | None]:
    """The values of the file, ready for Settings, and its YAML nodes, which have the line numbers."""
    try:
        text = config.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{config}: no such file; give an existing one with --config.") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{config}: cannot be read: {reason}.") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{config}:{line}: not valid YAML: {error.problem}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{config}: not valid YAML: {str(error).splitlines()[0]}.") from error
    if values is None:
        return {}, root
    if not isinstance(values, dict):
        raise ConfigError(f"{config}:1: expected `key: value` lines at the top, got a {type(values).__name__}.")
    _refuse_double_keys(config, root)
    unnamed = next((key for key in values if not isinstance(key, str)), None)
    if unnamed is not None:
        raise ConfigError(f"{config}: unknown key {unnamed!r}.")
    _resolve_paths(values, config.parent)
    # A section whose keys are all commented out is null and means its defaults.
    return {key: value for key, value in values.items() if value is not None}, root


def _resolve_paths(values: dict[str, Any], folder: Path) -> None:
    """Makes the relative paths of the file relative to its folder."""
    alerting, kafka = values.get("alerting"), values.get("kafka")
    files = ("sasl_password_file", "ssl_cafile", "ssl_certfile", "ssl_keyfile")
    paths = [(values, "data_dir"), (values, "encoder"), (alerting, "output"), *((kafka, file) for file in files)]
    for section, key in paths:
        if isinstance(section, dict) and isinstance(section.get(key), str):
            section[key] = str(folder / Path(section[key]).expanduser())


def _refuse_double_keys(config: Path, node: yaml.Node | None) -> None:
    """YAML forbids a key twice in one mapping; PyYAML silently takes the last."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_double_keys(config, item)
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if key.value in seen:
                raise ConfigError(f"{config}:{key.start_mark.line + 1}: {key.value} is set twice; remove one.")
            seen.add(key.value)
            _refuse_double_keys(config, value)


def _refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    """pydantic-settings ignores variables with our prefix that name no setting; a typing error must not pass."""
    known = [ENV_PREFIX + key.replace(".", "__").upper() for key in _known_keys()]
    for name in sorted(environment):
        upper = name.upper()
        if not upper.startswith(ENV_PREFIX) or _NOT_SETTINGS.fullmatch(upper):
            continue
        if upper not in known:
            key = upper.removeprefix(ENV_PREFIX).replace("__", ".")
            instead = _removed(key) or _did_you_mean(upper, known)
            raise ConfigError(f"environment variable {name} is not a setting{instead}")


def _known_keys() -> list[str]:
    """Dotted names of all settings and sections, without the keys of channels."""
    keys = []
    for name, field in Settings.model_fields.items():
        keys.append(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, _Section):
            keys += [f"{name}.{key}" for key in field.annotation.model_fields]
    return keys


def _removed(key: str) -> str | None:
    """What to write instead of a setting that older versions had."""
    return next((f"; {instead}." for old, instead in REMOVED.items() if old == key.lower()), None)


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else "."


def _sentence(problem: ErrorDetails, config: Path | None, root: yaml.Node | None) -> str:
    """One line per problem that pydantic found: place, value, expected value."""
    where = _variable(problem["loc"]) or f"{config}:{_line(root, problem['loc'])}"
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip(".")
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown key {key}{_removed(key) or _suggestion(problem['loc'])}"
    if problem["type"] == "missing":
        return f"{where}: {key} is missing; add it."
    expected = (
        problem["msg"]
        .removeprefix("Value error, ")
        .replace("Input should be", "expected")
        .replace("String should", "expected it to")
    )
    value = problem["input"]
    is_secret = str(problem["loc"][-1]).endswith("password")
    got = f" is {redact_text(str(value))!r}" if isinstance(value, str | int | float) and not is_secret else ""
    return f"{where}: {key}{got}: {expected}."


def _suggestion(loc: tuple[int | str, ...]) -> str:
    """ "; did you mean ...?" with a key of the same section, else with the same key in another section."""
    word, known = str(loc[-1]), _known_keys()
    if loc[0] == "channels":
        siblings = list(ChannelSettings.model_fields)
    else:
        prefix = "".join(f"{part}." for part in loc[:-1])
        siblings = [key.removeprefix(prefix) for key in known if key.startswith(prefix)]
        siblings = [key for key in siblings if "." not in key]
    close = difflib.get_close_matches(word, siblings, n=1)
    elsewhere = [key for key in known if key.rpartition(".")[2] == word]
    suggestion = next(iter(close + elsewhere), None)
    if suggestion is None:
        return f"; valid keys: {', '.join(siblings)}."
    return f"; did you mean {suggestion}?"


def _variable(loc: tuple[int | str, ...]) -> str | None:
    """ "environment variable NAME" if the value at this place comes from one."""
    present = {name.upper(): name for name, value in os.environ.items() if value}
    for length in range(len(loc), 0, -1):
        name = ENV_PREFIX + "__".join(str(part).upper() for part in loc[:length])
        if name in present:
            return f"environment variable {present[name]}"
    return None


def _line(node: yaml.Node | None, loc: tuple[int | str, ...]) -> int:
    """The line of the key at this place, or of the nearest node around it."""
    line = node.start_mark.line + 1 if node is not None else 1
    for part in loc:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        elif isinstance(node, yaml.MappingNode):
            pair = next(((key, value) for key, value in node.value if key.value == part), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        else:
            break
    return line
