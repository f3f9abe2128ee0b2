"""One request as seen from outside the engine's thread: what came so far, and a way to end it."""

import logging
from collections import deque
from collections.abc import Callable

from soloist.engine.events import Event

log = logging.getLogger(__name__)


class Ticket:
    """Events of one request, from the loop's thread to any other.

    The listener is told of the first token and of the end at once, of what lies between when the
    loop says so: waking a reader costs more than a token. The request of a listener that fails is
    cancelled: nobody reads on.

    Attributes:
        prompt_ids: of the request.
        top_logprobs: see `EngineLoop.submit`.
        is_cancelled: whether the request shall end at its next token.
        num_cached: prompt tokens that need not be read; known when the first token is.
    """

    def __init__(
        self,
        prompt_ids: tuple[int, ...],
        top_logprobs: int | None,
        listen: Callable[[], None],
        on_cancel: Callable[[], None],
    ) -> None:
        self.prompt_ids, self.top_logprobs = prompt_ids, top_logprobs
        self.is_cancelled = False
        self.num_cached = 0
        self._listen, self._on_cancel = listen, on_cancel
        self._events: deque[Event] = deque()
        self._is_untold = False

    def take(self) -> list[Event]:
        """Events since the last call; after the last one, a `Completion` or `Failure`, none."""
        taken = []
        while self._events:
            taken.append(self._events.popleft())
        return taken

    def cancel(self) -> None:
        """End the request at its next token, if it still goes on."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self._on_cancel()

    # --- for the loop -----------------------------------------------------------------------------

    def put(self, event: Event, *, is_urgent: bool) -> None:
        """Append an event; the listener is told at once where it is urgent."""
        self._events.append(event)
        self._is_untold = True
        if is_urgent:
            self.flush()

    def flush(self) -> None:
        """Tell the listener of what it does not know yet."""
        if self._is_untold:
            self._is_untold = False
            try:
                self._listen()
            except Exception:
                log.exception("a request is cancelled: its listener failed")
                self.cancel()
