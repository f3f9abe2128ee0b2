"""Tensors of a model cut for its ranks: each read once, and taken to all GPUs side by side.

Experts are packed for the decode kernel at once.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from soloist.errors import LaunchError
from soloist.megakernel.plan import Plan
from soloist.model.config import ModelConfig
from soloist.model.torch_types import Weights
from soloist.parallel.share import part_of
from soloist.weights.packed import EXPERTS, ExpertPacker
from soloist.weights.sharding import shard_all

# Tensors that are read while others are still on their way to a GPU.
_AHEAD = 4


def distribute(
    tensors: Iterable[tuple[str, Tensor]],
    config: ModelConfig,
    devices: Sequence[torch.device],
    *,
    stays_on_host: bool,
    plan: Plan | None = None,
) -> list[Weights]:
    """Every rank's share of every tensor; all experts packed, under one name.

    Args:
        tensors: names and whole tensors, which are given up one after the other.
        config: the whole model.
        devices: of each rank. One that is alone has its tensors where they already are.
        stays_on_host: all but the embedding and experts waits there to be packed, for want of room.
        plan: of the kernel; without, experts come like all else.

    Raises:
        LaunchError: a device cannot take them; it names the rank.
    """
    ranks = [_Rank(config, len(devices), i, device, plan) for i, device in enumerate(devices)]
    if len(ranks) == 1:
        for name, values in tensors:
            ranks[0].take(name, values, None)
        return [ranks[0].taken()]

    def take(rank: _Rank, name: str, values: Tensor) -> None:
        with failures_of(rank.number, rank.device):
            rank.take(name, values, torch.device("cpu") if stays_on_host else rank.device)

    on_their_way: deque[list[Future[None]]] = deque()
    with ThreadPoolExecutor(len(ranks), "soloist-shard") as pool:
        for name, values in tensors:
            on_their_way.append([pool.submit(take, rank, name, values) for rank in ranks])
            if len(on_their_way) > _AHEAD:
                _settle(on_their_way.popleft())
        for jobs in on_their_way:
            _settle(jobs)
    return [rank.taken() for rank in ranks]


class _Rank:
    """One rank's share of what comes.

    Args:
        config: the whole model.
        ranks: of how many.
        number: which one.
        device: its GPU.
        plan: of the kernel, which packs experts; None leaves them as they come.
    """

    def __init__(
        self, config: ModelConfig, ranks: int, number: int, device: torch.device, plan: Plan | None
    ) -> None:
        self.number, self.device, self._share = number, device, part_of(config, ranks, number)
        self._weights: Weights = {}
        self._packer = None
        if plan is not None and plan.has_experts:
            with failures_of(number, device) if ranks > 1 else nullcontext():
                self._packer = ExpertPacker(plan, device)

    def take(self, name: str, values: Tensor, to: torch.device | None) -> None:
        """Its part of a tensor, taken `to` there, or left where it is.

        Experts and an embedding that is taken anywhere get to its GPU.
        """
        for part_name, part in shard_all(self._share, {name: values}).items():
            if self._packer is not None and self._packer.takes(part_name):
                self._packer.add(part_name, part)
            elif to is None:
                self._weights[part_name] = part
            else:
                self._weights[part_name] = part.to(self.device if part_name == "embedding" else to)

    def taken(self) -> Weights:
        """All of it, once everything has come."""
        if self._packer is not None:
            self._weights[EXPERTS] = self._packer.packed()
        return self._weights


def _settle(jobs: Iterable[Future[None]]) -> None:
    for job in jobs:
        job.result()


@contextmanager
def failures_of(rank: int, device: torch.device) -> Iterator[None]:
    """Name the rank in what torch says of its device.

    Raises:
        LaunchError: instead of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        what = f"loading rank {rank} onto {device}"
        raise LaunchError(what, str(error).splitlines()[0]) from error
