"""`bench decode --shape`: the decode kernel on random weights, with as many columns as asked for.

One column is timed through `KernelModel.generate`, as any request runs. Several are timed as one
launch of the decoder, in which every column goes on with the tokens it chose itself.
"""

import hashlib
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from soloist.bench import record
from soloist.bench.bandwidth import Bandwidth, read_bandwidth
from soloist.bench.decode import Run
from soloist.bench.sizes import require_at_least
from soloist.bench.subject import (
    kv_bytes_seen,
    random_prompt,
    require_gpu,
    shape_dtype,
    shape_name,
    shape_on_gpu,
    shape_placement,
)
from soloist.engine.config import GpuCount, Precision
from soloist.engine.engine import device_name
from soloist.engine.gpus import Placement
from soloist.engine.kernel import KernelModel
from soloist.errors import SettingError
from soloist.megakernel.launch import Column
from soloist.megakernel.plan import MAX_COLUMNS
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.tensors import streamed_values
from soloist.sampling import Sampler, SamplingParams

_MOST_ROUNDS = 4096


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        file: a config.json.
        device: 'auto', 'cuda' or 'cuda:N'.
        precision: of weights and KV cache; 'auto' is bf16.
        prompt_tokens: length of each sequence's prompt, random tokens.
        new_tokens: made after it; of several columns, steps.
        runs: timed, after one that is not.
        columns: positions of one sequence in a step; the next step starts one position further, so
            that any number of columns sees the same contexts.
        sequences: side by side.
        context: position at which decoding starts, over random keys and values; None: after the
            prompt. Time to first token is the prompt's in any case.
        gpus: how many run it together, or 'auto'.
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


def measure(plan: Plan) -> list[record.Row]:
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
    dtype = shape_dtype(plan.precision)
    device = require_gpu(plan.device, "without one, measure a model: soloist bench decode MODEL")
    placed = shape_placement(plan.file, plan.precision, device, plan.device, plan.gpus)
    bandwidth = read_bandwidth(placed.devices[0])
    model = shape_on_gpu(config, dtype, plan.last, placed, plan.sequences)
    if plan.context is not None:
        model.fill_pools()
    prompts = [random_prompt(config, plan.prompt_tokens, s) for s in range(plan.sequences)]
    is_request = plan.all_columns == 1 and plan.context is None
    run = partial(_request if is_request else _launch, plan, model, prompts)
    runs = [run() for _ in range(plan.runs + 1)][1:]
    return [_row(plan, config, dtype, placed, runs, bandwidth)]


def _check(plan: Plan) -> None:
    require_at_least(
        ("--prompt-tokens", plan.prompt_tokens, 1),
        ("--new-tokens", plan.new_tokens, 2),
        ("--runs", plan.runs, 1),
        ("--columns", plan.columns, 1),
        ("--sequences", plan.sequences, 1),
        ("--context", plan.start, 1),
    )
    if plan.all_columns > MAX_COLUMNS:
        raise SettingError(
            "--columns times --sequences", plan.all_columns, f"at most {MAX_COLUMNS}"
        )
    if plan.new_tokens > _MOST_ROUNDS:
        raise SettingError("--new-tokens", plan.new_tokens, f"at most {_MOST_ROUNDS} with --shape")
    shape_dtype(plan.precision)
    if plan.device == "cpu":
        raise SettingError("--device", plan.device, "auto, cuda, cuda:N with --shape")


def _request(plan: Plan, model: KernelModel, prompts: list[list[int]]) -> Run:
    """One greedy request, from token ids to its last token."""
    model.synchronize()
    params = SamplingParams(max_tokens=plan.new_tokens, ignore_eos=True)
    made, times = [], []
    start = time.perf_counter()
    sampler = Sampler(params, model.plan.model.vocab_size, prompts[0])
    for token_id in model.generate(prompts[0], sampler, lambda: False):
        times.append(time.perf_counter())
        made.append(token_id)
    return Run(times[0] - start, times[-1] - times[0], tuple(made))


def _launch(plan: Plan, model: KernelModel, prompts: list[list[int]]) -> Run:
    """All prompts one after the other, the first one timed; then one launch for all columns."""
    model.synchronize()
    start = time.perf_counter()
    first = []
    for i, prompt in enumerate(prompts):
        logits = model.prefill.run_prompt(
            prompt, model.page_tables[i], model.prefill.most_tokens, lambda: False
        )
        assert logits is not None, "nobody cancels"
        first.append(int(logits.argmax()))
        if i == 0:
            ttft_s = time.perf_counter() - start
    columns = [
        Column(s, plan.start + c, [token_id])
        for s, token_id in enumerate(first)
        for c in range(plan.columns)
    ]
    model.decoder.start(columns, plan.new_tokens)
    made: list[int] = []
    times = []
    for tokens in model.decoder.tokens():
        times.append(time.perf_counter())
        made += tokens
    return Run(ttft_s, times[-1] - times[0], tuple(made))


def _row(
    plan: Plan,
    config: ModelConfig,
    dtype: Dtype,
    placed: Placement,
    runs: list[Run],
    bandwidth: Bandwidth,
) -> record.Row:
    steps = [(plan.new_tokens - 1) / run.decode_s for run in runs]
    speed = record.Spread.of([rate * plan.all_columns for rate in steps])
    weights = streamed_values(tensors(config), tied_head=config.tied_head) * dtype.num_bytes
    middle = plan.start + plan.new_tokens // 2
    streamed = weights + plan.sequences * kv_bytes_seen(config, dtype, middle)
    all_gb_per_s = bandwidth.gb_per_s * placed.ranks
    hashes = {hashlib.sha256(repr(run.token_ids).encode()).hexdigest()[:16] for run in runs}
    return record.Row(
        engine="soloist",
        shape=shape_name(plan.file),
        device=device_name(str(placed.devices[0])),
        gpus=placed.ranks,
        precision=dtype.value,
        prompt_tokens=plan.prompt_tokens,
        new_tokens=plan.new_tokens,
        columns=plan.all_columns,
        runs=len(runs),
        ttft_ms=record.Spread.of([run.ttft_s * 1e3 for run in runs]),
        decode_tokens_per_s=speed,
        streamed_bytes_per_token=streamed,
        bandwidth_gb_per_s=round(bandwidth.gb_per_s, 2),
        mbu=round(streamed * speed.median / plan.all_columns / all_gb_per_s / 1e9, 3),
        speculation=False,
        output_ids_sha256=" ".join(sorted(hashes)),
        versions=record.versions("torch"),
        commit=record.commit(),
        command=record.command(),
        date=record.now(),
        sequences=plan.sequences,
        start_position=plan.start,
        bandwidth_method=bandwidth.method,
    )
