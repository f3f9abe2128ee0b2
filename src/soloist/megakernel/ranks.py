"""Launches of several ranks: prepared everywhere, then started everywhere, then heard from one."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from soloist.errors import LaunchError
from soloist.jit.peers import allow_access
from soloist.megakernel.launch import Column, Decoder


class Ranks:
    """The decoders of a plan's ranks, each on a GPU of its own or with SMs of its own.

    Args:
        decoders: one for each rank, in order.

    Raises:
        LaunchError: ranks share a GPU and do not fit it at once: their plan is for too many SMs.
        NoPeerAccess: GPUs cannot reach each other's memory.
    """

    def __init__(self, decoders: Sequence[Decoder]) -> None:
        assert [d.rank for d in decoders] == list(range(decoders[0].plan.ranks)), "every rank"
        self._decoders = list(decoders)
        devices = [d.pool.device.index or 0 for d in decoders]
        for device in set(devices):
            _require_fit(device, devices.count(device) * decoders[0].plan.grid_blocks)
        allow_access(sorted(set(devices)))
        for decoder in self._decoders:
            decoder.peers = self._decoders

    def start(
        self,
        columns: Sequence[Column],
        rounds: int,
        *,
        logits: Sequence[Tensor] | None = None,
    ) -> None:
        """Start a launch; arguments as of `Decoder.start`.

        Args:
            columns: the same for all ranks.
            rounds: 1 … max_rounds.
            logits: for each rank [rounds, columns, rows] of its part of the vocabulary.
        """
        for rank, decoder in enumerate(self._decoders):
            decoder.prepare(columns, rounds, logits=None if logits is None else logits[rank])
        for decoder in self._decoders:
            decoder.go()

    def tokens(self) -> Iterator[list[int]]:
        """The launch's tokens, which all ranks choose alike; ends when all have ended.

        Raises:
            KernelStuck: a wait inside a kernel lasted too long.
            LaunchError: a kernel failed.
        """
        first, *others = self._decoders
        yield from first.tokens()
        for decoder in others:
            for _ in decoder.tokens():
                pass

    def stop(self) -> None:
        """Ask the running launch to end at its next round."""
        self._decoders[0].stop()

    def run(
        self,
        columns: Sequence[Column],
        rounds: int,
        *,
        logits: Sequence[Tensor] | None = None,
    ) -> list[list[int]]:
        """`start`, then all tokens."""
        self.start(columns, rounds, logits=logits)
        return list(self.tokens())


def _require_fit(device: int, blocks: int) -> None:
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    if blocks > num_sms:
        raise LaunchError(
            f"ranks that share GPU {device}",
            f"they have {blocks} blocks, which have to run at once, and it has {num_sms} SMs",
            "plan for a part of the SMs each",
        )
