"""Errors of the monitor; those of the library of references are in reference_db/errors.py.

MonitorError
├── ConfigError        a setting or file is wrong: exit 3, one sentence
├── SourceError        a bad stream: its pipeline ends, the supervisor restarts it with back-off
│   ├── SourceStalled
│   └── SourceClosed
└── Unreachable        an address that does not answer: exit 4
"""


class MonitorError(Exception):
    """The root; its message is one sentence that says what to do."""


class ConfigError(MonitorError):
    """A setting or a file named by one is wrong."""


class SourceError(MonitorError):
    """One channel's source failed; no other channel is touched."""


class SourceStalled(SourceError):
    """Nothing new came within the time allowed."""


class SourceClosed(SourceError):
    """The far end hung up or could not be opened."""


class Unreachable(MonitorError):
    """An address did not answer."""
