"""What a pass has to know goes to the device at once."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from soloist.prefill.elementwise import Chunk

TokenIds = Tensor | Sequence[int] | NDArray[np.int64]

# Numbers before the page table, and where among them are `place`, `last`, `last_place`, `last_ends`
# and `query_bounds` of a chunk.
_NUM_FIRST = 10
_FIRST = (0, 2), (2, 3), (3, 5), (4, 8), (8, 10)


class Upload:
    """Makes chunks on a device, always in the same words: a captured graph reads them there.

    Args:
        num_pages: of the longest page table.
        most_tokens: of a chunk.
        device: of `words`.

    Attributes:
        words: int32 on the device: some numbers, the page table, token ids.
    """

    def __init__(self, num_pages: int, most_tokens: int, device: torch.device) -> None:
        self._first_id = _NUM_FIRST + num_pages
        count = self._first_id + most_tokens
        self.words = torch.zeros(count, dtype=torch.int32, device=device)
        self._views = tuple(self.words[start:stop] for start, stop in _FIRST)
        self._page_table = self.words[_NUM_FIRST : self._first_id]
        self._staged = torch.zeros(count, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._staged_words = self._staged.numpy()

    def chunk(
        self,
        ids: TokenIds,
        position: int,
        pages: Tensor | Sequence[int],
        rows: int,
        *,
        is_short_prompt: bool = False,
    ) -> Chunk:
        """A chunk of `rows` rows, of which `ids` are the first, when the last pass is over.

        The first token of every prompt waits for this, so it goes from lists to pinned words, and
        all words to the device at once: taking a part of a tensor costs the host more than copying
        the rest costs the device.
        """
        if self.words.device.type == "cuda":
            torch.cuda.current_stream(self.words.device).synchronize()
        words, first_id, tokens = self._staged_words, self._first_id, len(ids)
        last = max(tokens - 1, 0)
        end, count = position + last, first_id + rows
        words[:_NUM_FIRST] = (position, tokens, last, end, 0, 1, 0, end + 1, 0, tokens)
        words[_NUM_FIRST : _NUM_FIRST + len(pages)] = _on_host(pages)
        words[first_id : first_id + tokens] = _on_host(ids)
        words[first_id + tokens : count] = 0
        self.words.copy_(self._staged, non_blocking=True)
        place, last_row, last_place, last_ends, query_bounds = self._views
        return Chunk(
            position=position,
            num_tokens=tokens,
            ids=self.words[first_id:count],
            place=place,
            last=last_row,
            last_place=last_place,
            last_ends=last_ends,
            query_bounds=query_bounds,
            page_table=self._page_table,
            is_short_prompt=is_short_prompt,
        )


def _on_host(values: TokenIds) -> NDArray[np.int64] | Sequence[int]:
    return values.cpu().numpy() if isinstance(values, Tensor) else values
