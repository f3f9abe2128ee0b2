"""The engine behind the server: loading, ready, stopping or failed, and who is told so."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from soloist.engine import Engine
from soloist.engine.loop import EngineLoop, Progress
from soloist.errors import DeviceError, EngineStopped, ShuttingDown, SoloistError, Stalled
from soloist.server.bell import Bell
from soloist.server.config import ServerConfig
from soloist.server.held import Bodies
from soloist.server.metrics import Metrics
from soloist.server.preparation.pool import Preparation
from soloist.server.problems import Problem, problem_of
from soloist.server.watchdog import Watchdog
from soloist.weights.reading import LoadProgress

log = logging.getLogger(__name__)

# The engine's thread ends between two rounds or chunks of a prompt, unless it is stuck.
_JOIN_S = 2.0
# Loading ends when it will; it may just be about to.
_LOADING_S = 0.2

Load = Callable[[Callable[[LoadProgress], None]], Engine]


class Running(Protocol):
    """A request that can be cut."""

    def cut(self, problem: Problem) -> None:
        """End it; its client is told why."""


@dataclass(frozen=True, slots=True)
class Ready:
    """An engine that takes requests; `replica` is its name among several."""

    engine: Engine
    loop: EngineLoop
    preparation: Preparation
    created: int
    replica: str | None = None


class Host:
    """Loads an engine in a thread of its own and keeps it until the server ends.

    Attributes:
        config: of the server.
        metrics: what happened so far.
        bodies: of requests that are being read.
        bell: wakes the event loop, once `start` was called in it.
        failure: why there is no engine, where there will be none.
        running: requests by id; only the event loop's thread touches it.
        is_stuck: whether the engine's thread did not end when it was closed.

    Args:
        load: loads the engine, telling how far it is.
        config: of the server.
        on_ready: called with the engine when it takes requests, from another thread.
        on_end: called once if the engine cannot be loaded or stops, from another thread.
    """

    def __init__(
        self,
        load: Load,
        config: ServerConfig,
        on_ready: Callable[[Engine], None] = lambda _: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.metrics = config, Metrics()
        self.bodies = Bodies(config.most_body_bytes)
        self.failure: SoloistError | None = None
        self.running: dict[str, Running] = {}
        self._load, self._on_ready, self._on_end = load, on_ready, on_end
        self._ready: Ready | None = None
        self._preparation: Preparation | None = None
        self._progress: LoadProgress | None = None
        self._watchdog: Watchdog | None = None
        self._stopping, self.is_stuck = threading.Event(), False
        self._join_s = _JOIN_S
        self._thread = threading.Thread(target=self._run, name="soloist-load", daemon=True)

    def start(self) -> None:
        """Begin to load; called in the event loop."""
        self.bell = Bell(asyncio.get_running_loop())
        self._thread.start()

    def ready(self) -> Ready:
        """The engine.

        Raises:
            Problem: 503 while loading or stopping, or where it failed.
        """
        failure = self.failure
        if failure is None and self._ready is not None:
            failure = self._ready.loop.failure
        if failure is not None:
            raise problem_of(EngineStopped(failure))
        if self._stopping.is_set():
            raise problem_of(ShuttingDown())
        if self._ready is None:
            raise Problem(
                503,
                f"the model is loading: {self.loaded_share:.0%}",
                code="loading",
                headers={"Retry-After": "1"},
            )
        return self._ready

    @property
    def loop(self) -> EngineLoop | None:
        """The engine's, once it is loaded; it may have ended."""
        return None if self._ready is None else self._ready.loop

    @property
    def is_loading(self) -> bool:
        """Whether the engine is still to come."""
        return self._ready is None and self.failure is None

    @property
    def loaded_share(self) -> float:
        """How much of the weights is in memory, 0 … 1."""
        p = self._progress
        return 0.0 if p is None else p.done_bytes / max(1, p.total_bytes)

    def stop(self) -> None:
        """Take no further requests; cut those that run after the time the operator gave."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._ready is not None:
            self._ready.loop.refuse()
            cut = threading.Timer(self.config.shutdown_s, self._ready.loop.cancel_all)
            cut.daemon = True
            cut.start()

    def abandon(self) -> None:
        """Fail the requests that are still there although they were cut."""
        if self._ready is not None:
            self._ready.loop.abandon(ShuttingDown())

    def close(self) -> bool:
        """End every thread and process; no request is running any more, or it is cut.

        Returns:
            Whether all threads have ended. The one that loads cannot be told to, nor one of the
            engine that is in a call which does not return.
        """
        self._stopping.set()
        if self._watchdog is not None:
            self._watchdog.close()
        # At once: who comes a second time has waited before.
        within_s, self._join_s = self._join_s, 0.0
        if self._ready is not None:
            self.is_stuck = not self._ready.loop.close(within_s=within_s)
        if self._preparation is not None:
            self._preparation.close()
        if self._thread.ident is not None:
            self._thread.join(_LOADING_S)
        return not (self.is_stuck or self._thread.is_alive())

    def _run(self) -> None:
        try:
            self._prepare(self._load(self._advance))
        except SoloistError as error:
            self.fail(error)
        except BaseException as error:  # the server has to end, not to wait for ever
            log.exception("the model cannot be loaded")
            self.fail(DeviceError(f"the model cannot be loaded: {error!r}"))

    def _prepare(self, engine: Engine) -> None:
        """Take requests from now on."""
        if self._stopping.is_set():
            return
        preparation = Preparation(engine.processor, self.config.names)
        self._preparation = preparation
        preparation.start()
        loop = EngineLoop(
            engine.model,
            engine.tokenizer,
            engine.config.vocab_size,
            traffic=engine.traffic,
            most_waiting=self.config.most_waiting,
            flush_s=self.config.flush_ms / 1e3,
            on_failure=self.fail,
        )
        self.metrics.watch(loop, self.config.names[0])
        if self.config.stall_s:
            self._watchdog = Watchdog(loop, self.config.stall_s, self._stalled)
        self._ready = Ready(engine, loop, preparation, int(time.time()), self.config.replica)
        if self._stopping.is_set():  # it was told to meanwhile, when there was no loop
            loop.refuse()
        self._on_ready(engine)

    def _stalled(self, progress: Progress) -> None:
        error = Stalled(progress.age_s, progress.step)
        self.fail(error)
        if self._ready is not None:
            self._ready.loop.abandon(error)

    def _advance(self, progress: LoadProgress) -> None:
        self._progress = progress

    def fail(self, error: SoloistError) -> None:
        """There is no engine any more; the server ends. From any thread."""
        self.failure = self.failure or error
        self._on_end()
