"""Tokens of one request from the decode kernel: what a GPU does where the reference did it before.

A short prompt rides the decode kernel, a longer one goes through library products in chunks. The
host chooses the first token from the prompt's logits, the kernel all others, many rounds a launch.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from soloist.errors import BadLogits, CudaMissing, GpuUnsupported, ShapeUnsupported
from soloist.jit.bindings import driver, nvrtc
from soloist.megakernel.choice import Choice
from soloist.megakernel.gpu import gpu_from_capability
from soloist.megakernel.header import MAX_STOPS
from soloist.megakernel.launch import Column, Decoder
from soloist.megakernel.packing import gather, unpack
from soloist.megakernel.plan import MAX_COLUMNS, PAGE_POSITIONS, Plan, make_plan
from soloist.megakernel.sampling_header import bad_score, sample_workspace_bytes
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.memory import KernelMemory
from soloist.model.weights import TORCH_DTYPES, Weights
from soloist.prefill.elementwise import rope_table
from soloist.prefill.fused import FusedElementwise
from soloist.prefill.pages import PagePool
from soloist.prefill.runner import CHUNK_TOKENS, Matrices, Prefill, require_prefill
from soloist.sampling import Sampler

# Prompts of up to so many tokens ride the decode kernel: three rounds of eight columns take less
# time than the launches of one pass of prefill.
RIDING_TOKENS = 24

# First chunks of up to so many tokens run as captured graphs where weights stay at one address, and
# full ones.
CAPTURED_TOKENS = (32, 64, 128, 256)


class Launches(Protocol):
    """What generating needs of a `Decoder`."""

    max_rounds: int
    logits: Tensor

    def start(self, columns: Sequence[Column], rounds: int) -> None:
        """Start a launch."""
        ...

    def tokens(self) -> Iterator[list[int]]:
        """The launch's tokens as they come, to its end."""
        ...

    def stop(self) -> None:
        """Ask the launch to end soon."""
        ...

    def run(self, columns: Sequence[Column], rounds: int) -> list[list[int]]:
        """A launch from start to end."""
        ...


class PromptPass(Protocol):
    """What generating needs of a `Prefill`."""

    most_tokens: int

    def run_prompt(
        self,
        token_ids: Sequence[int],
        page_table: Sequence[int],
        chunk_tokens: int,
        cancelled: Callable[[], bool],
    ) -> Tensor | None:
        """Logits [V] of the last token, or None where cancelled."""
        ...


