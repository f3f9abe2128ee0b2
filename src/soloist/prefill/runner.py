"""Prompts in chunks: through library products and attention, and their keys into the pool."""

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from soloist.errors import DeviceError, LaunchError
from soloist.model.config import ModelConfig
from soloist.prefill.elementwise import Chunk
from soloist.prefill.part import Part
from soloist.prefill.settling import settled_widths
from soloist.prefill.upload import TokenIds


class Prefill:
    """Runs prompts of one model on all of its ranks, in the dtype of their pools.

    What a rank waits for was always queued before, so that ranks may share a GPU and its queue, and
    calls that wait for a whole GPU wait for nothing that is still to come.

    Args:
        parts: one for each rank, in order; their GPUs can reach each other's memory.

    Attributes:
        most_tokens: of one chunk.
        widths: ascending; where there are any, a token's bits do not depend on how its prompt was
            cut at multiples of `LEAST_CHUNK_TOKENS`. Of prompts shorter than that nothing is said.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        assert [p.share.rank for p in parts] == list(range(parts[0].share.ranks)), "every rank"
        self.parts = list(parts)
        self.most_tokens = min(part.most_tokens for part in parts)
        self.widths: tuple[int, ...] = ()
        for part in self.parts:
            part.connect(self.parts)

    @property
    def config(self) -> ModelConfig:
        """The whole model."""
        return self.parts[0].share.whole

    def settle_widths(self) -> None:
        """Find `widths`, and have passes of these from now on; before graphs are recorded."""
        widths = settled_widths(self.parts)
        if widths is None:
            return
        for part in self.parts:
            part.take_widths(widths)
        self.widths, self.most_tokens = widths.passes, widths.passes[-1]

    @torch.inference_mode()
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
            fp32 logits [V] of the last token, valid until the next call, or None. They are on the
            first rank's device.

        Raises:
            KernelStuck: a rank waited for another in vain; it names both.
            LaunchError: one of several GPUs failed.
        """
        try:
            chunks = [
                part.placed(token_ids, position, page_table, want_logits=want_logits)
                for part in self.parts
            ]
            if all(part.has_graph(chunk) for part, chunk in self._each(chunks)):
                _in_turn(part.graphs.replay(chunk.num_rows) for part, chunk in self._each(chunks))
            else:
                self._advance(chunks, want_logits=want_logits)
            return self._logits() if want_logits else None
        except (RuntimeError, DeviceError) as error:
            if len(self.parts) == 1:
                raise
            stuck = (part.fused.failure for part in self.parts if part.fused is not None)
            reason = str(error).splitlines()[0]
            failure = LaunchError("a prompt on several GPUs", reason)
            raise next(filter(None, stuck), failure) from error

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

    @torch.inference_mode()
    def capture(self, sizes: Iterable[int]) -> None:
        """Record CUDA graphs for first chunks of up to each of `sizes` tokens.

        Of sizes in `widths` they are for later chunks as well. Shorter chunks are padded to the
        next size, so sizes are best a factor of two or less apart, and the smallest one small; but
        only full chunks take the graph of `most_tokens`, unless that is a width.
        Matrices have to stay at the same addresses, and what it takes to get them is recorded too.

        Where ranks share a GPU nothing is recorded: they would wait for graphs behind their own.
        """
        devices = {part.pool.device for part in self.parts}
        if len(devices) < len(self.parts):
            return
        for size in sorted(set(sizes), reverse=True):  # the largest first: its memory serves others
            chunks = [part.begin_capture(size) for part in self.parts]
            self._advance(chunks, want_logits=True)  # libraries set themselves up
            for part, chunk in self._each(chunks):
                part.record(chunk)
        if len(self.parts) > 1:
            self._start_graphs()

    def _start_graphs(self) -> None:
        """Queue each recorded pass once, over no token, with ranks that wait for nobody.

        A graph's first start may wait for its whole GPU, and so must not find anybody waiting.
        """

        def everywhere(step: Callable[[Part], None]) -> None:
            for part in self.parts:
                step(part)
                torch.cuda.synchronize(part.pool.device)

        everywhere(lambda part: part.wait_for_nobody(alone=True))
        everywhere(lambda part: part.graphs.replay_all())
        everywhere(lambda part: part.wait_for_nobody(alone=False))

    def _each(self, chunks: Sequence[Chunk]) -> Iterable[tuple[Part, Chunk]]:
        return zip(self.parts, chunks, strict=True)

    def _advance(self, chunks: Sequence[Chunk], *, want_logits: bool) -> None:
        """All ranks stage by stage."""
        _in_turn(part.stages(chunk, want_logits=want_logits) for part, chunk in self._each(chunks))

    def _logits(self) -> Tensor:
        if len(self.parts) == 1:
            return self.parts[0].logits
        device = self.parts[0].pool.device
        logits = torch.cat([part.logits.to(device) for part in self.parts])
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # whoever fails is named here
        return logits


def _in_turn(passes: Iterable[Iterable[None]]) -> None:
    for _ in zip_longest(*passes):
        pass
