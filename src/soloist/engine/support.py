"""Whether the decode kernel runs a model, and what memory it takes then."""

from dataclasses import dataclass

import torch

from soloist.errors import CudaMissing, GpuUnsupported, ShapeUnsupported
from soloist.jit.bindings import driver, nvrtc
from soloist.kv.layout import PAGE_POSITIONS
from soloist.megakernel.gpu import gpu_from_capability
from soloist.megakernel.header import BUILT_FOR
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import Plan, make_plan
from soloist.megakernel.sampling_header import sample_workspace_bytes
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.memory import KernelMemory
from soloist.parallel.share import share_of
from soloist.prefill.buffers import bytes_per_token
from soloist.prefill.part import require_prefill
from soloist.prefill.widths import MOST_PASS_TOKENS


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
    def memory(self) -> KernelMemory | None:
        """For the estimate."""
        if self.plan is None:
            return None
        plan = self.plan
        # The kernel's logits, the same adjusted, and counts of tokens; and prefill's logits.
        logits_bytes = (3 * MAX_QUERIES + 1) * plan.exchanges.sampled_rows * 4
        # The workspace, and one that stays fresh for each build.
        exchange_bytes = (1 + len(BUILT_FOR)) * plan.exchanges.num_bytes
        scratch_bytes = sample_workspace_bytes(plan.grid_blocks)
        # Counted for each rank, and so is everything here.
        share = share_of(plan.model, plan.ranks)
        return KernelMemory(
            image_bytes=plan.image.num_bytes,
            workspace_bytes=exchange_bytes + scratch_bytes + logits_bytes,
            page_tokens=PAGE_POSITIONS,
            prefill_tokens=MOST_PASS_TOKENS,
            prefill_bytes_per_token=bytes_per_token(share, plan.dtype),
        )


def find_support(
    config: ModelConfig, dtype: Dtype, device: torch.device, ranks: int = 1, sharing: int = 1
) -> Support:
    """What the kernel makes of this model, precision and device.

    Args:
        config: the model.
        dtype: of its weights.
        device: any of the ranks'; they are of one kind.
        ranks: over how many the model is spread.
        sharing: how many of them share a device.
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
    return support_on((p.major, p.minor), num_sms, shared_bytes, config, dtype, ranks)


def support_on(
    capability: tuple[int, int],
    num_sms: int,
    shared_bytes: int,
    config: ModelConfig,
    dtype: Dtype,
    ranks: int = 1,
) -> Support:
    """The same for a GPU in figures."""
    try:
        gpu = gpu_from_capability(*capability, num_sms, shared_bytes)
        plan = make_plan(config, dtype, gpu, ranks)
        if config.lanes is None:  # of others the plan knows all that reading prompts needs
            require_prefill(config)
        return Support(plan)
    except (GpuUnsupported, ShapeUnsupported) as error:
        return Support(None, f"{error.message}; running the reference implementation")
