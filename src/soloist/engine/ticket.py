"""One request as seen from outside the engine's thread: what came so far, and a way to end it."""

from collections import deque
from collections.abc import Callable

from soloist.engine.events import Event


class Ticket:
    """Events of one request, from the loop's thread to any other.

    The listener is told of the first token and of the end at once, of what lies between at most
    every `flush_s`: waking a reader costs more than a token.

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
        flush_s: float,
        on_cancel: Callable[[], None],
    ) -> None:
        self.prompt_ids, self.top_logprobs = prompt_ids, top_logprobs
        self.is_cancelled = False
        self.num_cached = 0
        self._listen, self._flush_s, self._on_cancel = listen, flush_s, on_cancel
        self._events: deque[Event] = deque()
        self._told_at = float("-inf")
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

    def put(self, event: Event, now: float, *, is_urgent: bool) -> None:
        """Append an event, and tell the listener if it is time."""
        self._events.append(event)
        if is_urgent or now - self._told_at >= self._flush_s:
            self._told_at, self._is_untold = now, False
            self._listen()
        else:
            self._is_untold = True

    def flush(self) -> None:
        """Tell the listener of what it does not know yet: the next token may take a while."""
        if self._is_untold:
            self._is_untold = False
            self._listen()