class KernelGenerator:
    """The token loop, over anything that launches rounds and reads prompts.

    Args:
        decoder: runs rounds.
        prefill: reads prompts that are too long to ride.
        page_table: of sequence 0, which all requests use in turn.
        vocab_size: V.
    """

    def __init__(
        self, decoder: Launches, prefill: PromptPass, page_table: Sequence[int], vocab_size: int
    ) -> None:
        self._launches, self._prompt_pass = decoder, prefill
        self._page_table, self._vocab_size = page_table, vocab_size

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampler: Sampler,
        cancelled: Callable[[], bool],
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> Generator[int, None, None]:
        """Yield tokens, at most the request's largest number, until the caller stops or cancels.

        Closing the iterator ends the launch before it returns, so the next request may start.

        Args:
            prompt_ids: at least one token; with the answer they fit the context.
            sampler: says how the kernel chooses, picks the first token and observes all.
            cancelled: asked before every chunk of the prompt and after every token.
            chunk_tokens: most prompt tokens a pass.

        Raises:
            BadLogits: the best score is NaN or infinite.
            KernelStuck, LaunchError: the kernel failed.
        """
        token_id = self._first_token(prompt_ids, sampler, cancelled, chunk_tokens)
        if token_id is None:
            return
        yield token_id
        if cancelled():
            return
        sampler.observe(token_id)
        yield from self._decode(token_id, len(prompt_ids), sampler, cancelled)

    def _first_token(
        self,
        prompt_ids: Sequence[int],
        sampler: Sampler,
        cancelled: Callable[[], bool],
        chunk_tokens: int,
    ) -> int | None:
        """What follows the prompt; None where cancelled."""
        position = len(prompt_ids)
        if position > RIDING_TOKENS:
            chunk = min(chunk_tokens, self._prompt_pass.most_tokens)
            logits = self._prompt_pass.run_prompt(prompt_ids, self._page_table, chunk, cancelled)
            return None if logits is None else sampler.pick(logits, position)
        if cancelled():
            return None
        # Columns side by side. Those that run out of tokens before others go on with what they
        # chose: at positions behind the prompt, which the answer writes again.
        width = min(position, MAX_COLUMNS)
        columns = [Column(0, c, prompt_ids[c::width], stride=width) for c in range(width)]
        last = (position - 1) % width
        # The kernel's choice is the request's where that is simply the best.
        token_id = self._launches.run(columns, -(-position // width))[-1][last]
        if _choice(sampler) is not None:
            return sampler.pick(self._launches.logits[last, : self._vocab_size], position)
        if token_id >= self._vocab_size:
            raise BadLogits(position, bad_score(token_id))
        return token_id

    def _decode(
        self, last: int, position: int, sampler: Sampler, cancelled: Callable[[], bool]
    ) -> Iterator[int]:
        """Tokens after `last`, which is at `position`."""
        test = sampler.stop_test
        # Of more stop tokens the caller sees the others, and closes.
        stops = sorted(test.ending_ids)[:MAX_STOPS]
        while (wanted := test.max_tokens - len(sampler.output_ids)) > 0:
            column = Column(0, position, [last], stops, choice=_choice(sampler))
            rounds = min(wanted, self._launches.max_rounds)
            with closing(self._launched(column, rounds)) as chosen:
                for token_id in chosen:
                    last, position = token_id, position + 1
                    if token_id >= self._vocab_size:
                        raise BadLogits(position, bad_score(token_id))
                    yield token_id
                    if cancelled():
                        return
                    sampler.observe(token_id)

    def _launched(self, column: Column, rounds: int) -> Generator[int, None, None]:
        """One column's tokens; closing ends the launch and waits for its end."""
        self._launches.start([column], rounds)
        tokens = self._launches.tokens()
        try:
            for (token_id,) in tokens:
                yield token_id
        finally:
            self._launches.stop()
            for _ in tokens:
                pass


class KernelModel(KernelGenerator):
    """A model on one GPU: packed weights and the kernel, a KV pool, and prefill on the same pool.

    Args:
        plan: of the decode kernel.
        weights: a tensor for each `TensorSpec` in the plan's precision, on the GPU if rows are
            kept, else there or on the host; taken over.
        context_tokens: room in each sequence.
        device: the GPU.
        cache_root: where compiled kernels are kept; None keeps nothing.
        keep_rows: leave `weights` in GPU memory beside the packed ones, for prefill; otherwise
            prefill unpacks one matrix at a time.
        sequences: rows of the page tables. Requests use the first.

    Raises:
        DeviceError: the kernels cannot be compiled, loaded or started.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Weights,
        context_tokens: int,
        device: torch.device,
        cache_root: Path | None,
        *,
        keep_rows: bool,
        sequences: int = 1,
    ) -> None:
        config, dtype = plan.model, TORCH_DTYPES[plan.dtype]
        pages = _num_pages(context_tokens)
        self.plan = plan
        self._device, self._keeps_rows = device, keep_rows
        self.page_tables = [list(range(s * pages, (s + 1) * pages)) for s in range(sequences)]
        with torch.cuda.device(device):
            self.pool = PagePool(
                config.num_layers, plan.kv_heads, plan.head_dim, pages * sequences, dtype, device
            )
            rope = rope_table(config.rope, plan.head_dim, pages * PAGE_POSITIONS, device)
            vectors = {k: v.to(device, torch.float32) for k, v in weights.items() if v.ndim == 1}
            table = None if config.tied_head else weights["embedding"].to(device, dtype)
            if table is not None:
                weights["embedding"] = table  # prefill and the decoder share it
            self.decoder = Decoder(
                plan,
                weights,
                rope,
                self.pool.tensor,
                max_sequences=sequences,
                cache=cache_root,
                keep_rows=keep_rows,
            )
            self.decoder.page_tables.copy_(torch.tensor(self.page_tables, dtype=torch.int32))
            matrices: Matrices = (
                weights.__getitem__ if keep_rows else Unpacked(plan, self.decoder.image, table)
            )
            self.prefill = Prefill(
                config,
                matrices,
                vectors,
                self.pool,
                partial(FusedElementwise, arch=plan.gpu.arch, cache_root=cache_root, rope=rope),
                most_tokens=min(CHUNK_TOKENS, context_tokens),
            )
            torch.cuda.synchronize(device)
        super().__init__(self.decoder, self.prefill, self.page_tables[0], config.vocab_size)

    def prepare(self) -> None:
        """Build and record now what first requests would wait for.

        That is the kernel that samples and graphs of short prompts. Raises DeviceError.
        """
        with torch.cuda.device(self._device):
            self.decoder.prepare_sampling()
            if self._keeps_rows:
                most = self.prefill.most_tokens
                self.prefill.capture([n for n in CAPTURED_TOKENS if n < most] + [most])
            torch.cuda.synchronize(self._device)

    @property
    def streamed_bytes(self) -> int:
        """Weights that a round streams, the kernel's padding included."""
        return self.plan.streamed_bytes


class Unpacked:
    """Row-major matrices by name, each unpacked from the kernel's image when asked for.

    Args:
        plan: how the image is laid out.
        image: packed weights [blocks, values].
        table: the embedding where the head is not tied to it.
    """

    def __init__(self, plan: Plan, image: Tensor, table: Tensor | None) -> None:
        self._plan, self._image, self._table = plan, image, table
        self._operations = {op.matrix.name: op for op in plan.layer_operations}

    def __call__(self, name: str) -> Tensor:
        """[out, in], contiguous."""
        if name == "embedding" and self._table is not None:
            return self._table
        layer, operation = 0, self._plan.head
        if name not in ("embedding", "head"):
            _, number, short = name.split(".")
            layer, operation = int(number), self._operations[short]
        packed = gather(self._plan, operation, layer, self._image)
        return unpack(self._plan, operation, packed).contiguous()


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
        logits_bytes = (3 * MAX_COLUMNS + 1) * plan.head.matrix.units * 8 * 4
        exchange_bytes = 2 * plan.workspace_bytes + sample_workspace_bytes(plan.blocks)
        return KernelMemory(
            image_bytes=plan.image_bytes,
            workspace_bytes=exchange_bytes + logits_bytes,  # one workspace stays fresh
            page_tokens=PAGE_POSITIONS,
            chunk_tokens=CHUNK_TOKENS,
        )


def find_support(config: ModelConfig, dtype: Dtype, device: torch.device) -> Support:
    """What the kernel makes of this model, precision and device."""
    if device.type != "cuda":
        return Support(None)
    try:
        driver()
        nvrtc()
    except CudaMissing as error:
        return Support(
            None, f"the decode kernel needs more: {error.message}; running the reference"
        )
    p = torch.cuda.get_device_properties(device)
    shared_bytes = p.shared_memory_per_block_optin  # type: ignore[attr-defined]  # stubs lack it
    return support_on((p.major, p.minor), p.multi_processor_count, shared_bytes, config, dtype)


def support_on(
    capability: tuple[int, int],
    num_sms: int,
    shared_bytes: int,
    config: ModelConfig,
    dtype: Dtype,
) -> Support:
    """The same for a GPU in figures."""
    try:
        gpu = gpu_from_capability(*capability, num_sms, shared_bytes)
        plan = make_plan(config, dtype, gpu)
        require_prefill(config)
        return Support(plan)
    except (GpuUnsupported, ShapeUnsupported) as error:
        return Support(None, f"{error.message}; running the reference")


def _num_pages(context_tokens: int) -> int:
    return -(-context_tokens // PAGE_POSITIONS)


def _choice(sampler: Sampler) -> Choice | None:
    """How tokens are chosen from here on; None if every one is that with the largest logit."""
    params, ending_ids = sampler.params, sampler.stop_test.ending_ids
    is_banned = len(sampler.output_ids) < params.min_tokens and bool(ending_ids)
    if params.is_greedy and not (params.has_penalties or params.logit_bias or is_banned):
        return None
    return Choice(params, sampler.counts, ending_ids)
