"""What reading prompts is to an executor, whoever does it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

TokenIds = Tensor | Sequence[int] | NDArray[np.int64]

# Most tokens of a pass: more of them make library products hardly faster.
MOST_PASS_TOKENS = 2048


class PromptRunner(ABC):
    """Reads prompts in chunks.

    Attributes:
        most_tokens: of one chunk.
        widths: ascending; where there are any, a token's bits do not depend on how its prompt was
            cut at multiples of `BLOCK_TOKENS`. Of prompts shorter than that nothing is said.
    """

    most_tokens: int
    widths: tuple[int, ...] = ()

    def settle_widths(self) -> None:  # noqa: B027 - most have none
        """Find `widths`, and have passes of these from now on; before graphs are recorded."""

    @abstractmethod
    def run(
        self,
        token_ids: TokenIds,
        position: int,
        page_table: Tensor | Sequence[int],
        *,
        want_logits: bool = True,
    ) -> Tensor | None:
        """Run T consecutive tokens of one sequence; their keys and values join the pool.

        Args:
            token_ids: [T], best on the host.
            position: of the first token; the pool holds everything before it.
            page_table: pages of the sequence, with room for these positions; best on the host.
            want_logits: whether the last token's are computed.

        Returns:
            fp32 logits [V] of the last token, valid until the next call, or None.
        """

    def run_prompt(
        self,
        token_ids: TokenIds,
        page_table: Tensor | Sequence[int],
        chunk_tokens: int,
        cancelled: Callable[[], bool],
        position: int = 0,
    ) -> Tensor | None:
        """Run a prompt in chunks of `chunk_tokens`, from `position` of its sequence on.

        The host does not run ahead of the device, so `cancelled` is heard within one chunk.

        Returns:
            fp32 logits [V] of the last token, valid until the next call; None where `cancelled`,
            which is asked before every chunk, said so.
        """
        logits = None
        for start in range(0, len(token_ids), chunk_tokens):
            if cancelled():
                return None
            stop = min(start + chunk_tokens, len(token_ids))
            is_last, chunk = stop == len(token_ids), token_ids[start:stop]
            logits = self.run(chunk, position + start, page_table, want_logits=is_last)
        return logits
