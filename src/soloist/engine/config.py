"""What a user asks of an engine, and the pure function that turns every 'auto' into a decision."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from soloist.engine.memory import Footprint, MemoryEstimate
from soloist.engine.tail_path import TAIL_PATHS, TailPath
from soloist.errors import DeviceMissing, OutOfMemory, SettingError, gigabytes
from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.memory import kv_bytes_per_token
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import Plan
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.kv_format import KvFormat, KvName, kv_format
from soloist.model.quantized import AT_LOAD, Codes
from soloist.model.tensors import TensorSpec
from soloist.prefill.packed_prompts import packs_prompts
from soloist.prefill.page_form import page_form
from soloist.weights.choice import Rounding

# Of the host's free memory, for cached prompts.
HOST_CACHE_SHARE = 4

# Of files in the folder of saved prompts, where nobody says.
CACHE_DIR_BYTES = 20 * 10**9

Precision = Literal["auto", "fp32", "bf16", "fp16"]
GpuCount = int | Literal["auto"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What to load and how.

    Attributes:
        model: a folder, a GGUF file, a shipped model's name or a hub id; 'FOLDER:Q4_K_M' and
            'owner/name:Q4_K_M' where there are several GGUF files.
        device: 'auto', 'cpu', 'cuda' or 'cuda:N'.
        precision: of weights and, without `kv`, of the KV cache; 'auto' takes fp32 on a CPU where
            it fits, else bf16, and the checkpoint's own on a GPU. A CPU that has no products in a
            16-bit precision, as most have none in fp16, multiplies in fp32 what it stores in 16
            bits.
        context_tokens: room for prompt and answer; None takes the model's own, as far as it fits.
            It chooses the factors of LongRoPE; None chooses those of the model's own context.
        revision: branch, tag or commit on the hub.
        prepare: build and record while loading what later requests may need: the kernel that
            samples, graphs for prompts of several lengths. Without, a process that answers one
            request starts sooner, and a first sampled request may wait for a compiler.
        sequences: requests that may run side by side, 1 … 8.
        keeps_prefixes: keep keys and values of prompts for later ones that begin alike, in what
            room requests leave.
        measures_bandwidth: read memory for half a second while loading, so that MBU is known.
        host_cache_bytes: of pinned host memory, at most, for cached prompts that the GPU has no
            pages for; None takes a share of what is free.
        cache_dir: a folder where cached prompts are saved and found again; None saves none.
        cache_dir_bytes: of all files there, at most; None takes 20 GB.
        gpus: how many run the model together: 1, 2, 4 or 8; 'auto' takes as many as there are with
            access to each other's memory and as the model can use.
        rank_devices: instead, the GPU of each rank by number, such as (0, 0, 1, 1). Ranks that
            share a GPU get as many of its SMs each: for tests, it makes nothing faster.
        weights: what the matrices of the layers of a 16-bit checkpoint are rounded to; also by its
            name, 'int4', 'int8' or 'fp8'.
        head_weights: likewise of the LM head.
        kv: what keys and values are rounded to, 'int8', 'fp8' or 'int4'; None stores them in the
            precision of the model. In bf16 on the decode kernel, in any precision elsewhere.
        speculates: check several drafted tokens in a step, where that pays (docs/speculation.md).
        adapter: a folder or hub id with a LoRA in peft's form, which is merged into the model while
            it is loaded, before anything is rounded.
        packed_prompts: prompts are read from the packed weights, and rows are never kept. None does
            so wherever these products run: on one Hopper GPU, but for models with lanes and
            mixtures (docs/prompts.md).
        unpacks_prompts: each matrix is unpacked when a pass needs it. Elsewhere rows lie beside the
            packed weights where they fit, which is quicker and takes as much memory again.
        eight_bit_prompts: with `packed_prompts`, activations of prompts are rounded to FP8, a scale
            for each token, where they meet matrices in FP8 with one scale per row: for models that
            were made for it. Others lose accuracy. Generated tokens have 16 bits in any case.
        page_attention: whether prompts attend to KV pages by a kernel of ours, without a copy of
            what was cached, or by a library. None takes the kernel where it runs: on Hopper GPUs,
            without `kv`, of models without lanes. The ways have other bits.
        tail_path: which way a prompt's last tokens are read, those behind its last chunk, which no
            other prompt gets: by a pass ('prefill'), in rounds of the decode kernel ('decode'), or
            by a rule of measured figures ('auto': a few tokens by rounds, on one Hopper GPU). The
            ways have other bits; what was kept of a prompt has no part in the choice.
        accepted_fields: of config.json, that Soloist does not know and that do not change the
            model's output, as the caller knows; a field inside another as 'outer.inner'.
    """

    model: str = "etude"
    device: str = "auto"
    precision: Precision = "auto"
    context_tokens: int | None = None
    revision: str | None = None
    prepare: bool = True
    sequences: int = 1
    keeps_prefixes: bool = False
    measures_bandwidth: bool = False
    host_cache_bytes: int | None = None
    cache_dir: Path | None = None
    cache_dir_bytes: int | None = None
    gpus: GpuCount = 1
    rank_devices: tuple[int, ...] = ()
    weights: Codes | None = None
    head_weights: Codes | None = None
    kv: KvName | None = None
    packed_prompts: bool | None = None
    unpacks_prompts: bool = False
    eight_bit_prompts: bool = False
    page_attention: bool | None = None
    tail_path: TailPath = "auto"
    accepted_fields: tuple[str, ...] = ()
    adapter: str | None = None
    speculates: bool = True

    @property
    def rounding(self) -> Rounding:
        """What matrices are rounded to.

        Raises:
            SettingError: a name that is none of them.
        """
        return Rounding(_codes("weights", self.weights), _codes("head_weights", self.head_weights))

    @property
    def shares_gpu(self) -> bool:
        """Several ranks run on one GPU."""
        return len(set(self.rank_devices)) < len(self.rank_devices)


