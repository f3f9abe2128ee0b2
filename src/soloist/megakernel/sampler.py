"""What sampling in the decode kernel needs: a build, buffers, and masks while launches run."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from soloist.megakernel.abi import MASKS, SAMPLE_BUFFERS
from soloist.megakernel.choice import PackedChoices
from soloist.megakernel.header import MASK_READY_WORDS
from soloist.megakernel.kernel import DecodeKernel
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import Plan
from soloist.megakernel.sampling_header import MASK_END, sample_workspace_bytes
from soloist.sampling.constraint import Words, num_words


class KernelSampler:
    """The build of the decode kernel that samples, and its buffers in memory."""

    def __init__(self, plan: Plan, kernel: DecodeKernel, device: torch.device) -> None:
        rows = plan.exchanges.sampled_rows
        self.kernel = kernel
        self._seen = torch.zeros(MAX_QUERIES, rows, dtype=torch.int32, device=device)
        self._adjusted = torch.zeros(MAX_QUERIES, rows, dtype=torch.float32, device=device)
        workspace_bytes = sample_workspace_bytes(plan.grid_blocks)
        self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=device)
        # Of bans and biases, as they are in memory: most launches have those of the last one.
        self._lists = (torch.zeros(0, device=device), torch.zeros(0, device=device))
        self._listed = (b"", b"")
        words = num_words(plan.model.vocab_size)
        # Two are used alternately where other ranks may still read one after the first rank has
        # shown its token.
        self._copies = 1 if plan.ranks == 1 else 2
        self.masks = torch.zeros(
            self._copies, MAX_QUERIES, words, dtype=torch.int32, pin_memory=True
        )
        self.ready = torch.zeros(MAX_QUERIES, MASK_READY_WORDS, dtype=torch.int32, pin_memory=True)
        self._mask_words = self.masks.numpy().view(np.uint32)
        self._ready_words = self.ready.numpy().view(np.uint32)
        self._allowed: dict[int, int] = {}  # by masked query, the latest round with a mask

    def begin(self, masks: dict[int, Words], num_given: Sequence[int]) -> None:
        """Forget the last launch's masks; give what each query's first choice may take.

        Args:
            masks: by query.
            num_given: by query, rounds whose input tokens are given: before, it chooses nothing.
        """
        self._allowed = {query: num_given[query] - 1 for query in masks}
        for query, words in masks.items():
            self.allow(query, words)

    def allow(self, query: int, words: Words | None) -> None:
        """As of `Decoder`."""
        if query not in self._allowed:
            return
        if words is None:
            del self._allowed[query]
            last = MASK_END
        else:
            last = self._allowed[query] = self._allowed[query] + 1
            self._mask_words[last % self._copies, query] = words
        # After the words: x86 keeps stores in order. Pairs with `wait_for_masks` in choose.cuh.
        self._ready_words[query, 0] = last

    def abandon(self) -> None:
        """No masked query gets a mask any more."""
        for query in list(self._allowed):
            self.allow(query, None)

    def upload(self, packed: PackedChoices) -> NDArray[np.void]:
        """Make the buffers ready for a launch; return where they are, as `SAMPLE_BUFFERS`."""
        device = self._seen.device
        self._workspace.zero_()
        for query, words in packed.seen.items():
            self._seen[query, : len(words)].copy_(torch.from_numpy(words.view(np.int32)))
        listed = packed.list_ids.tobytes(), packed.list_values.tobytes()
        if listed != self._listed:
            # Such copies wait for a launch that runs. They stay as long as launches read them.
            self._lists = (
                torch.from_numpy(packed.list_ids.view(np.int32)).to(device),
                torch.from_numpy(packed.list_values).to(device),
            )
            self._listed = listed
        list_ids, list_values = self._lists
        return SAMPLE_BUFFERS.record(
            seen=self._seen.data_ptr(),
            adjusted=self._adjusted.data_ptr(),
            workspace=self._workspace.data_ptr(),
            list_ids=list_ids.data_ptr(),
            list_values=list_values.data_ptr(),
        )

    @property
    def where_masks_are(self) -> NDArray[np.void]:
        """As `MASKS`."""
        return MASKS.record(words=self.masks.data_ptr(), ready=self.ready.data_ptr())
