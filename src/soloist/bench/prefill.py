"""`bench prefill`: how fast prompts of several lengths are read, in this process.

A prompt is read through the executor, as any request's is: from token ids to the first token. Cold
ones are read whole. Warm ones came before, on an executor that keeps prompts as a server's does.
Offloaded ones come back from the host's memory; saved ones from files of such an executor, whose
memory has forgotten them. Of kept ones only the first tokens came before: what follows them is
another text in every run, as in an agent's loop. Streams of other requests may go on beside.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from soloist.bench import record, rows
from soloist.bench.caches import Flush, free, gpu_uuid
from soloist.bench.clocks import watching
from soloist.bench.decode import python_prompt
from soloist.bench.others import others_counted
from soloist.bench.sizes import require_at_least
from soloist.bench.streams import read_beside, require_room
from soloist.bench.subject import (
    Reading,
    random_prompt,
    read_shape,
    shape_dtype,
    shape_name,
    shape_on_cpu,
    shape_on_gpu,
    shape_placement,
)
from soloist.device import available_memory_bytes
from soloist.engine import Engine, EngineConfig
from soloist.engine.config import (
    require_kv_attention,
    require_one_way_of_prompts,
    require_packed_eight_bits,
    resolve_device,
)
from soloist.engine.engine import device_name, devices
from soloist.engine.executor import Executor
from soloist.engine.kernel import SHARED_CHUNK_TOKENS
from soloist.engine.request import Request
from soloist.errors import SettingError
from soloist.megakernel.limits import MAX_QUERIES
from soloist.model.config import ModelConfig
from soloist.model.families import read_config
from soloist.model.folder import config_file, find_model
from soloist.prefill.widths import MOST_PASS_TOKENS
from soloist.sampling import Sampler, SamplingParams
from soloist.settings import read_settings
from soloist.weights.choice import Rounding

# No bound for the files of one prompt; and seconds for what waits to be written at a time.
_MOST_SAVED_BYTES, _SAVING_S = 10**15, 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        asked: model, device, precision, GPUs, rounding, KV cache; of a shape all but the first.
        shape: a config.json, for random weights and tokens instead of the model.
        prompt_tokens: lengths of prompts.
        runs: timed, after one that is not.
        prefixes: what is known of the prompt, each in turn; see `PrefillRow.prefix`.
        num_busy: processes that only count beside it.
        kept_tokens: how many first tokens of each prompt came before; with any, `prefixes` do not
            count.
        num_streams: answers of other requests that go on while the prompt is read.
    """

    asked: EngineConfig
    shape: Path | None
    prompt_tokens: tuple[int, ...]
    runs: int
    prefixes: tuple[rows.Prefix, ...]
    num_busy: int = 0
    kept_tokens: tuple[int, ...] = ()
    num_streams: int = 0


@dataclass(frozen=True, slots=True)
class _Reader:
    """A loaded model and one prompt of the greatest length."""

    name: str
    precision: str
    weights: str
    kv: str
    executor: Executor
    num_gpus: int
    vocab_size: int
    prompt_ids: list[int]
    device_name: str
    context_tokens: int

    def ids(self, num_tokens: int, num_kept: int = 0, run: int = 0) -> list[int]:
        """Of the prompt; behind kept tokens it is another one in every run."""
        ids = self.prompt_ids[:num_tokens]
        if num_kept:
            ids[num_kept] = (ids[num_kept] + 1 + run) % self.vocab_size
        return ids

    def read(self, ids: list[int]) -> tuple[float, int]:
        """Seconds to the first token, and how many prompt tokens were cached."""
        start = time.perf_counter()
        sampler = Sampler(SamplingParams(max_tokens=1, ignore_eos=True), self.vocab_size, ids)
        request = Request(ids, sampler)
        is_open = self.executor.open(request)
        assert is_open, "no other request is open"
        try:
            while self.executor.read(request) is None:
                pass
            return time.perf_counter() - start, request.num_cached
        finally:
            self.executor.free(request)

    def save(self, num_tokens: int) -> None:
        """Have all of a prompt saved; what the queue dropped is saved the next time."""
        num_saved = -1
        while (saved := self.executor.saved) is not None and saved.saved > num_saved:
            num_saved = saved.saved
            self.executor.forget()
            self.read(self.ids(num_tokens))
            self.executor.flush(_SAVING_S)

    def make_known(self, prefix: rows.Prefix) -> None:
        """Before each run: have a prompt that came before where a row says that it is."""
        if prefix in ("cold", "saved"):
            self.executor.forget()
        if prefix == "offloaded":
            self.executor.offload()