@dataclass(frozen=True, slots=True)
class Resolved:
    """Every choice made.

    Attributes:
        device: torch device name; of several ranks the first one's.
        dtype: of weights.
        context_tokens: room for prompt and answer.
        memory: what will be allocated, on each of several GPUs.
        kv_tokens: positions of the KV cache, shared by all requests: at least one context.
        kv: how keys and values are stored.
        page_attention: prompts attend to KV pages by a kernel of ours.
        rank_devices: of each rank, where there are several.
    """

    device: str
    dtype: Dtype
    context_tokens: int
    memory: MemoryEstimate
    kv_tokens: int
    kv: KvFormat
    page_attention: bool = False
    rank_devices: tuple[str, ...] = ()

    @property
    def num_gpus(self) -> int:
        """0 on a CPU."""
        return len(set(self.rank_devices)) or int(self.device.startswith("cuda"))


def _codes(field: str, given: str | None) -> Codes | None:
    if given is not None and given not in list(AT_LOAD):
        raise SettingError(field, given, ", ".join(AT_LOAD))
    return None if given is None else AT_LOAD[given]


def resolve_device(asked: str, present: Sequence[str]) -> str:
    """The device to use; `present` lists what the machine has, best first.

    Raises:
        DeviceMissing: `asked` is not among them.
    """
    if asked == "auto":
        return present[0]
    matches = [name for name in present if name == asked or name.startswith(f"{asked}:")]
    if not matches:
        raise DeviceMissing(asked, present)
    return matches[0]


