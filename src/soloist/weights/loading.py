"""From a checkpoint to every rank's weights: upload, reading and sharding in their order."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from soloist.megakernel.plan import Plan
from soloist.megakernel.weight_format import WeightFormat
from soloist.model.checkpoint import Checkpoint
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.quantized import SCALES, ZEROS, Quantized
from soloist.model.tensors import TensorSpec
from soloist.model.torch_types import Weights
from soloist.weights.distribution import distribute
from soloist.weights.layout import in_groups
from soloist.weights.reading import Forms, LoadProgress, read_tensors
from soloist.weights.upload import Upload
from soloist.weights.uploaded import early_files

if TYPE_CHECKING:
    from soloist.model.adapter import Adapter


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's weights come from.

    Attributes:
        checkpoint: its files; held against the model's tensors already.
        config: what the model is.
        specs: its tensors.
        stored: those that are quantised, or become so, and what they are.
        rounding: those of them that are in 16 bits in the files.
        neurons: of `down` matrices, as of `Chosen`.
        upload: the same files, if they are on their way to the first rank's GPU.
        adapter: is merged into them; it was held against them already.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    specs: tuple[TensorSpec, ...]
    stored: Mapping[str, Quantized] = field(default_factory=dict)
    rounding: Mapping[str, Quantized] = field(default_factory=dict)
    upload: Upload | None = None
    neurons: Mapping[str, Any] = field(default_factory=dict)
    adapter: "Adapter | None" = None


@dataclass(frozen=True, slots=True)
class Destination:
    """Where they go, and in which form.

    Attributes:
        devices: of each rank.
        dtype: what every tensor without a format is converted to.
        for_kernel: each rank gets the share that is packed for the decode kernel; otherwise the
            only rank gets whole tensors, for the reference.
        stays_on_host: they wait there to be packed, for want of room on the GPU.
        formats: of matrices that the kernel takes quantised.
        in_files: as of `Forms`; for the reference on a CPU.
        plan: of the kernel: its experts are packed as they are read, so that they lie neither on
            the host nor twice on a GPU. None leaves them in rows.
    """

    devices: tuple[torch.device, ...]
    dtype: Dtype
    for_kernel: bool
    stays_on_host: bool
    formats: Mapping[str, WeightFormat] = field(default_factory=dict)
    in_files: frozenset[str] = frozenset()
    plan: Plan | None = None

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

    Experts come packed, of a destination with a plan: see `distribute`.

    `on_progress` is told after every tensor; the source's upload is closed.

    Raises:
        NotFinite, CheckpointError: as `read_tensors`.
        LaunchError: a device cannot take its share; it names the rank.
    """
    start, upload = time.perf_counter(), source.upload
    keep = {name: source.stored[name] for name in to.formats}
    forms = Forms(keep, source.rounding, source.adapter, to.devices[0], to.in_files)
    with early_files(upload, to.home) as open_stored:
        read = read_tensors(
            source.checkpoint, source.specs, to.dtype, to.home, on_progress, open_stored, forms
        )
        if to.for_kernel:
            read = regrouped(read, source.specs, source.stored, to.formats)
            read = with_neurons_moved(
                read, {name: order for name, order in source.neurons.items() if name in keep}
            )
            weights = distribute(
                read, source.config, to.devices, stays_on_host=to.stays_on_host, plan=to.plan
            )
        else:
            weights = [dict(read)]
    end = time.perf_counter()
    if upload is None:
        return weights, end - start
    return weights, upload.ended_s - upload.began_s + end - max(start, upload.ended_s)


def regrouped(
    tensors: Iterable[tuple[str, Tensor]],
    specs: Iterable[TensorSpec],
    stored: Mapping[str, Quantized],
    formats: Mapping[str, WeightFormat],
) -> Iterator[tuple[str, Tensor]]:
    """Scales and zeros of the groups that the formats' meanings have, repeated where need be.

    Args:
        tensors: names and whole tensors; of matrices that have formats all parts.
        specs: what they are.
        stored: quantised matrices as they were read.
        formats: as of `formats_of`.
    """
    columns = {spec.name: spec.shape[-1] for spec in specs}
    for name, values in tensors:
        matrix, _, part = name.rpartition(".")
        if f".{part}" not in (SCALES, ZEROS):
            yield name, values
            continue
        given, meaning = stored[matrix], formats[matrix].meaning
        assert meaning is not None, "a format of its own says what its parts mean"
        if meaning.group == given.group:
            yield name, values
        else:
            yield name, in_groups(values, given, meaning.group, columns[matrix])


def with_neurons_moved(
    tensors: Iterable[tuple[str, Tensor]], neurons: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Rows of gate and up, and their biases, in the order of the columns of `down`.

    Args:
        tensors: names and whole tensors, or parts of them.
        neurons: of each `down` that lies in another order, which [F] of the file each is.
    """
    orders = {}
    for down, order in neurons.items():
        layer = down.removesuffix("down")
        for name in ("gate_up", "gate_up" + SCALES, "gate_up" + ZEROS, "gate_up_bias"):
            orders[layer + name] = torch.from_numpy(order)
    for name, values in tensors:
        order = orders.get(name)
        yield name, values if order is None else _moved(values, order.to(values.device))


def _moved(values: Tensor, order: Tensor) -> Tensor:
    """Of gate [F, …] and of up below it; FP8 as bytes, of which every torch can take some."""
    dtype = values.dtype
    plain = values.view(torch.uint8) if dtype.itemsize == 1 else values
    moved: Tensor = plain.unflatten(0, (2, -1))[:, order]
    return moved.flatten(0, 1).view(dtype)
