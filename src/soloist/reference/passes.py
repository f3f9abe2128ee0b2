"""A pass over consecutive tokens of one sequence that can be left after every block.

Between two blocks a pass holds its residual stream and nothing else, so any thread may go on with
it, and steps of other sequences may come in between: no bit depends on either.
"""

from collections.abc import Generator

from torch import Tensor

from soloist.reference.blocks import Step
from soloist.reference.cache import Scratch


class Pass:
    """One pass, part by part: attention and MLP of every layer in turn, and the head at the end.

    Args:
        step: what its blocks share.
        blocks: computes one part each time it is asked; returns the logits that are wanted.

    Attributes:
        num_done: parts that are computed. The keys and values of a layer are in the cache once its
            attention is.
        is_over: nothing is left to compute.
        logits: of the tokens asked for, once it is over; as `Reference.forward` returns them.
    """

    def __init__(self, step: Step, blocks: Generator[None, None, Tensor | None]) -> None:
        self._step, self._blocks = step, blocks
        self.num_done = 0
        self.is_over = False
        self.logits: Tensor | None = None

    @property
    def position(self) -> int:
        """Of the first token."""
        return self._step.position

    @property
    def num_tokens(self) -> int:
        """T."""
        return self._step.num_tokens

    def advance(self, scratch: Scratch) -> None:
        """Compute the next part, in inference mode; `scratch` is the caller's until it returns."""
        self._step.use(scratch)
        try:
            next(self._blocks)
        except StopIteration as end:
            self.is_over, self.logits = True, end.value
        self.num_done += 1
