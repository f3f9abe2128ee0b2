"""`bench decode --shape`: random weights, on the decode kernel with as many columns as asked for.

One column is timed through `EngineCore.run`, as any request runs; without a GPU, on the
reference. Several are timed as one launch of the decoder, in which every column goes on with the
tokens it chose itself.
"""

import hashlib
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from soloist.bench import record, rows
from soloist.bench.caches import Flush, gpu_uuid
from soloist.bench.clocks import watching
from soloist.bench.columns import experts_of_columns, run_columns
from soloist.bench.contender import Run, gaps_s
from soloist.bench.decode import token_ms
from soloist.bench.others import others_counted
from soloist.bench.params import fixed_params
from soloist.bench.sizes import require_at_least
from soloist.bench.subject import (
    NOT_ROUNDED,
    Shape,
    random_prompt,
    read_shape,
    shape_dtype,
    shape_name,
    shape_on_cpu,
    shape_on_gpu,
    shape_placement,
)
from soloist.engine.bandwidth import Bandwidth, read_bandwidth
from soloist.engine.config import GpuCount, Precision, resolve_device
from soloist.engine.core import tokens_of
from soloist.engine.engine import device_name, devices
from soloist.engine.executor import Executor
from soloist.engine.gpus import Placement
from soloist.engine.kernel import KernelModel
from soloist.engine.request import Request
from soloist.errors import SettingError
from soloist.kv.memory import kv_bytes_seen
from soloist.megakernel.limits import MAX_QUERIES
from soloist.model.families import read_config
from soloist.model.kv_format import KvName
from soloist.sampling import Sampler
from soloist.weights.choice import Rounding

