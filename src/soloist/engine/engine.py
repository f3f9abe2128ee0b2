"""The engine: a loaded model that turns requests into events.

It owns the tokenizer, the weights and the KV cache; it knows nothing of terminals or HTTP.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from soloist.device import available_memory_bytes, cpu_name, usable_cores
from soloist.engine.bandwidth import brief_bandwidth
from soloist.engine.config import (
    EngineConfig,
    Resolved,
    cache_dir_bytes,
    host_cache_bytes,
    resolve,
    resolve_device,
)
from soloist.engine.core import EngineCore
from soloist.engine.events import Cancel, Chunk, Completion
from soloist.engine.executor import Executor
from soloist.engine.gpus import Placement, place
from soloist.engine.identity import facts_of, open_cache_dir
from soloist.engine.memory import require_host_memory, require_merging_memory, stage
from soloist.engine.opening import adapter_files, open_adapter_of, open_model
from soloist.engine.request import Request
from soloist.engine.support import Support
from soloist.engine.traffic import Traffic
from soloist.errors import ShapeUnsupported
from soloist.megakernel.plan import Plan
from soloist.model.checkpoint import Checkpoint
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import tensors
from soloist.model.folder import find_model, name_of
from soloist.model.kv_format import kv_format
from soloist.model.quantized import label as label_of
from soloist.model.quantized import words as words_of
from soloist.model.tensors import parameters
from soloist.model.torch_types import Weights
from soloist.prefill.packed_prompts import packs_prompts
from soloist.sampling import Sampler, SamplingParams
from soloist.settings import read_settings
from soloist.text import Message, TextStream, Tokenizer
from soloist.text.processor import Processor, ProcessorFiles
from soloist.weights.choice import Chosen, held_tensors, left_in_files
from soloist.weights.loading import Destination, Source, load_ranks
from soloist.weights.memory import merging_bytes, streamed_bytes
from soloist.weights.reading import LoadProgress
from soloist.weights.upload import Upload

if TYPE_CHECKING:
    from soloist.text.chat import ChatTemplate
    from soloist.text.grammar import Grammar, Grammars

OnProgress = Callable[[LoadProgress], None]
ExecutorName = Literal["decode kernel", "reference"]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading did: for the user to see.

    Attributes:
        folder: where the files are.
        num_parameters: of the model.
        streamed_bytes: that one decode step has to read at batch 1, KV cache apart.
        checkpoint_bytes: read from disk.
        load_s: reading them, to weights in place; before torch was imported or afterwards.
        device_name: for people.
        place: the same with how many of them there are.
        executor: what runs the model.
        refusal: on a GPU, why the decode kernel does not; otherwise empty.
        bandwidth_gb_per_s: measured read bandwidth, of all GPUs; None if it was not measured.
        host_cache_bytes: of host memory that cached prompts may take.
        cache_dir: where cached prompts are saved; None where none are.
        cache_dir_bytes: that files there may have together.
        weights: how the kernel stores the layers' matrices, and the head where it is quantised; on
            the reference, what their numbers were rounded to. Such as 'int4+int8 head'.
        weights_in_words: the same for people.
        accepted_fields: of config.json, that Soloist does not know.
        adapter: what was merged, as `name_of` calls it; empty without.
        model: what it was merged into, likewise.
        free_gpu_bytes: that the GPU had free before; of several the least; None on a CPU.
    """

    folder: Path
    num_parameters: int
    streamed_bytes: int
    checkpoint_bytes: int
    load_s: float
    device_name: str
    place: str
    executor: ExecutorName = "reference"
    refusal: str = ""
    bandwidth_gb_per_s: float | None = None
    host_cache_bytes: int = 0
    cache_dir: Path | None = None
    cache_dir_bytes: int = 0
    weights: str = ""
    weights_in_words: str = ""
    free_gpu_bytes: int | None = None
    accepted_fields: tuple[str, ...] = ()
    adapter: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """What a model takes of a GPU; of several GPUs each takes about as much.

    Attributes:
        taken_bytes: all since loading began: tensors, what torch keeps for others, and kernels.
        tensors_bytes: weights, KV cache and buffers, alive in this process.
        kv_bytes: of them the KV cache.
    """

    taken_bytes: int
    tensors_bytes: int
    kv_bytes: int


