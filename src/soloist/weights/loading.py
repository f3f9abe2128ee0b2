"""From a checkpoint to every rank's weights: upload, reading and sharding in their order."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from soloist.model.checkpoint import Checkpoint
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import tensors
from soloist.model.torch_types import Weights
from soloist.weights.distribution import distribute
from soloist.weights.reading import LoadProgress, read_tensors
from soloist.weights.upload import Upload
from soloist.weights.uploaded import early_files


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's weights come from.

    Attributes:
        checkpoint: its files; held against the model's tensors already.
        config: what the model is.
        upload: the same files, if they are on their way to the first rank's GPU.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    upload: Upload | None = None


@dataclass(frozen=True, slots=True)
class Destination:
    """Where they go, and in which form.

    Attributes:
        devices: of each rank.
        dtype: what every tensor is converted to.
        for_kernel: each rank gets the share that is packed for the decode kernel; otherwise the
            only rank gets whole tensors, for the reference.
        stays_on_host: they wait there to be packed, for want of room on the GPU.
    """

    devices: tuple[torch.device, ...]
    dtype: Dtype
    for_kernel: bool
    stays_on_host: bool

    @property
    def home(self) -> torch.device:
        """Where whole tensors are read to.

        Several ranks' shares are cut on the host, where one tensor after the other lies.
        """
        is_alone = len(self.devices) == 1
        return self.devices[0] if is_alone and not self.stays_on_host else torch.device("cpu")


def load_ranks(
    source: Source, to: Destination, on_progress: Callable[[LoadProgress], None]
) -> tuple[list[Weights], float]:
    """Every rank's weights, and the seconds that reading took, before now and here.

    `on_progress` is told after every tensor; the source's upload is closed.

    Raises:
        NotFinite, CheckpointError: as `read_tensors`.
        LaunchError: a device cannot take its share; it names the rank.
    """
    start, upload = time.perf_counter(), source.upload
    with early_files(upload, to.home) as open_stored:
        read = read_tensors(
            source.checkpoint, tensors(source.config), to.dtype, to.home, on_progress, open_stored
        )
        if to.for_kernel:
            weights = distribute(read, source.config, to.devices, stays_on_host=to.stays_on_host)
        else:
            weights = [dict(read)]
    end = time.perf_counter()
    if upload is None:
        return weights, end - start
    return weights, upload.ended_s - upload.began_s + end - max(start, upload.ended_s)
