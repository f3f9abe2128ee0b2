"""Whether the decode kernel runs a model."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from soloist.errors import CudaMissing, GpuUnsupported, KvUnsupported, ShapeUnsupported
from soloist.jit.bindings import driver, nvrtc
from soloist.megakernel.gpu import Gpu, gpu_from_capability
from soloist.megakernel.maths import require_architecture
from soloist.megakernel.plan import Plan, make_plan
from soloist.megakernel.weight_format import WeightFormat
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.kv_format import KvFormat
from soloist.model.quantized import Quantized
from soloist.weights.formats import formats_of


@dataclass(frozen=True, slots=True)
class Support:
    """Whether the decode kernel runs a model in one precision on one device.

    Attributes:
        plan: None where it does not.
        refusal: a sentence that says why not; empty on a CPU, where nobody expects it.
    """

    plan: Plan | None
    refusal: str = ""

    @property
    def formats(self) -> Mapping[str, WeightFormat]:
        """Of matrices that it takes quantised; others are numbers in the model's precision."""
        return {} if self.plan is None else self.plan.formats


def find_support(
    config: ModelConfig,
    dtype: Dtype,
    device: torch.device,
    ranks: int = 1,
    sharing: int = 1,
    stored: Mapping[str, Quantized] | None = None,
    kv: KvFormat | None = None,
) -> Support:
    """What the kernel makes of this model, precision and device.

    Args:
        config: the model.
        dtype: of its weights, but for those that are quantised.
        device: any of the ranks'; they are of one kind.
        ranks: over how many the model is spread.
        sharing: how many of them share a device.
        stored: quantised matrices by name.
        kv: how keys and values are stored; None stores them in `dtype`.

    Raises:
        KvUnsupported: the kernel refuses nothing else of this model.
    """
    if device.type != "cuda":
        return Support(None)
    try:
        driver()
        nvrtc()
    except CudaMissing as error:
        return Support(
            None,
            f"the decode kernel cannot run: {error.message}; running the reference implementation",
        )
    p = torch.cuda.get_device_properties(device)
    shared_bytes = p.shared_memory_per_block_optin  # type: ignore[attr-defined]  # stubs lack it
    num_sms = p.multi_processor_count // sharing
    try:
        gpu = gpu_from_capability(p.major, p.minor, num_sms, shared_bytes)
    except GpuUnsupported as error:
        return _refused(error)
    return support_of(gpu, config, dtype, ranks, stored, kv)


def support_on(
    capability: tuple[int, int],
    num_sms: int,
    shared_bytes: int,
    config: ModelConfig,
    dtype: Dtype,
    ranks: int = 1,
    stored: Mapping[str, Quantized] | None = None,
) -> Support:
    """The same for a GPU in figures, with keys and values in `dtype`."""
    try:
        gpu = gpu_from_capability(*capability, num_sms, shared_bytes)
    except GpuUnsupported as error:
        return _refused(error)
    return support_of(gpu, config, dtype, ranks, stored)


def support_of(
    gpu: Gpu,
    config: ModelConfig,
    dtype: Dtype,
    ranks: int = 1,
    stored: Mapping[str, Quantized] | None = None,
    kv: KvFormat | None = None,
) -> Support:
    """The same for a GPU.

    Quantised matrices that the kernel does not read, or not beside the rest, are in 16 bits. Keys
    and values that it does not store so are refused: nobody expects the reference, or matrices in
    16 bits, for want of them.
    """

    def planned(formats: dict[str, WeightFormat]) -> Plan:
        try:
            return make_plan(config, dtype, gpu, ranks, formats, kv)
        except ShapeUnsupported as error:
            if kv is None or kv.is_plain:
                raise
            make_plan(config, dtype, gpu, ranks, formats)  # raises where --kv is not the reason
            raise KvUnsupported(kv.name, error.message, wants_bf16=dtype is Dtype.FP16) from error

    try:
        require_architecture(config, gpu.arch)
        if stored and (formats := formats_of(stored, config, ranks)):
            with suppress(ShapeUnsupported):
                return Support(planned(formats))
        return Support(planned({}))
    except ShapeUnsupported as error:
        return _refused(error)


def _refused(error: GpuUnsupported | ShapeUnsupported) -> Support:
    return Support(None, f"{error.message}; running the reference implementation")
