"""Tensors of a model cut for its ranks: each read once, and taken to all GPUs side by side."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from soloist.errors import LaunchError
from soloist.model.config import ModelConfig
from soloist.model.torch_types import Weights
from soloist.parallel.share import part_of
from soloist.weights.sharding import shard_all

# Tensors that are read while others are still on their way to a GPU.
_AHEAD = 4


def distribute(
    tensors: Iterable[tuple[str, Tensor]],
    config: ModelConfig,
    devices: Sequence[torch.device],
    *,
    stays_on_host: bool,
) -> list[Weights]:
    """Every rank's share of every tensor.

    Args:
        tensors: names and whole tensors, which are given up one after the other.
        config: the whole model.
        devices: of each rank. One that is alone has its tensors where they already are.
        stays_on_host: all but the embedding waits there to be packed, for want of room.

    Raises:
        LaunchError: a device cannot take them; it names the rank.
    """
    if len(devices) == 1:
        return [_of_one(tensors, config)]
    shares = [part_of(config, len(devices), rank) for rank in range(len(devices))]
    weights: list[Weights] = [{} for _ in shares]

    def take(rank: int, name: str, values: Tensor) -> None:
        with failures_of(rank, devices[rank]):
            for part_name, part in shard_all(shares[rank], {name: values}).items():
                waits = stays_on_host and part_name != "embedding"
                weights[rank][part_name] = part.to("cpu" if waits else devices[rank])

    on_their_way: deque[list[Future[None]]] = deque()
    with ThreadPoolExecutor(len(shares), "soloist-shard") as pool:
        for name, values in tensors:
            on_their_way.append([pool.submit(take, r, name, values) for r in range(len(shares))])
            if len(on_their_way) > _AHEAD:
                _settle(on_their_way.popleft())
        for jobs in on_their_way:
            _settle(jobs)
    return weights


def _of_one(tensors: Iterable[tuple[str, Tensor]], config: ModelConfig) -> Weights:
    share = part_of(config, 1, 0)
    return {
        part_name: part
        for name, values in tensors
        for part_name, part in shard_all(share, {name: values}).items()
    }


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
