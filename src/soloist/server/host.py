"""The engine behind the server: loading, ready, stopping or failed, and who is told so."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from soloist.engine import Engine, EngineLoop
from soloist.errors import (
    DeviceError,
    EngineStopped,
    PreparationFailed,
    ShuttingDown,
    SoloistError,
)
from soloist.model.weights import LoadProgress
from soloist.server.bell import Bell
from soloist.server.config import ServerConfig
from soloist.server.metrics import Metrics
from soloist.server.preparation.pool import Preparation
from soloist.server.problems import Problem, problem_of

Load = Callable[[Callable[[LoadProgress], None]], Engine]


class Running(Protocol):
    """A request that can be cut."""

    def cut(self, problem: Problem) -> None:
        """End it; its client is told why."""
        ...


@dataclass(frozen=True, slots=True)
class Ready:
    """An engine that takes requests."""

    engine: Engine
    loop: EngineLoop
    preparation: Preparation
    created: int


class Host:
    """Loads an engine in a thread of its own and keeps it until the server ends.

    Attributes:
        config: of the server.
        metrics: what happened so far.
        bell: wakes the event loop, once `start` was called in it.
        failure: why there is no engine, where there will be none.
        running: requests by id; only the event loop's thread touches it.

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
        self.failure: SoloistError | None = None
        self.running: dict[str, Running] = {}
        self._load, self._on_ready, self._on_end = load, on_ready, on_end
        self._ready: Ready | None = None
        self._preparation: Preparation | None = None
        self._progress: LoadProgress | None = None
        self._is_stopping = False
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
        if self.failure is not None:
            raise problem_of(EngineStopped(self.failure))
        if self._is_stopping:
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
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._ready is not None:
            self._ready.loop.refuse()
            cut = threading.Timer(self.config.shutdown_s, self._ready.loop.cancel_all)
            cut.daemon = True
            cut.start()

    def close(self) -> None:
        """End every thread; no request is running any more, or it is cut."""
        self._is_stopping = True
        if self._ready is not None:
            self._ready.loop.close()
        if self._preparation is not None:
            self._preparation.close()

    def _run(self) -> None:
        try:
            engine = self._load(self._advance)
        except SoloistError as error:
            self.fail(error)
            return
        except Exception as error:  # noqa: BLE001 - the server has to end, not to wait for ever
            self.fail(DeviceError(f"the model cannot be loaded: {error!r}"))
            return
        if self._is_stopping:
            return
        preparation = Preparation(engine.processor.files, self.config.names)
        self._preparation = preparation
        try:
            preparation.start()
        except PreparationFailed as error:
            self.fail(error)
            return
        loop = EngineLoop(
            engine.model,
            engine.tokenizer,
            engine.config.vocab_size,
            traffic=engine.traffic,
            most_waiting=self.config.most_waiting,
            flush_s=self.config.flush_ms / 1e3,
            on_failure=self.fail,
        )
        self.metrics.watch(loop)
        self._ready = Ready(engine, loop, preparation, int(time.time()))
        self._on_ready(engine)

    def _advance(self, progress: LoadProgress) -> None:
        self._progress = progress

    def fail(self, error: SoloistError) -> None:
        """There is no engine any more; the server ends. From any thread."""
        self.failure = error
        self._on_end()
