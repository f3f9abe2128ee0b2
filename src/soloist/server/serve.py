"""Runs the server in this process until it is told to end."""

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from soloist.engine import Engine
from soloist.errors import EndForced, SettingError
from soloist.server.access import common_headers
from soloist.server.app import make_app, reply_counter
from soloist.server.bounds import MOST_CONNECTIONS, connections_for
from soloist.server.config import ServerConfig
from soloist.server.ending import LAST_WORDS_S, Ending, end_by_force
from soloist.server.host import Host, Load
from soloist.server.process import collect_less, switch_sooner
from soloist.server.protocol import Connections


class Server(uvicorn.Server):
    """Uvicorn with an engine behind it, which a signal stops as well.

    Attributes:
        host: of the engine.
        ending: ends the process in its bound, once it was started.

    Args:
        load: loads the engine.
        config: how to serve.
        on_ready: called with the engine, from another thread.

    Raises:
        SettingError: the address cannot be taken.
    """

    def __init__(
        self,
        load: Load,
        config: ServerConfig,
        on_ready: Callable[[Engine], None] = lambda _: None,
    ) -> None:
        self.host = Host(load, config, on_ready, self._end)
        self.ending = Ending(self.host, config.shutdown_s)
        self._socket = _listen(config)
        self._connections = Connections(
            connections_for(MOST_CONNECTIONS), config.most_body_bytes, reply_counter(self.host)
        )
        super().__init__(
            uvicorn.Config(
                make_app(self.host),
                host=config.host,
                port=config.port,
                http=self._connections.protocol(),
                ws="none",
                headers=common_headers(config),
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="on",
                timeout_graceful_shutdown=int(config.shutdown_s + LAST_WORDS_S),
            )
        )

    @property
    def url(self) -> str:
        """Where it listens."""
        name, port = self._socket.getsockname()[:2]
        return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"

    def serve_forever(self) -> None:
        """Serve until something sets `should_exit`, and end what still runs."""
        self.run(sockets=[self._socket])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End connections, those at last whose clients do not take what they asked for."""
        await super().shutdown(sockets)
        self._connections.abort()
        await asyncio.sleep(0)  # in which the event loop closes them

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's
        """The first signal stops by the deadline, a second Ctrl-C at once.

        The signal is not raised again afterwards: an end that was asked for is no failure. What
        takes a lock is left to another thread, since a signal comes between any two instructions.
        """
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
        self.ending.ask()

    def _end(self) -> None:
        self.should_exit = True
        self.ending.ask(self.host.failure)


def _listen(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        raise SettingError(
            "--host and --port", f"{config.host}:{config.port}", "a free address of this machine",
            f"{error.strerror or error}; take another port, or 0 for any that is free",
        ) from error  # fmt: skip


def serve(
    load: Load,
    config: ServerConfig,
    on_listening: Callable[[str], None],
    on_ready: Callable[[Engine], None],
) -> bool:
    """Serve until a signal.

    Args:
        load: loads the engine.
        config: how to serve.
        on_listening: called with the URL; the engine is still loading.
        on_ready: called with the engine, from another thread.

    Returns:
        Whether every thread has ended. One that still loads has not: `leave` ends the process
        without it.

    Raises:
        SoloistError: the engine could not be loaded, or stopped.
    """
    switch_sooner()

    def begin(engine: Engine) -> None:
        collect_less()
        on_ready(engine)

    server = Server(load, config, begin)
    server.ending.start()
    try:
        with server.capture_signals():  # from the moment that somebody can know of it
            on_listening(server.url)
            server.serve_forever()
        has_ended, failure = server.host.close(), server.host.failure
        if server.host.is_stuck:
            end_by_force(failure or EndForced(server.ending.bound_s))
    finally:
        server.ending.forget()
    if failure is not None:
        raise failure
    return has_ended
