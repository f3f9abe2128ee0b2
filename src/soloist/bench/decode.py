"""`bench decode`: time to first token and decode speed of one greedy request in this process.

Contenders take turns, run by run, so that a slow minute of the machine hits all of them.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from soloist.bench import record, rows
from soloist.bench.caches import Flush, gpu_uuid
from soloist.bench.clocks import watching
from soloist.bench.columns import run_columns
from soloist.bench.contender import Contender, Run, gaps_s
from soloist.bench.others import others_counted
from soloist.bench.sizes import require_at_least
from soloist.bench.text import python_text
from soloist.engine import Completion, Engine, EngineConfig
from soloist.engine.bandwidth import Bandwidth, read_bandwidth
from soloist.engine.kernel import KernelModel
from soloist.errors import SettingError
from soloist.kv.memory import kv_bytes_seen
from soloist.megakernel.limits import MAX_QUERIES
from soloist.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        asked: model, device, precision.
        prompt_tokens: length of the prompt, real Python text.
        new_tokens: made after it; the end token does not stop a run.
        runs: timed, after one that is not.
        against: 'transformers', or None.
        num_busy: processes that only count beside it.
        columns: positions of the request in a step, on the decode kernel; the next step starts one
            position further.
    """

    asked: EngineConfig
    prompt_tokens: int
    new_tokens: int
    runs: int
    against: str | None
    num_busy: int = 0
    columns: int = 1


class Ours:
    """Soloist, through the same door as any caller."""

    def __init__(self, engine: Engine) -> None:
        self.name = "soloist"
        self._engine = engine

    def run(self, prompt_ids: list[int], new_tokens: int) -> Run:
        """Through `Engine.generate`, detokenisation included."""
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        times: list[float] = []
        for event in self._engine.generate(prompt_ids, params):
            if isinstance(event, Completion):
                break
            if event.token_ids:
                times.append(time.perf_counter())
        else:
            raise AssertionError("a request ends with a completion")
        t = event.timings
        return Run(t.ttft_s, t.decode_s, event.token_ids, gaps_s(times))


class Columns:
    """Soloist with several query tokens in each step.

    Raises:
        SettingError: the decode kernel does not run the model.
    """

    def __init__(self, engine: Engine, columns: int) -> None:
        if not isinstance(engine.model, KernelModel):
            raise SettingError("--columns", columns, "1, more on a GPU only")
        self.name = "soloist"
        self._model, self._columns = engine.model, columns

    def run(self, prompt_ids: list[int], new_tokens: int) -> Run:
        """One launch, without the host between steps."""
        return run_columns(self._model, [prompt_ids], self._columns, len(prompt_ids), new_tokens)


def measure(plan: Plan) -> list[rows.DecodeRow]:
    """Measure every contender; the first row is Soloist's.

    Raises:
        SettingError: sizes that cannot be measured, or an unknown rival.
        UserError, DeviceError: as from loading the model.
    """
    _check(plan)
    # Room for this request only: on a GPU the bandwidth test wants some memory as well.
    tokens = plan.prompt_tokens + plan.new_tokens + plan.columns - 1
    engine = Engine.load(replace(plan.asked, context_tokens=tokens))
    prompt_ids = python_prompt(engine, plan.prompt_tokens)
    contenders: list[Contender] = [
        Ours(engine) if plan.columns == 1 else Columns(engine, plan.columns)
    ]
    if plan.against == "transformers":
        from soloist.bench.rival import rivals

        contenders += rivals(engine)
    device = torch.device(engine.resolved.device)
    bandwidth = read_bandwidth(device)
    flush = Flush(device)
    results: dict[str, list[Run]] = {c.name: [] for c in contenders}
    with others_counted(plan.num_busy) as others, watching(gpu_uuid(device)) as watch:
        for i in range(plan.runs + 1):
            for contender in contenders:
                flush()
                run = contender.run(prompt_ids, plan.new_tokens)
                if i > 0:
                    results[contender.name].append(run)
    return [
        replace(
            _row(plan, engine, name, runs, bandwidth, watch.clocks),
            others_cores=others.cores,
            busy_processes=plan.num_busy,
        )
        for name, runs in results.items()
    ]