def resolve(
    asked: EngineConfig,
    model: ModelConfig,
    specs_in: Callable[[Dtype], tuple[TensorSpec, ...]],
    stored: Dtype,
    device: str,
    available_bytes: int,
    plan_in: Callable[[Dtype], Plan | None] = lambda _: None,
) -> Resolved:
    """Decide precision and context, and hold the sum against the memory there is.

    `specs_in` gives the tensors that take memory in a precision, `plan_in` the decode kernel's
    plan, or None where it does not run.

    Raises:
        SettingError: a context beyond the model's, or a KV cache that there is not.
        KvUnsupported: raised by `plan_in` where the kernel does not store such a cache.
        ShapeUnsupported: prompts shall attend to KV pages where no kernel of ours does.
        OutOfMemory: it does not fit; the hint names what would.
    """
    if asked.precision not in ("auto", "fp32", "bf16", "fp16"):
        raise SettingError("precision", asked.precision, "auto, fp32, bf16, fp16")
    if asked.tail_path not in TAIL_PATHS:
        raise SettingError("tail path", asked.tail_path, ", ".join(TAIL_PATHS))
    if not 1 <= asked.sequences <= MAX_QUERIES:
        raise SettingError("sequences", asked.sequences, f"1 … {MAX_QUERIES}")
    require_kv_attention(asked)
    require_packed_eight_bits(asked)
    require_one_way_of_prompts(asked)
    wanted = asked.context_tokens
    if wanted is not None and not 1 <= wanted <= model.context_tokens:
        raise SettingError(
            "context", wanted, f"1 … {model.context_tokens:,}, the positions the model was made for"
        )

    def attends_pages(plan: Plan | None) -> bool:
        if plan is None:
            return False
        return page_form(plan, asked=asked.page_attention, shares_gpu=asked.shares_gpu) is not None

    def footprint(dtype: Dtype) -> Footprint:
        specs, plan, kv = specs_in(dtype), plan_in(dtype), kv_format(asked.kv, model, dtype)
        packed = packs_prompts(plan, asked=asked.packed_prompts, unpacks=asked.unpacks_prompts)
        return Footprint(model, specs, dtype, plan, packed, attends_pages(plan), kv)

    if asked.precision != "auto":
        dtype = Dtype(asked.precision)
    elif device == "cpu":
        longest = footprint(Dtype.FP32).fitting_context(available_bytes)
        dtype = Dtype.FP32 if longest >= (wanted or 1) else Dtype.BF16
    else:
        dtype = stored
    context = wanted or max(1, footprint(dtype).fitting_context(available_bytes))
    memory = footprint(dtype).require(context, available_bytes)
    # Further contexts for requests side by side take half of what is then left. The other half
    # serves what may, but need not, be in memory: on a GPU, rows for prefill.
    kv = kv_format(asked.kv, model, dtype)
    left, token_bytes = available_bytes - memory.needed_bytes, kv_bytes_per_token(model, kv)
    whole_pages = -(-context // PAGE_POSITIONS) * PAGE_POSITIONS
    further = min(left // 2 // token_bytes, (asked.sequences - 1) * whole_pages)
    further -= further % PAGE_POSITIONS
    memory = replace(memory, kv_bytes=memory.kv_bytes + further * token_bytes)
    pages = attends_pages(plan_in(dtype))
    return Resolved(device, dtype, context, memory, context + further, kv, pages)


def require_kv_attention(asked: EngineConfig) -> None:
    """Refuse prompts that attend to KV pages by a kernel of ours where pages hold codes.

    Raises:
        SettingError: both are asked for.
    """
    if asked.page_attention and asked.kv is not None:
        raise SettingError(
            "--kv", asked.kv, "none with --page-attention, which reads keys and values in 16 bits",
            "leave out --kv or --page-attention",
        )  # fmt: skip


def require_one_way_of_prompts(asked: EngineConfig) -> None:
    """Refuse prompts that read packed weights and have them unpacked.

    Raises:
        SettingError: both are asked for.
    """
    if asked.packed_prompts and asked.unpacks_prompts:
        raise SettingError(
            "--unpack-prompts", "on, with --packed-prompts", "one of both options",
            "leave one out: packed weights are read as they are",
        )  # fmt: skip


def require_packed_eight_bits(asked: EngineConfig) -> None:
    """Refuse activations in 8 bits where prompts are multiplied by numbers in 16.

    Raises:
        SettingError: 8 bits are asked for, and packed prompts are not.
    """
    if asked.eight_bit_prompts and not asked.packed_prompts:
        raise SettingError(
            "--eight-bit-prompts", "on, without --packed-prompts", "both, on one Hopper GPU",
            "add --packed-prompts, or leave out --eight-bit-prompts",
        )  # fmt: skip


def cache_dir_bytes(asked: EngineConfig) -> int:
    """What the folder of saved prompts may hold; 0 where there is none.

    Raises:
        SettingError: a bound or a folder that would have no effect.
    """
    wanted, folder = asked.cache_dir_bytes, asked.cache_dir
    if folder is None:
        if wanted is not None:
            raise SettingError(
                "cache dir's bound", gigabytes(wanted), "only with a folder",
                "name one with --cache-dir",
            )  # fmt: skip
        return 0
    if not asked.keeps_prefixes:
        raise SettingError(
            "cache dir", str(folder), "none without the prefix cache",
            "leave out --cache-dir or --no-prefix-cache",
        )  # fmt: skip
    if wanted is not None and wanted <= 0:
        raise SettingError("cache dir's bound", f"{wanted / 1e9:g} GB", "more than 0 GB")
    return CACHE_DIR_BYTES if wanted is None else wanted


def host_cache_bytes(asked: EngineConfig, *, has_kernel: bool, free_bytes: int) -> int:
    """Host memory, at most, for offloaded prefix cache; `free_bytes` of it are free.

    Raises:
        SettingError: a size that is negative or would have no effect.
        OutOfMemory: it is not there.
    """
    wanted, name = asked.host_cache_bytes, "host cache"
    if wanted is None:
        return free_bytes // HOST_CACHE_SHARE if has_kernel and asked.keeps_prefixes else 0
    if wanted < 0:
        raise SettingError(name, gigabytes(wanted), "0 GB or more")
    if wanted and not asked.keeps_prefixes:
        raise SettingError(name, gigabytes(wanted), "0 GB without the prefix cache")
    if wanted and not has_kernel:
        raise SettingError(
            name, gigabytes(wanted), "0 GB without the decode kernel",
            "the reference implementation caches prefixes in its own KV cache",
        )  # fmt: skip
    if wanted > free_bytes:
        fits = f"up to {gigabytes(free_bytes)} are free"
        raise OutOfMemory("the host cache", wanted, free_bytes, fits)
    return wanted
