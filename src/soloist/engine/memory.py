"""How much memory a model needs, before any of it is allocated: the sum of what each part reports.

The sum has three parts: weights, KV cache for the chosen context, and scratch for activations.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import partial

from soloist.device import HEADROOM_BYTES
from soloist.errors import OutOfMemory, gigabytes
from soloist.kv.allocator import num_pages_of
from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.memory import kv_bytes_per_token
from soloist.megakernel.memory import workspace_bytes
from soloist.megakernel.plan import Plan
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.kv_format import KvFormat, plain
from soloist.model.tensors import TensorSpec
from soloist.prefill.batched_experts import pieces_at_once
from soloist.prefill.buffers import prefill_bytes
from soloist.prefill.expert_form import reads_packed_experts
from soloist.prefill.packed_form import arranged_bytes, gates_all, parted_bytes
from soloist.prefill.widths import MOST_PASS_TOKENS
from soloist.reference.memory import scratch_bytes
from soloist.weights.memory import (
    packed_bytes,
    parts_bytes,
    row_bytes,
    unpacked_experts_bytes,
    unpacking_bytes,
)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes by purpose."""

    weights_bytes: int
    kv_bytes: int
    scratch_bytes: int

    @property
    def total_bytes(self) -> int:
        """Everything together."""
        return self.weights_bytes + self.kv_bytes + self.scratch_bytes

    @property
    def needed_bytes(self) -> int:
        """The same with the reserve: what has to be free."""
        return self.total_bytes + HEADROOM_BYTES


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a model takes of one device.

    Attributes:
        config: what the device holds.
        specs: its tensors, but those that a CPU leaves in files.
        dtype: of weights and, where nothing else is said, KV cache.
        plan: of the decode kernel; without, the reference runs.
        packed_prompts: prompts are read from the packed weights.
        page_attention: prompts attend to KV pages by a kernel of ours (`page_form` decides).
        kv: what the reference stores keys and values as; None stores them as they are.
    """

    config: ModelConfig
    specs: tuple[TensorSpec, ...]
    dtype: Dtype
    plan: Plan | None = None
    packed_prompts: bool = False
    page_attention: bool = False
    kv: KvFormat | None = None

    def estimate(self, context_tokens: int) -> MemoryEstimate:
        """With so many positions of KV cache.

        On the kernel with weights packed only: rows for prefill are kept as well where there is
        room for them.
        """
        config, dtype, plan = self.config, self.dtype, self.plan
        if plan is None:
            return MemoryEstimate(
                weights_bytes=row_bytes(self.specs, dtype),
                kv_bytes=kv_bytes_per_token(config, self.kv or plain(dtype)) * context_tokens,
                scratch_bytes=scratch_bytes(config, dtype, context_tokens, kv=self.kv),
            )
        num_pages = num_pages_of(context_tokens)
        prefill = prefill_bytes(
            config, plan, num_pages, attends_pages=self.page_attention,
            gates=self.packed_prompts and gates_all(plan),
        )  # fmt: skip
        if not reads_packed_experts(plan):
            at_once = partial(pieces_at_once, hidden_size=config.hidden_size)
            prefill += unpacked_experts_bytes(plan, at_once)
        # On its way to the kernel's order a matrix takes what it takes on its way back.
        packing = unpacking_bytes(plan, self.specs)
        running = workspace_bytes(plan) + prefill
        if self.packed_prompts:
            most_tokens = min(MOST_PASS_TOKENS, num_pages * PAGE_POSITIONS)
            own = arranged_bytes(plan, most_tokens) + parted_bytes(plan)
            scratch = max(packing, running + own)
        else:
            scratch = running + packing
        return MemoryEstimate(
            weights_bytes=packed_bytes(plan),
            kv_bytes=plan.kv_layout.pool_bytes(num_pages),
            scratch_bytes=scratch,
        )

    def fitting_context(self, available_bytes: int) -> int:
        """The longest context that fits, at most the model's own; 0 where weights alone do not."""
        lengths = range(1, self.config.context_tokens + 1)
        return bisect_right(lengths, available_bytes, key=lambda n: self.estimate(n).needed_bytes)

    def require(self, context_tokens: int, available_bytes: int) -> MemoryEstimate:
        """The estimate, or a refusal that names what would fit.

        Raises:
            OutOfMemory: weights, cache and scratch exceed `available_bytes`.
        """
        dtype, needs = self.dtype, self.estimate(context_tokens)
        if needs.needed_bytes <= available_bytes:
            return needs
        in_bf16 = replace(self, dtype=Dtype.BF16, plan=None)
        what = (
            f"this model in {dtype.value} with a context of {context_tokens:,} tokens "
            f"(weights {gigabytes(needs.weights_bytes)}, KV cache {gigabytes(needs.kv_bytes)}, "
            f"scratch {gigabytes(needs.scratch_bytes)}, reserve {gigabytes(HEADROOM_BYTES)})"
        )
        if longest := self.fitting_context(available_bytes):
            hint = f"a context of {longest:,} tokens fits: --context {longest}"
        elif dtype is Dtype.FP32 and (shorter := in_bf16.fitting_context(available_bytes)):
            hint = (
                f"in bf16 a context of {shorter:,} tokens fits: "
                f"--precision bf16 --context {shorter}"
            )
        else:
            room = max(0, available_bytes - HEADROOM_BYTES) // dtype.num_bytes
            hint = (
                f"models of up to about {room / 1e9:.2g} billion parameters fit in {dtype.value}; "
                "use a smaller model or free memory"
            )
        raise OutOfMemory(what, needs.needed_bytes, available_bytes, hint)