def python_prompt(engine: Engine, num_tokens: int) -> list[int]:
    """The first tokens of a module of the standard library: real text, the same everywhere."""
    ids: list[int] = []
    while len(ids) < num_tokens:
        ids += engine.tokenizer.encode(python_text())
    return ids[:num_tokens]


def _check(plan: Plan) -> None:
    require_at_least(
        ("--prompt-tokens", plan.prompt_tokens, 1),
        ("--new-tokens", plan.new_tokens, 2),
        ("--runs", plan.runs, 1),
        ("--busy", plan.num_busy, 0),
        ("--columns", plan.columns, 1),
    )
    if plan.columns > MAX_QUERIES:
        raise SettingError("--columns", plan.columns, f"at most {MAX_QUERIES}")
    if plan.against not in (None, "transformers"):
        raise SettingError("--against", plan.against, "transformers")
    if plan.against is not None and plan.columns > 1:
        raise SettingError("--against", plan.against, "only without --columns, which it has not")
    if plan.against is not None and (plan.asked.weights or plan.asked.head_weights):
        allowed = "only without --weights and --head-weights, which it does not know"
        raise SettingError(
            "--against", plan.against, allowed, "quantise a folder, and measure that"
        )

    if plan.against is not None and plan.asked.adapter is not None:
        allowed = "only without --adapter, which it would not merge"
        raise SettingError("--against", plan.against, allowed, "measure a merged folder")


def _row(
    plan: Plan,
    engine: Engine,
    name: str,
    runs: list[Run],
    bandwidth: Bandwidth,
    clocks: rows.Clocks | None,
) -> rows.DecodeRow:
    speeds = [plan.columns * (plan.new_tokens - 1) / run.decode_s for run in runs]
    speed = rows.Spread.of(speeds)
    chosen = engine.resolved
    middle = plan.prompt_tokens + plan.new_tokens // 2
    streamed = engine.report.streamed_bytes + kv_bytes_seen(engine.config, chosen.dtype, middle)
    hashes = {hashlib.sha256(repr(run.token_ids).encode()).hexdigest()[:16] for run in runs}
    gpus = chosen.num_gpus if name == "soloist" else min(1, chosen.num_gpus)
    packages = ["torch"] if name == "soloist" else ["torch", "transformers"]
    return rows.DecodeRow(
        engine=name,
        shape=" + ".join(filter(None, (engine.report.folder.name, engine.report.adapter))),
        device=engine.report.device_name,
        gpus=gpus,
        precision=chosen.dtype.value,
        prompt_tokens=plan.prompt_tokens,
        new_tokens=plan.new_tokens,
        columns=plan.columns,
        runs=len(runs),
        ttft_ms=rows.Spread.of([run.ttft_s * 1e3 for run in runs]),
        decode_tokens_per_s=speed,
        streamed_bytes_per_token=streamed,
        bandwidth_gb_per_s=round(bandwidth.gb_per_s, 2),
        mbu=round(
            streamed * speed.median / plan.columns / max(1, gpus) / bandwidth.gb_per_s / 1e9, 3
        ),
        speculation=False,
        output_ids_sha256=" ".join(sorted(hashes)),
        start_position=plan.prompt_tokens,
        bandwidth_method=bandwidth.method,
        token_ms=token_ms(runs),
        clocks=clocks,
        weights=engine.report.weights if name == "soloist" else chosen.dtype.value,
        **record.origin(*packages),
    )


def token_ms(runs: Sequence[Run]) -> rows.Percentiles:
    """Times between tokens of all runs, in milliseconds."""
    return rows.Percentiles.of([t * 1e3 for run in runs for t in run.token_s])
