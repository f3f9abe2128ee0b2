"""The engine: a loaded model that turns requests into events.

It owns the tokenizer, the weights and the KV cache; it knows nothing of terminals or HTTP.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from soloist.device import available_memory_bytes, cpu_name, usable_cores
from soloist.engine.bandwidth import brief_bandwidth
from soloist.engine.config import EngineConfig, Resolved, host_cache_bytes, resolve, resolve_device
from soloist.engine.core import EngineCore
from soloist.engine.events import Cancel, Chunk, Completion
from soloist.engine.executor import Executor
from soloist.engine.gpus import Placement, place
from soloist.engine.kernel import SHARED_CHUNK_TOKENS, Capacity, KernelModel, load_kernel
from soloist.engine.memory import require_host_memory, require_merging_memory, stage
from soloist.engine.opening import open_adapter_of, open_model
from soloist.engine.reference import ReferenceModel
from soloist.engine.request import Request
from soloist.engine.support import Support
from soloist.engine.traffic import Traffic
from soloist.megakernel.plan import Plan
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import tensors
from soloist.model.folder import find_model, name_of
from soloist.model.quantized import label as label_of
from soloist.model.quantized import words as words_of
from soloist.model.tensors import parameters
from soloist.model.torch_types import Weights
from soloist.prefill.widths import MOST_PASS_TOKENS
from soloist.sampling import Sampler, SamplingParams
from soloist.settings import read_settings
from soloist.text import ChatTemplate, Message, TextStream, Tokenizer
from soloist.text.grammar import Grammar, Grammars
from soloist.text.processor import Processor, ProcessorFiles
from soloist.weights.choice import Chosen
from soloist.weights.loading import Destination, Source, load_ranks
from soloist.weights.memory import merging_bytes, streamed_bytes
from soloist.weights.reading import LoadProgress
from soloist.weights.upload import Upload

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
        with nullcontext() if upload is None else closing(upload):
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
            return placed.support(config, dtype, chosen.stored)

        held = placed.share_of(config)  # by each GPU
        resolved = resolve(
            asked, held, tensors(held), checkpoint.dtype, str(device), free_bytes,
            lambda dtype: support_in(dtype).plan,
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
        staging = stage(tensors(held), resolved.dtype, plan, room_bytes)
        if staging.on_host:
            require_host_memory(staging.bytes * placed.ranks, available_memory_bytes())
        host_bytes = host_cache_bytes(
            asked, has_kernel=plan is not None, free_bytes=available_memory_bytes()
        )
        to = Destination(
            placed.devices, resolved.dtype,
            for_kernel=plan is not None, stays_on_host=staging.on_host, formats=formats,
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
                keep_rows=staging.keeps_rows,
            )  # fmt: skip
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
    def chat_template(self) -> ChatTemplate:
        """The model's own template.

        Raises:
            TokenizerError: it has none.
        """
        return self.processor.chat_template

    @property
    def grammars(self) -> Grammars:
        """Compiles what answers must look like, for this model's tokens."""
        return self.processor.grammars

    @property
    def traffic(self) -> Traffic:
        """What tokens make the device read."""
        return Traffic(
            self.report.streamed_bytes, self.config, self.resolved.dtype, self.model.shares_steps
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
        grammar: Grammar | None = None,
    ) -> Iterator[Chunk | Completion]:
        """Answer one prompt: chunks as tokens come, one completion at the end.

        Args:
            prompt: text, or token ids.
            params: how to sample and when to stop.
            cancel: ends the request at its next token once set.
            grammar: of the answer, made by `grammars`.

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
        request = Request(
            prompt_ids, sampler, TextStream(self.tokenizer, params.stop), accepted=accepted
        )
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
) -> ReferenceModel:
    return ReferenceModel(
        config, weights, resolved.kv_tokens, asked.sequences, keeps_prefixes=asked.keeps_prefixes
    )


def _kernel(
    asked: EngineConfig,
    plan: Plan,
    weights: list[Weights],
    resolved: Resolved,
    devices: Sequence[torch.device],
    host_bytes: int,
    *,
    keep_rows: bool,
) -> KernelModel:
    capacity = Capacity(
        resolved.context_tokens,
        asked.sequences,
        resolved.kv_tokens,
        chunk_tokens=MOST_PASS_TOKENS if asked.sequences == 1 else SHARED_CHUNK_TOKENS,
        keeps_prefixes=asked.keeps_prefixes,
        host_bytes=host_bytes,
    )
    cache = read_settings().cache
    model = load_kernel(plan, weights, devices, capacity, cache, keep_rows=keep_rows)
    if asked.prepare:
        model.prepare()
    return model


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