def measure(plan: Plan) -> list[rows.PrefillRow]:
    """A row for each kind of prefix and each length of prompt.

    Raises:
        SettingError: sizes that cannot be measured.
        UserError, DeviceError: as from loading the model.
    """
    config = _checked(plan)
    require_kv_attention(plan.asked)
    require_packed_eight_bits(plan.asked)
    require_one_way_of_prompts(plan.asked)
    device = torch.device(resolve_device(plan.asked.device, devices()))
    if device.type != "cuda":
        hopper = "one or more Hopper GPUs"
        for option, is_asked, allowed in (
            ("--page-attention", plan.asked.page_attention, hopper),
            ("--packed-prompts", plan.asked.packed_prompts, hopper),
            ("--unpack-prompts", plan.asked.unpacks_prompts, "one or more GPUs"),
            ("--eight-bit-prompts", plan.asked.eight_bit_prompts, hopper),
        ):
            if is_asked:
                raise SettingError(option, str(device), allowed)
        if plan.asked.tail_path == "decode":
            allowed = "auto, prefill on the CPU, where no decode kernel runs"
            raise SettingError("--path", plan.asked.tail_path, allowed)
        if "offloaded" in plan.prefixes:
            allowed = "cold, warm, both, saved on the CPU, where nothing is offloaded"
            raise SettingError("--prefix", "offloaded", allowed)
    flush, made = Flush(device), list[rows.PrefillRow]()
    prefixes: tuple[rows.Prefix, ...] = ("kept",) if plan.kept_tokens else plan.prefixes
    kept_tokens = plan.kept_tokens or (0,)
    for prefix in prefixes:
        reader = _load(plan, prefix, config.context_tokens, device)
        require_room(reader.executor, plan.num_streams)
        folder = TemporaryDirectory(prefix="soloist-") if prefix == "saved" else None
        if folder is not None:
            reader.executor.save_to(Path(folder.name), _MOST_SAVED_BYTES, ())
        for length in plan.prompt_tokens:
            made += [_timed(plan, reader, prefix, length, kept, flush) for kept in kept_tokens]
        if folder is not None:
            folder.cleanup()
        del reader  # the next one needs the room
        free(device)
    return made


def _checked(plan: Plan) -> ModelConfig:
    """What the model computes, for whose prompts there is room."""
    require_at_least(
        *(("--prompt-tokens", length, 1) for length in plan.prompt_tokens),
        *(("--kept", kept, 1) for kept in plan.kept_tokens),
        ("--runs", plan.runs, 1),
        ("--busy", plan.num_busy, 0),
        ("--streams", plan.num_streams, 0),
    )
    if plan.num_streams >= MAX_QUERIES:
        raise SettingError("--streams", plan.num_streams, f"0 … {MAX_QUERIES - 1}")
    shortest = min(plan.prompt_tokens)
    if plan.kept_tokens and max(plan.kept_tokens) >= shortest:
        allowed = f"fewer than the {shortest:,} tokens of --prompt-tokens"
        raise SettingError("--kept", max(plan.kept_tokens), allowed)
    file = plan.shape or config_file(_folder(plan.asked))
    config = read_config(file, plan.asked.accepted_fields)
    if max(plan.prompt_tokens) >= config.context_tokens:
        raise SettingError(
            "--prompt-tokens", max(plan.prompt_tokens), f"at most {config.context_tokens - 1:,}"
        )
    return config


