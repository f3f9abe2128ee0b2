"""What an operator asks of the server."""

import re
from dataclasses import dataclass

from soloist.errors import SettingError
from soloist.server.origin import host_name

# As the command line has them: option, smallest, largest, and how much one of it is here.
_RANGES = {
    "port": ("--port", 0, 65_535, 1),
    "most_waiting": ("--queue", 0, 100_000, 1),
    "flush_ms": ("--flush-ms", 0, 1000, 1),
    "most_body_bytes": ("--max-body-mb", 1 / 1024, 2048, 2**20),
    "request_s": ("--request-timeout", 0.1, 10**6, 1),
    "shutdown_s": ("--shutdown-timeout", 0, 10**6, 1),
    "stall_s": ("--stall-timeout", 0, 10**6, 1),
}

# What browsers send: never a path, nor a slash at the end.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How to serve.

    Attributes:
        names: of the model, as clients may write it; the first one is shown.
        host: address to bind to.
        port: 0 takes a free one.
        api_keys: any of them opens the API; none leaves it open.
        allowed_hosts: names that clients may call the server by beside local ones, without a port;
            '*' allows any. None allows any as well where `host` is not local.
        cors_origins: web pages from these origins may use the API; '*' allows all.
        most_waiting: requests that may wait for others to end.
        flush_ms: how often a stream is written to, at most; 0 for each token.
        most_body_bytes: of one request.
        request_s: a request that takes longer is cut.
        shutdown_s: on SIGTERM, running requests may go on for so long.
        stall_s: the process ends where something runs and nothing has moved for so long; 0: never.

        replica: by which name replies tell that this server made them, where it is one of several.

    Raises:
        SettingError: a number out of range, an empty key, no host or no origin.
    """

    names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    most_waiting: int = 64
    flush_ms: float = 1.0
    most_body_bytes: int = 32 * 2**20
    request_s: float = 3600.0
    shutdown_s: float = 10.0
    stall_s: float = 120.0
    replica: str | None = None

    def __post_init__(self) -> None:
        for name, (option, low, high, unit) in _RANGES.items():
            value = getattr(self, name)
            if not low * unit <= value <= high * unit:
                shown = value if unit == 1 else value / unit
                raise SettingError(option, shown, f"{low:,.3g} … {high:,}")
        if not all(key.strip() for key in self.api_keys):
            raise SettingError("--api-key", "", "keys of at least one character")
        for name in self.allowed_hosts:
            if name != "*" and host_name(name) is None:
                raise SettingError(
                    "--allowed-host", name, "a name or an IP address without port, or '*'"
                )
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise SettingError("--cors-origin", origin, "such as http://localhost:3000, or '*'")
