"""How much memory a model needs on the machine that this runs on; a task on each kind of node."""

import psutil
import pynvml  # type: ignore[import-untyped]

from soloist.deploy.config import ModelSpec
from soloist.deploy.machines import Memory
from soloist.engine.memory import Footprint
from soloist.errors import DownloadFailed, ModelNotFound
from soloist.model.checkpoint import open_checkpoint
from soloist.model.dtype import Dtype
from soloist.model.families import FAMILIES, read_config, tensors
from soloist.model.folder import CONFIG_FILE, find_model
from soloist.model.kv_format import kv_format

# Bits of a number at least, where weights are rounded or were stored quantised: what scales and
# packing add is left to the estimate that a replica makes before it allocates anything.
_LEAST_BITS = 4


def memory_for(spec: ModelSpec, node: str) -> Memory | None:
    """The least it can need; None where its files are not here yet, or no GPU tells its size.

    Raises:
        SoloistError: its files cannot be used.
    """
    try:
        folder = find_model(spec.model, revision=spec.revision, offline=True)
    except (ModelNotFound, DownloadFailed):
        return None
    config = read_config(folder / CONFIG_FILE, accepted=spec.accept_fields)
    specs = tensors(config)
    checkpoint = open_checkpoint(folder)
    checkpoint.check(specs, FAMILIES[config.family].ignored(config))
    dtype = Dtype.BF16 if spec.precision == "auto" else Dtype(spec.precision)
    kv = kv_format(spec.kv, config, dtype)
    needs = Footprint(config, specs, dtype, kv=kv).estimate(spec.context or 1)
    weights_bytes = needs.weights_bytes
    if spec.weights is not None or checkpoint.quantization is not None:
        weights_bytes = weights_bytes * _LEAST_BITS // (8 * dtype.num_bytes)
    needed_bytes = weights_bytes + needs.kv_bytes
    if not spec.gpus:
        return Memory(node, needed_bytes, psutil.virtual_memory().total, "the host")
    if (room_bytes := _gpu_bytes()) is None:
        return None
    return Memory(node, needed_bytes // spec.gpus, room_bytes, "each GPU")


def _gpu_bytes() -> int | None:
    """Of this machine's first GPU, by NVML, which no other process has to make room for."""
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total)
    except pynvml.NVMLError:
        return None
