"""What an operator asks of the server."""

from dataclasses import dataclass

from soloist.errors import SettingError


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How to serve.

    Attributes:
        names: of the model, as clients may write it; the first one is shown.
        host: address to bind to.
        port: 0 takes a free one.
        api_keys: any of them opens the API; none leaves it open.
        cors_origins: web pages from these origins may use the API; '*' allows all.
        most_waiting: requests that may wait for a column.
        flush_ms: how often a stream is written to, at most; 0 for each token.
        most_body_bytes: of one request.
        request_s: a request that takes longer is cut.
        shutdown_s: on SIGTERM, running requests may go on for so long.

    Raises:
        SettingError: a number out of range, an empty key.
    """

    names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    most_waiting: int = 64
    flush_ms: float = 1.0
    most_body_bytes: int = 32 * 2**20
    request_s: float = 3600.0
    shutdown_s: float = 10.0

    def __post_init__(self) -> None:
        ranges = {
            "port": (0, 65535),
            "most_waiting": (0, 100_000),
            "flush_ms": (0, 1000),
            "most_body_bytes": (1024, 2**31),
            "request_s": (0.1, 10**6),
            "shutdown_s": (0, 10**6),
        }
        for name, (low, high) in ranges.items():
            if not low <= (value := getattr(self, name)) <= high:
                raise SettingError(name, value, f"{low:,} … {high:,}")
        if not all(key.strip() for key in self.api_keys):
            raise SettingError("api_keys", "", "keys of at least one character")