class Engine:
    """A model in memory: `generate` answers one request at a time, an `EngineLoop` several.

    Args:
        config: what the model is.
        model: what runs it.
        resolved: device, precision and context.
        folder: its files, from which tokenizer and chat template are read.
        templates: chat templates by name, instead of the folder's.
    """

    def __init__(
        self,
        config: ModelConfig,
        model: Executor,
        resolved: Resolved,
        folder: Path,
        report: LoadReport,
        templates: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        self.resolved = resolved
        self.report = report
        self.processor = Processor(
            ProcessorFiles(folder, config.vocab_size, resolved.context_tokens, templates)
        )
        self.model = model

    @classmethod
    def load(
        cls,
        asked: EngineConfig,
        on_progress: OnProgress = lambda _: None,
        upload: Upload | None = None,
    ) -> "Engine":
        """Find, check, estimate and load a model; nothing more is allocated before the estimate.

        Args:
            asked: what to load.
            on_progress: told after every tensor.
            upload: the model's files, if they are on their way to its GPU; closed here.

        Raises:
            UserError: the model, its files or an option cannot be used.
            DeviceError: it does not fit, or the device does not exist.
        """
        if cache_dir_bytes(asked) and asked.cache_dir is not None:
            open_cache_dir(asked.cache_dir)
        if upload is None:
            return cls._load(asked, on_progress, upload)
        with closing(upload):
            import_module("soloist.engine.kernel")  # while weights are on their way
            return cls._load(asked, on_progress, upload)

    @classmethod
    def _load(cls, asked: EngineConfig, on_progress: OnProgress, upload: Upload | None) -> "Engine":
        settings = read_settings()
        folder = find_model(asked.model, revision=asked.revision, offline=settings.hub_offline)
        checkpoint, chosen = open_model(folder, asked)
        config, specs = chosen.config, chosen.specs
        adapter = open_adapter_of(asked, checkpoint, chosen.in_files, offline=settings.hub_offline)
        device = torch.device(resolve_device(asked.device, devices()))
        placed = place(asked, device, config, _gpu_dtype(asked, checkpoint.dtype))
        device = placed.devices[0]
        if upload is not None and placed.ranks > 1:
            upload.close()  # ranks read their shares
            upload = None
        is_on_gpu = device.type == "cuda"
        free_bytes = placed.free_bytes() if is_on_gpu else available_memory_bytes()
        if upload is not None:
            free_bytes += upload.held_bytes()  # until weights are in place

        @cache
        def support_in(dtype: Dtype) -> Support:
            return placed.support(config, dtype, chosen.stored, kv_format(asked.kv, config, dtype))

        held = placed.share_of(config)  # by each GPU
        resolved = resolve(
            asked, held,
            lambda dtype: held_tensors(held, _in_files(asked, chosen, checkpoint, device, dtype)),
            checkpoint.dtype, str(device), free_bytes, lambda dtype: support_in(dtype).plan,
        )  # fmt: skip
        if placed.ranks > 1:
            resolved = replace(resolved, rank_devices=tuple(map(str, placed.devices)))
        require_merging_memory(merging_bytes(adapter), resolved.memory, free_bytes)
        # One thread a physical core: single-row products are bound by memory, and hyper-threads or
        # an oversubscribed container only add waiting.
        torch.set_num_threads(settings.threads or usable_cores())
        bandwidth = brief_bandwidth(device, free_bytes) if asked.measures_bandwidth else None
        support = support_in(resolved.dtype)
        plan, formats = support.plan, support.formats
        room_bytes = free_bytes - resolved.memory.needed_bytes
        staging = stage(
            tensors(held), resolved.dtype, plan, room_bytes, unpacks=asked.unpacks_prompts
        )
        if staging.on_host:
            require_host_memory(staging.bytes * placed.ranks, available_memory_bytes())
        host_bytes = host_cache_bytes(
            asked, has_kernel=plan is not None, free_bytes=available_memory_bytes()
        )
        to = Destination(
            placed.devices, resolved.dtype,
            for_kernel=plan is not None, stays_on_host=staging.on_host, formats=formats,
            in_files=_in_files(asked, chosen, checkpoint, device, resolved.dtype), plan=plan,
        )  # fmt: skip
        source = Source(
            checkpoint,
            config,
            specs,
            chosen.stored,
            chosen.rounding,
            upload,
            chosen.neurons,
            adapter,
        )
        weights, load_s = load_ranks(source, to, on_progress)
        if plan is None:
            model: Executor = _reference(asked, config, weights[0], resolved)
        else:
            model = _kernel(
                asked, plan, weights, resolved, placed.devices, host_bytes,
                keeps_rows=staging.keeps_rows,
            )  # fmt: skip
        _save_prompts(
            asked, model, checkpoint, config, resolved, plan, keeps_rows=staging.keeps_rows
        )
        label, words = _weights_names(chosen, plan, resolved.dtype)
        report = LoadReport(
            folder=folder,
            num_parameters=parameters(chosen.in_files),
            streamed_bytes=streamed_bytes(specs, resolved.dtype, formats, config),
            checkpoint_bytes=checkpoint.num_bytes,
            load_s=load_s,
            device_name=device_name(resolved.device),
            place=_place_name(resolved),
            executor="reference" if plan is None else "decode kernel",
            refusal=support.refusal,
            bandwidth_gb_per_s=None
            if bandwidth is None
            else bandwidth.gb_per_s * max(1, resolved.num_gpus),
            host_cache_bytes=host_bytes,
            cache_dir=asked.cache_dir,
            cache_dir_bytes=cache_dir_bytes(asked),
            weights=label,
            weights_in_words=words,
            free_gpu_bytes=free_bytes if is_on_gpu else None,
            accepted_fields=asked.accepted_fields,
            adapter="" if asked.adapter is None else name_of(asked.adapter),
            model=name_of(asked.model),
        )
        return cls(config, model, resolved, folder, report)

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model."""
        return self.processor.tokenizer

    @property
    def chat_template(self) -> "ChatTemplate":
        """The model's own template.

        Raises:
            TokenizerError: it has none.
        """
        return self.processor.chat_template

    @property
    def grammars(self) -> "Grammars":
        """Compiles what answers must look like, for this model's tokens."""
        return self.processor.grammars

    @property
    def traffic(self) -> Traffic:
        """What tokens make the device read."""
        return Traffic(
            self.report.streamed_bytes, self.config, self.resolved.kv, self.model.shares_steps
        )

    def gpu_memory(self) -> GpuMemory | None:
        """What the model takes of a GPU now; None on a CPU."""
        if self.report.free_gpu_bytes is None:
            return None
        devices = tuple(map(torch.device, self.resolved.rank_devices or (self.resolved.device,)))
        return GpuMemory(
            taken_bytes=self.report.free_gpu_bytes - Placement(devices).free_bytes(),
            tensors_bytes=torch.cuda.memory_allocated(devices[0]),
            kv_bytes=self.resolved.memory.kv_bytes,
        )

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the model's answer.

        The template writes every special token itself, so none is added here.
        """
        text = self.chat_template.render(messages, add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        cancel: Cancel | None = None,
        grammar: "Grammar | None" = None,
        *,
        prediction: str | Sequence[int] | None = None,
    ) -> Iterator[Chunk | Completion]:
        """Answer one prompt: chunks as tokens come, one completion at the end.

        Args:
            prompt: text, or token ids.
            params: how to sample and when to stop.
            cancel: ends the request at its next token once set.
            grammar: of the answer, made by `grammars`.
            prediction: text that the answer will mostly repeat, or its token ids.

        Raises:
            RequestError: empty or too long a prompt, or parameters outside the vocabulary; raised
                before the first event.
        """
        accepted = time.perf_counter()
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self.processor.check_prompt(prompt_ids, params.max_tokens)
        sampler = Sampler(
            params, self.config.vocab_size, prompt_ids, self.tokenizer.eos_ids,
            None if grammar is None else grammar.start(),
        )  # fmt: skip
        predicted = (
            self.processor.encode_prediction(prediction)
            if isinstance(prediction, str)
            else prediction
        )
        request = Request(
            prompt_ids, sampler, TextStream(self.tokenizer, params.stop), accepted=accepted,
            drafter=self.model.drafter(prompt_ids, predicted),
        )  # fmt: skip
        return self._events(request, cancel or Cancel())

    def _events(self, request: Request, cancel: Cancel) -> Iterator[Chunk | Completion]:
        core = EngineCore(self.model, self.tokenizer, traffic=self.traffic)
        with closing(core.run(request, lambda: cancel.requested)) as events:
            for event in events:
                if isinstance(event, Chunk | Completion):
                    yield event


def devices() -> list[str]:
    """What torch can run on here, best first."""
    return [*(f"cuda:{i}" for i in range(torch.cuda.device_count())), "cpu"]


def device_name(device: str) -> str:
    """A device's name for people."""
    return (
        torch.cuda.get_device_name(device)
        if device.startswith("cuda")
        else cpu_name(torch.get_num_threads())
    )


def _place_name(resolved: Resolved) -> str:
    """One device's name, or how many there are of them; and of how many ranks, if they share it."""
    name, ranks, gpus = device_name(resolved.device), len(resolved.rank_devices), resolved.num_gpus
    several = f"{gpus} × {name}" if gpus > 1 else name
    return f"{several} as {ranks} ranks" if ranks > gpus else several


def _reference(
    asked: EngineConfig, config: ModelConfig, weights: Weights, resolved: Resolved
) -> Executor:
    from soloist.engine.reference import ReferenceModel

    if asked.page_attention:
        raise ShapeUnsupported(f"attention from KV pages on {resolved.device}", "Hopper GPUs")
    if asked.packed_prompts:
        raise ShapeUnsupported(f"prompts from packed weights on {resolved.device}", "Hopper GPUs")
    if asked.unpacks_prompts:
        given = f"weights that are unpacked for prompts on {resolved.device}"
        raise ShapeUnsupported(given, "GPUs that have the kernel")
    if asked.tail_path == "decode":
        given = f"ends of prompts in rounds of the decode kernel on {resolved.device}"
        raise ShapeUnsupported(given, "GPUs that have the kernel")
    return ReferenceModel(
        config, weights, resolved.kv_tokens, asked.sequences,
        keeps_prefixes=asked.keeps_prefixes, drafts=asked.speculates, kv=resolved.kv,
    )  # fmt: skip


def _kernel(
    asked: EngineConfig,
    plan: Plan,
    weights: list[Weights],
    resolved: Resolved,
    devices: Sequence[torch.device],
    host_bytes: int,
    *,
    keeps_rows: bool,
) -> Executor:
    from soloist.engine.drafting import drafting_of
    from soloist.engine.kernel import SHARED_CHUNK_TOKENS, Capacity, load_kernel
    from soloist.prefill.widths import MOST_PASS_TOKENS

    capacity = Capacity(
        resolved.context_tokens,
        asked.sequences,
        resolved.kv_tokens,
        chunk_tokens=MOST_PASS_TOKENS if asked.sequences == 1 else SHARED_CHUNK_TOKENS,
        keeps_prefixes=asked.keeps_prefixes,
        host_bytes=host_bytes,
        page_attention=resolved.page_attention,
        tail_path=asked.tail_path,
        eight_bit_prompts=asked.eight_bit_prompts,
    )
    cache = read_settings().cache
    packs = packs_prompts(plan, asked=asked.packed_prompts, unpacks=asked.unpacks_prompts)
    model = load_kernel(
        plan, weights, devices, capacity, cache,
        keep_rows=keeps_rows and not packs, packed_prompts=packs,
    )  # fmt: skip
    model.drafting = drafting_of(plan) if asked.speculates else None
    if asked.prepare:
        model.prepare()
    torch.cuda.empty_cache()  # what only loading and packing took
    return model


def _save_prompts(
    asked: EngineConfig,
    model: Executor,
    checkpoint: Checkpoint,
    config: ModelConfig,
    resolved: Resolved,
    plan: Plan | None,
    *,
    keeps_rows: bool,
) -> None:
    """Have cached prompts saved, if that is asked for; hashes the weights if they are new."""
    if asked.cache_dir is None:
        return
    adapter = adapter_files(asked, offline=read_settings().hub_offline)
    is_packed = packs_prompts(plan, asked=asked.packed_prompts, unpacks=asked.unpacks_prompts)
    facts = facts_of(
        asked.cache_dir, checkpoint.folder, [*checkpoint.files, *adapter], config, resolved,
        asked.rounding, is_packed, asked.eight_bit_prompts, keeps_rows,
        resolved.page_attention,
    )  # fmt: skip
    model.save_to(asked.cache_dir, cache_dir_bytes(asked), facts)


def _weights_names(chosen: Chosen, plan: Plan | None, dtype: Dtype) -> tuple[str, str]:
    """How matrices are stored: for result files, and for people."""
    stored = chosen.stored
    if plan is not None:
        stored = {name: stored[name] for name in plan.formats}
    layers = [stored.get(spec.name) for spec in chosen.specs if spec.is_layer_matrix]
    head = stored.get("head")
    return label_of(layers, head, dtype.value), words_of(layers, head, dtype.value)


def _gpu_dtype(asked: EngineConfig, stored: Dtype) -> Dtype:
    """What weights on a GPU are in; `resolve` refuses other names of precisions."""
    return next((dtype for dtype in Dtype if dtype.value == asked.precision), stored)


def _in_files(
    asked: EngineConfig,
    chosen: Chosen,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: Dtype,
) -> frozenset[str]:
    """Names of experts that stay in the files."""
    is_left = device.type == "cpu" and asked.adapter is None
    return left_in_files(chosen, checkpoint, dtype) if is_left else frozenset()
