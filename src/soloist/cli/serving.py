"""`soloist serve`: an engine behind HTTP, until a signal."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path

from soloist.cli.terminal import status, status_line
from soloist.engine import Engine, EngineConfig
from soloist.errors import SettingError, gigabytes
from soloist.model.folder import SHIPPED, name_of
from soloist.server.config import ServerConfig
from soloist.server.ending import leave
from soloist.server.origin import is_local, takes_any_name
from soloist.server.serve import serve as serve_http
from soloist.weights.reading import LoadProgress
from soloist.weights.upload import Upload

# What no key protects.
_OPEN = "generate, tokenise, read /metrics and end a request whose id is known"


def read_keys(given: list[str] | None, file: Path | None) -> tuple[str, ...]:
    """API keys from options and from a file with one a line.

    Raises:
        SettingError: the file cannot be read or holds none.
    """
    keys = list(given or ())
    if file is not None:
        try:
            found = [line.strip() for line in file.read_text("utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(
                "--api-key-file", str(file), f"a text file with one key a line ({error})"
            ) from error
        if not found:
            raise SettingError("--api-key-file", str(file), "a file with at least one key")
        keys += found
    return tuple(keys)


def names_of(model: str, given: list[str] | None) -> tuple[str, ...]:
    """What clients may call the model: the names given, else as it was named here."""
    if given:
        return tuple(dict.fromkeys(given))
    return (name_of(model),)


def warnings_of(config: ServerConfig) -> list[str]:
    """What a server without an API key exposes, to whom, and which option prevents it."""
    if config.api_keys:
        return []
    found = []
    if not is_local(config.host):
        found.append(
            f"anyone who can reach {config.host or 'this machine'} may {_OPEN}; --api-key requires "
            "a key, --host 127.0.0.1 keeps other machines out"
        )
    if takes_any_name(config.host, config.allowed_hosts):
        found.append(
            "a web page whose host name resolves to this machine (DNS rebinding) may do the same "
            "through the browser of anyone who opens it; --api-key or --allowed-host NAME "
            "prevents it"
        )
    if "*" in config.cors_origins:
        found.append(
            f"with --cors-origin '*' every web page may {_OPEN} through the browser of anyone "
            "who opens it; --api-key or the name of one origin prevents it"
        )
    return found


def serve(
    asked: EngineConfig,
    config: ServerConfig,
    upload: Upload | None,
    *,
    logs: bool,
    shows_text: bool,
) -> None:
    """Serve until a signal; a line for each request on stderr, without its text unless asked."""
    if logs:
        _log_requests(logging.DEBUG if shows_text else logging.INFO)

    def load(on_progress: Callable[[LoadProgress], None]) -> Engine:
        return Engine.load(asked, on_progress, upload)

    def ready(engine: Engine) -> None:
        if engine.report.refusal:
            status(engine.report.refusal)
        status(status_line(engine))
        memory, kv_tokens = engine.resolved.memory, engine.resolved.kv_tokens
        status(
            f"memory {gigabytes(memory.total_bytes)}: weights {gigabytes(memory.weights_bytes)}, "
            f"KV cache {gigabytes(memory.kv_bytes)} ({kv_tokens:,} tokens for up to "
            f"{asked.sequences} requests at once), scratch {gigabytes(memory.scratch_bytes)}"
        )
        if (bandwidth := engine.report.bandwidth_gb_per_s) is None:
            status("read bandwidth not measured (too little memory is free): replies have no MBU")
        else:
            status(f"read bandwidth {bandwidth:,.1f} GB/s, measured")
        if engine.report.host_cache_bytes:
            status(
                f"up to {gigabytes(engine.report.host_cache_bytes)} of host memory for offloaded "
                "prefix cache"
            )
        if engine.report.cache_dir is not None:
            saved = engine.model.saved
            held = 0 if saved is None else saved.num_bytes
            status(
                f"cached prompts are saved to {engine.report.cache_dir}, which has "
                f"{gigabytes(held)} of up to {gigabytes(engine.report.cache_dir_bytes)}"
            )
        status("ready")

    def listening(url: str) -> None:
        _tell_address(asked.model, config, url)

    has_ended = serve_http(load, config, listening, ready)
    status("stopped")
    if not has_ended:
        leave(0)


def _tell_address(model: str, config: ServerConfig, url: str) -> None:
    status(f"{config.names[0]} at {url}/v1 · {url}/docs · loading …")
    if model in SHIPPED:
        status(f"{model} ships with Soloist, to try clients; it is no assistant")
    for warning in warnings_of(config):
        status(f"warning: {warning}")


def _log_requests(level: int) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("soloist")
    logger.addHandler(handler)
    logger.setLevel(level)
    logging.getLogger("uvicorn.error").addHandler(handler)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