_MOST_ROUNDS = 4096


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        file: a config.json.
        device: 'auto', 'cpu', 'cuda' or 'cuda:N'.
        precision: of weights and KV cache; 'auto' is bf16, on a CPU fp32.
        prompt_tokens: length of each sequence's prompt, random tokens.
        new_tokens: made after it; of several columns, steps.
        runs: timed, after one that is not.
        columns: positions of one sequence in a step; the next step starts one position further, so
            that any number of columns sees the same contexts.
        sequences: side by side.
        context: position at which decoding starts, over random keys and values; None: after the
            prompt. Time to first token is the prompt's in any case.
        gpus: how many run it together, or 'auto'.
        num_busy: processes that only count beside it.
        rounding: what matrices are random codes of.
        kv: what keys and values are stored as; None for `precision`.
        temperature: 0 is greedy; else the seed is 0.
    """

    file: Path
    device: str
    precision: Precision
    prompt_tokens: int
    new_tokens: int
    runs: int
    columns: int
    sequences: int
    context: int | None
    gpus: GpuCount = 1
    num_busy: int = 0
    rounding: Rounding = NOT_ROUNDED
    kv: KvName | None = None
    temperature: float = 0.0

    @property
    def all_columns(self) -> int:
        """Of a step."""
        return self.columns * self.sequences

    @property
    def start(self) -> int:
        """Position of the first decode step."""
        return self.prompt_tokens if self.context is None else self.context

    @property
    def last(self) -> int:
        """Positions that a sequence needs."""
        return max(self.start + self.columns - 1 + self.new_tokens, self.prompt_tokens)


def measure(plan: Plan) -> list[rows.DecodeRow]:
    """Measure; one row.

    Raises:
        SettingError: sizes that cannot be measured.
        UserError: the configuration cannot be used.
        DeviceError: no GPU, or one that the kernel or the model does not fit.
    """
    _check(plan)
    config = read_config(plan.file)
    if plan.last > config.context_tokens:
        raise SettingError(
            "--context", plan.start, f"with the tokens after it at most {config.context_tokens:,}"
        )
    device = torch.device(resolve_device(plan.device, devices()))
    dtype = shape_dtype(plan.precision, device)
    placed = shape_placement(plan.file, plan.precision, device, plan.device, plan.gpus)
    device = placed.devices[0]
    prompts = [random_prompt(config, plan.prompt_tokens, s) for s in range(plan.sequences)]
    if device.type == "cpu":
        _check_reference(plan)
    bandwidth = read_bandwidth(device)
    model: Executor
    shape = read_shape(plan.file, dtype, plan.rounding, plan.kv)
    if device.type == "cpu":
        model = shape_on_cpu(shape, plan.last)
    else:
        model = shape_on_gpu(shape, plan.last, placed, plan.sequences)
        if plan.context is not None:
            model.fill_pools()

    def run() -> Run:
        if plan.all_columns == 1 and plan.context is None:
            return _request(plan, model, config.vocab_size, prompts[0])
        return _run_columns(plan, model, prompts, plan.new_tokens)

    name = device_name(str(device))  # now: on a CPU the number of threads changes with the load
    flushes, runs = [Flush(one) for one in placed.devices], []
    with others_counted(plan.num_busy) as others, watching(gpu_uuid(device)) as watch:
        for _ in range(plan.runs + 1):
            for flush in flushes:
                flush()
            runs.append(run())
    row = _row(plan, shape, placed, runs[1:], bandwidth, shape.streamed_bytes(model))
    chosen = None
    if isinstance(model, KernelModel) and plan.all_columns > 1:
        chosen = experts_of_columns(
            model, plan.new_tokens, lambda steps: _run_columns(plan, model, prompts, steps)
        )
    return [
        replace(
            row,
            device=name,
            clocks=watch.clocks,
            others_cores=others.cores,
            busy_processes=plan.num_busy,
            weights=shape.label(model),
            kv=shape.kv_label,
            chosen_experts=chosen,
        )
    ]


def _check(plan: Plan) -> None:
    require_at_least(
        ("--prompt-tokens", plan.prompt_tokens, 1),
        ("--new-tokens", plan.new_tokens, 2),
        ("--runs", plan.runs, 1),
        ("--columns", plan.columns, 1),
        ("--sequences", plan.sequences, 1),
        ("--context", plan.start, 1),
        ("--busy", plan.num_busy, 0),
    )
    fixed_params(plan.temperature, plan.new_tokens)
    if plan.all_columns > MAX_QUERIES:
        raise SettingError(
            "--columns times --sequences", plan.all_columns, f"at most {MAX_QUERIES}"
        )
    if plan.new_tokens > _MOST_ROUNDS:
        raise SettingError("--new-tokens", plan.new_tokens, f"at most {_MOST_ROUNDS} with --shape")


def _check_reference(plan: Plan) -> None:
    """What the reference has no equal of."""
    for option, given, only, allowed in (
        ("--columns", plan.columns, 1, "1, more on a GPU only"),
        ("--sequences", plan.sequences, 1, "1, more on a GPU only"),
        ("--context", plan.context, None, "none, on a GPU only"),
    ):
        if given != only:
            hint = "the reference implementation decodes one token at a time, after its prompt"
            raise SettingError(option, given, allowed, hint)


def _run_columns(plan: Plan, model: Executor, prompts: list[list[int]], steps: int) -> Run:
    assert isinstance(model, KernelModel), "the reference runs requests only"
    return run_columns(model, prompts, plan.columns, plan.start, steps, plan.temperature)


def _request(plan: Plan, model: Executor, vocab_size: int, prompt: list[int]) -> Run:
    """One request, from token ids to its last token."""
    params = fixed_params(plan.temperature, plan.new_tokens)
    made, times = [], []
    start = time.perf_counter()
    sampler = Sampler(params, vocab_size, prompt)
    for token_id in tokens_of(model, Request(prompt, sampler)):
        times.append(time.perf_counter())
        made.append(token_id)
    return Run(times[0] - start, times[-1] - times[0], tuple(made), gaps_s(times))


def _row(
    plan: Plan,
    shape: Shape,
    placed: Placement,
    runs: list[Run],
    bandwidth: Bandwidth,
    weights_bytes: int,
) -> rows.DecodeRow:
    steps = [(plan.new_tokens - 1) / run.decode_s for run in runs]
    speed = rows.Spread.of([rate * plan.all_columns for rate in steps])
    middle = plan.start + plan.new_tokens // 2
    streamed = weights_bytes + plan.sequences * kv_bytes_seen(shape.config, shape.kv, middle)
    all_gb_per_s = bandwidth.gb_per_s * max(1, placed.num_gpus)
    hashes = {hashlib.sha256(repr(run.token_ids).encode()).hexdigest()[:16] for run in runs}
    return rows.DecodeRow(
        engine="soloist",
        shape=shape_name(plan.file),
        device=device_name(str(placed.devices[0])),
        gpus=placed.num_gpus,
        precision=shape.dtype.value,
        prompt_tokens=plan.prompt_tokens,
        new_tokens=plan.new_tokens,
        columns=plan.all_columns,
        runs=len(runs),
        ttft_ms=rows.Spread.of([run.ttft_s * 1e3 for run in runs]),
        decode_tokens_per_s=speed,
        streamed_bytes_per_token=streamed,
        bandwidth_gb_per_s=round(bandwidth.gb_per_s, 2),
        mbu=round(streamed * speed.median / plan.all_columns / all_gb_per_s / 1e9, 3),
        speculation=False,
        temperature=plan.temperature,
        output_ids_sha256=" ".join(sorted(hashes)),
        sequences=plan.sequences,
        start_position=plan.start,
        bandwidth_method=bandwidth.method,
        token_ms=token_ms(runs),
        **record.origin("torch"),
    )