@dataclass(frozen=True, slots=True)
class Staging:
    """Where weights are while they are packed, and which rows stay for prefill.

    Attributes:
        bytes: of a rank's weights before they are packed, but for those of experts, which are
            packed as they are read.
        on_host: they wait there, one after the other, for want of room on the GPU.
        keeps_rows: numbers in rows lie beside the packed weights, but for those of experts.
    """

    bytes: int
    on_host: bool
    keeps_rows: bool


def stage(
    specs: tuple[TensorSpec, ...],
    dtype: Dtype,
    plan: Plan | None,
    room_bytes: int,
    *,
    unpacks: bool = False,
) -> Staging:
    """What fits into the room that a device has beside all that the estimate counts.

    Args:
        specs: tensors of what the device holds.
        dtype: of those that have no format of their own.
        plan: of the decode kernel; the reference packs nothing.
        room_bytes: free beside the estimate.
        unpacks: no rows are to be kept.
    """
    if plan is None:
        return Staging(parts_bytes(specs, dtype, {}), on_host=False, keeps_rows=True)
    # Numbers come out of parts one matrix after the other. Experts are packed as they are read, and
    # no rows of them are kept.
    rest = [spec for spec in specs if spec.expert is None]
    in_parts = parts_bytes(rest, dtype, plan.formats)
    on_host, rows = room_bytes < in_parts, row_bytes(rest, dtype)
    has_room = room_bytes >= (rows if on_host else max(in_parts, rows))
    return Staging(in_parts, on_host, keeps_rows=has_room and not unpacks)


def require_merging_memory(
    merging_bytes: int, estimate: MemoryEstimate, available_bytes: int
) -> None:
    """What merging an adapter takes fits beside the weights, while there is no KV cache yet.

    Raises:
        OutOfMemory: it does not.
    """
    needed_bytes = estimate.weights_bytes + merging_bytes + HEADROOM_BYTES
    if needed_bytes > available_bytes:
        what = (
            f"merging the adapter (weights {gigabytes(estimate.weights_bytes)}, beside them "
            f"{gigabytes(merging_bytes)}, reserve {gigabytes(HEADROOM_BYTES)})"
        )
        hint = "free memory, take --precision bf16, or merge the adapter into a folder elsewhere"
        raise OutOfMemory(what, needed_bytes, available_bytes, hint)


def require_host_memory(weights_bytes: int, available_bytes: int) -> None:
    """Weights that pass through the host's memory fit there.

    Raises:
        OutOfMemory: they do not.
    """
    needed_bytes = weights_bytes + HEADROOM_BYTES
    if needed_bytes > available_bytes:
        what = f"holding weights of {gigabytes(weights_bytes)} on the host while the GPU packs them"
        raise OutOfMemory(
            what, needed_bytes, available_bytes, "free memory, or use a smaller --context"
        )