def _timed(
    plan: Plan, reader: _Reader, prefix: rows.Prefix, length: int, kept: int, flush: Flush
) -> rows.PrefillRow:
    """A row, of a prompt whose first `kept` tokens came before."""
    if prefix == "saved":
        reader.save(length)
    if kept or prefix == "offloaded":
        reader.read(reader.ids(kept or length))
    with (
        others_counted(plan.num_busy) as others,
        watching(gpu_uuid(flush.device)) as watch,
    ):
        read, gaps = list[tuple[float, int]](), list[float]()
        for run in range(plan.runs + 1):
            reader.make_known(prefix)
            flush()
            ids = reader.ids(length, kept, run)
            if not plan.num_streams:
                read.append(reader.read(ids))
                continue
            found = read_beside(
                reader.executor, reader.vocab_size, ids, plan.num_streams, reader.context_tokens
            )
            read.append((found.ttft_s, found.num_cached))
            gaps.append(found.longest_gap_s * 1e3)
    return replace(
        _row(reader, prefix, length, read[1:], watch.clocks),
        others_cores=others.cores, busy_processes=plan.num_busy, streams=plan.num_streams,
        longest_gap_ms=rows.Spread.of(gaps[1:]) if gaps else None,
    )  # fmt: skip


def _folder(asked: EngineConfig) -> Path:
    offline = read_settings().hub_offline
    return find_model(asked.model, revision=asked.revision, offline=offline)


def _load(plan: Plan, prefix: rows.Prefix, most_tokens: int, device: torch.device) -> _Reader:
    """The model, with room for the longest prompt and, if it stays, for what is cached of it."""
    # Beside streams prompts are read as in a server, which keeps them.
    longest, keeps = max(plan.prompt_tokens), prefix != "cold" or plan.num_streams > 0
    # Cached tokens count as well, and never more of a prompt than its length.
    room = min(most_tokens, (2 * longest if keeps else longest) + 1)
    host_bytes = available_memory_bytes() // 2 if prefix == "offloaded" else 0
    if plan.shape is None:
        # As in a server: chunks are those of an executor that several requests share.
        asked = replace(
            plan.asked, context_tokens=room, keeps_prefixes=keeps,
            sequences=1 + max(plan.num_streams, int(keeps)),
            host_cache_bytes=host_bytes or plan.asked.host_cache_bytes,
        )  # fmt: skip
        engine = Engine.load(asked)
        return _Reader(
            engine.report.folder.name,
            engine.resolved.dtype.value,
            engine.report.weights,
            plan.asked.kv or "",
            engine.model,
            engine.resolved.num_gpus,
            engine.config.vocab_size,
            python_prompt(engine, longest),
            engine.report.device_name,
            room,
        )
    config = read_config(plan.shape)
    dtype = shape_dtype(plan.asked.precision, device)
    placed = shape_placement(
        plan.shape, plan.asked.precision, device, plan.asked.device, plan.asked.gpus
    )
    rounding = Rounding(plan.asked.weights, plan.asked.head_weights)
    shape = read_shape(plan.shape, dtype, rounding, plan.asked.kv)
    executor: Executor
    if device.type == "cpu":
        executor = shape_on_cpu(shape, room, keeps_prefixes=keeps)
    else:
        chunk = SHARED_CHUNK_TOKENS if keeps else MOST_PASS_TOKENS
        executor = shape_on_gpu(
            shape, room, placed, 1 + plan.num_streams, chunk_tokens=chunk, keeps_prefixes=keeps,
            reading=Reading(
                plan.asked.packed_prompts, plan.asked.unpacks_prompts, plan.asked.page_attention,
                plan.asked.tail_path, host_bytes, plan.asked.eight_bit_prompts,
            ),
        )  # fmt: skip
    ids = random_prompt(config, longest)
    return _Reader(
        shape_name(plan.shape), dtype.value, shape.label(executor), shape.kv_label, executor,
        placed.num_gpus, config.vocab_size, ids, device_name(str(device)), room,
    )  # fmt: skip


def _row(
    reader: _Reader,
    prefix: rows.Prefix,
    length: int,
    read: Sequence[tuple[float, int]],
    clocks: rows.Clocks | None,
) -> rows.PrefillRow:
    cached = round(median(num_cached for _, num_cached in read))
    return rows.PrefillRow(
        bench="prefill",
        engine="soloist",
        shape=reader.name,
        device=reader.device_name,
        gpus=reader.num_gpus,
        precision=reader.precision,
        prompt_tokens=length,
        prefix=prefix,
        cached_tokens=cached,
        runs=len(read),
        ttft_ms=rows.Spread.of([seconds * 1e3 for seconds, _ in read]),
        prompt_tokens_per_s=rows.Spread.of([(length - n) / seconds for seconds, n in read], 1),
        clocks=clocks,
        weights=reader.weights,
        kv=reader.kv,
        **record.origin("torch"),
    )
