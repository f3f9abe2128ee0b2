"""`bench decode`: time to first token and decode speed of one request in this process.

Contenders take turns, run by run, so that a slow minute of the machine hits all of them.
"""

import hashlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from soloist.bench import record, rows
from soloist.bench.caches import Flush, gpu_uuid
from soloist.bench.clocks import watching
from soloist.bench.columns import experts_of_columns, run_columns
from soloist.bench.contender import Contender, Run, gaps_s
from soloist.bench.others import others_counted
from soloist.bench.params import fixed_params
from soloist.bench.side_by_side import run_requests
from soloist.bench.sizes import require_at_least
from soloist.bench.text import python_text, text_of
from soloist.engine import Completion, Engine, EngineConfig
from soloist.engine.bandwidth import Bandwidth, read_bandwidth
from soloist.engine.kernel import KernelModel
from soloist.errors import SettingError
from soloist.kv.memory import kv_bytes_seen
from soloist.megakernel.limits import MAX_QUERIES
from soloist.model.kv_format import plain
from soloist.speculation import Drafting


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        asked: model, device, precision.
        prompt_tokens: length of the prompt, real text.
        new_tokens: made after it; the end token does not stop a run.
        runs: timed, after one that is not.
        against: 'transformers', or None.
        num_busy: processes that only count beside it.
        columns: positions of the request in a step, on the decode kernel; the next step starts one
            position further.
        looks_up: also measure with drafts that are looked up.
        wrong: also measure with a prediction, which is the answer with so large a share of its
            tokens replaced; None without.
        temperature: 0 is greedy; else the seed is 0. Greedy texts of small models loop, which makes
            drafts look better than they are.
        beside: further models, such as the same one in other formats.
        text: whose beginning is the prompt; a prediction is then what follows in it, and the answer
            may be another text. None takes a module of Python's library.
        sequences: requests side by side, each of which begins the text at another token.
        predicted: of these requests, those that have a prediction.
    """

    asked: EngineConfig
    prompt_tokens: int
    new_tokens: int
    runs: int
    against: str | None
    num_busy: int = 0
    columns: int = 1
    looks_up: bool = False
    wrong: float | None = None
    temperature: float = 0.0
    beside: tuple[str, ...] = ()
    text: Path | None = None
    sequences: int = 1
    predicted: int | None = None


class Ours:
    """Soloist, through the same door as any caller.

    Args:
        engine: drafts nothing between runs.
        temperature: 0 is greedy; else the seed is 0.
        drafting: what its runs draft.
        wrong: see `Plan`.
        expected: the text that the prediction is made of; None takes the answer.
        sequences: requests side by side, without detokenisation where there are several.
        predicted: of these, those that have a prediction; None: all.
    """

    def __init__(
        self,
        engine: Engine,
        temperature: float = 0.0,
        drafting: Drafting | None = None,
        wrong: float | None = None,
        expected: Sequence[int] | None = None,
        sequences: int = 1,
        predicted: int | None = None,
    ) -> None:
        self._predicted = sequences if predicted is None else predicted
        self.name, self.drafting, self.wrong = "soloist", drafting, wrong
        self._engine = engine
        self._temperature = temperature
        self._predictions: list[list[int] | None] = [None] * sequences
        if expected is not None and wrong is not None:
            self._predictions = [with_wrong(expected, wrong, engine.config.vocab_size)]

    def run(self, prompt_ids: list[int], new_tokens: int) -> Run:
        """As any caller asks; where there is no prediction, the answers are the next runs'."""
        count = len(self._predictions)
        self._engine.model.drafting = self.drafting
        if count == 1:
            run = self._alone(prompt_ids, new_tokens)
            answers = [run.token_ids]
        else:
            prompts = [[*prompt_ids[i:], *prompt_ids[:i]] for i in range(count)]
            run, answers = run_requests(
                self._engine, prompts, new_tokens, self._temperature, self._predictions,
                self._predicted,
            )  # fmt: skip
        self._engine.model.drafting = None
        if self.wrong is not None and self._predictions[0] is None:
            # Of the run that warms up; the same in all others.
            vocab_size = self._engine.config.vocab_size
            for number, ids in enumerate(answers[: self._predicted]):
                self._predictions[number] = with_wrong(ids, self.wrong, vocab_size)
        return run

    def _alone(self, prompt_ids: list[int], new_tokens: int) -> Run:
        """Through `Engine.generate`, detokenisation included."""
        params = fixed_params(self._temperature, new_tokens)
        times: list[float] = []
        (prediction,) = self._predictions
        for event in self._engine.generate(prompt_ids, params, prediction=prediction):
            if isinstance(event, Completion):
                break
            if event.token_ids:
                times.append(time.perf_counter())
        else:
            raise AssertionError("a request ends with a completion")
        t = event.timings
        drafted = t.tokens_per_round if self.drafting is not None else None
        accepted = t.drafts.accepted / t.drafts.drafted if t.drafts.drafted else None
        return Run(t.ttft_s, t.decode_s, event.token_ids, gaps_s(times), drafted, accepted)


def with_wrong(ids: Sequence[int], share: float, vocab_size: int) -> list[int]:
    """Tokens of which each was replaced with this probability, by any other."""
    rng = random.Random(0)  # noqa: S311 - the same every time
    return [
        (i + rng.randrange(1, vocab_size)) % vocab_size if rng.random() < share else i for i in ids
    ]


class Columns:
    """Soloist with several query tokens in each step.

    Raises:
        SettingError: the decode kernel does not run the model.
    """

    def __init__(self, engine: Engine, columns: int, temperature: float = 0.0) -> None:
        if not isinstance(engine.model, KernelModel):
            raise SettingError("--columns", columns, "1, more on a GPU only")
        self.name = "soloist"
        self._model, self._columns, self._temperature = engine.model, columns, temperature

    def run(self, prompt_ids: list[int], new_tokens: int) -> Run:
        """One launch, without the host between steps."""
        start = len(prompt_ids)
        return run_columns(
            self._model, [prompt_ids], self._columns, start, new_tokens, self._temperature
        )

    def chosen_experts(self, prompt_ids: list[int], new_tokens: int) -> float | None:
        """See `DecodeRow`."""
        return experts_of_columns(
            self._model, new_tokens, lambda steps: self.run(prompt_ids, steps)
        )


def measure(plan: Plan) -> list[rows.DecodeRow]:
    """Measure every contender; the first row is Soloist's, of the first model.

    Raises:
        SettingError: sizes that cannot be measured, or an unknown rival.
        UserError, DeviceError: as from loading the model.
    """
    _check(plan)
    # Room for this request only: on a GPU the bandwidth test wants some memory as well.
    tokens = plan.prompt_tokens + plan.new_tokens + plan.columns - 1
    engines = [
        Engine.load(
            replace(plan.asked, model=model, context_tokens=tokens, sequences=plan.sequences)
        )
        for model in (plan.asked.model, *plan.beside)
    ]
    engine, texts = engines[0], [_text_ids(plan, one) for one in engines]
    prompts = [ids[: plan.prompt_tokens] for ids in texts]
    results: list[tuple[Engine, list[int], Contender, list[Run]]] = [
        (one, ids[: plan.prompt_tokens], contender, [])
        for one, ids in zip(engines, texts, strict=True)
        for contender in _of_engine(plan, one, ids[plan.prompt_tokens :])
    ]
    if plan.against == "transformers":
        from soloist.bench.rival import rivals

        results += [(engine, prompts[0], rival, []) for rival in rivals(engine)]
    device = torch.device(engine.resolved.device)
    bandwidth = read_bandwidth(device)
    flush = Flush(device)
    with others_counted(plan.num_busy) as others, watching(gpu_uuid(device)) as watch:
        for i in range(plan.runs + 1):
            for _, prompt_ids, contender, timed in results:
                flush()
                run = contender.run(prompt_ids, plan.new_tokens)
                if i > 0:
                    timed.append(run)
    return [
        replace(
            _row(plan, one, contender, runs, bandwidth, watch.clocks),
            others_cores=others.cores,
            busy_processes=plan.num_busy,
            chosen_experts=(
                contender.chosen_experts(prompt_ids, plan.new_tokens)
                if isinstance(contender, Columns)
                else None
            ),
        )
        for one, prompt_ids, contender, runs in results
    ]


def _of_engine(plan: Plan, engine: Engine, behind: Sequence[int]) -> list[Contender]:
    """Contenders of a model; `behind` is what follows the prompt in the text."""
    if plan.columns > 1:
        return [Columns(engine, plan.columns, plan.temperature)]
    return _ours(plan, engine, None if plan.text is None else behind[: plan.new_tokens])


def _ours(plan: Plan, engine: Engine, expected: Sequence[int] | None) -> list[Contender]:
    """Without drafts, and with those that are to be measured.

    Raises:
        SettingError: this model's drafts are not checked here.
    """
    drafting, engine.model.drafting = engine.model.drafting, None
    counts = (plan.sequences, plan.predicted)
    ours: list[Contender] = [Ours(engine, plan.temperature, None, None, None, *counts)]
    if plan.wrong is not None:
        if drafting is None:
            raise SettingError("--prediction", "on", "off, since this model checks no drafts here")
        predicted = replace(drafting, looks_up=False)
        ours.append(Ours(engine, plan.temperature, predicted, plan.wrong, expected, *counts))
    if plan.looks_up:
        if drafting is None or not drafting.looks_up:
            raise SettingError("--speculate", "auto", "off, since this model looks up no drafts")
        ours.append(Ours(engine, plan.temperature, drafting, None, None, *counts))
    return ours


def _text_ids(plan: Plan, engine: Engine) -> list[int]:
    """Tokens of the prompt, and of a file also what follows.

    Raises:
        SettingError: the file is too short.
    """
    if plan.text is None:
        return python_prompt(engine, plan.prompt_tokens)
    ids = engine.tokenizer.encode(text_of(plan.text))
    most = len(ids) - (plan.wrong is not None)
    if plan.prompt_tokens > most:
        reason = ", with a token behind them for the prediction" if plan.wrong is not None else ""
        allowed = f"at most {max(0, most):,}, as many as {plan.text} has{reason}"
        raise SettingError("--prompt-tokens", plan.prompt_tokens, allowed)
    return ids


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
        ("--sequences", plan.sequences, 1),
    )
    _check_sequences(plan)
    fixed_params(plan.temperature, plan.new_tokens)
    if plan.columns > MAX_QUERIES:
        raise SettingError("--columns", plan.columns, f"at most {MAX_QUERIES}")
    if plan.wrong is not None and not 0 <= plan.wrong <= 1:
        raise SettingError("--wrong", plan.wrong, "a share from 0 to 1, such as 0.25")
    drafts = plan.looks_up or plan.wrong is not None
    if drafts and (plan.columns > 1 or plan.against is not None):
        option = "--columns" if plan.columns > 1 else "--against"
        given = plan.columns if plan.columns > 1 else plan.against
        raise SettingError(option, given, "only without --prediction and --speculate auto")
    if plan.against not in (None, "transformers"):
        raise SettingError("--against", plan.against, "transformers")
    if plan.against is not None and plan.temperature:
        raise SettingError("--against", plan.against, "only with --temperature 0, which it has")
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


def _check_sequences(plan: Plan) -> None:
    most = min(MAX_QUERIES, plan.prompt_tokens)
    if plan.sequences > most:
        reason = "" if most == MAX_QUERIES else ", as many beginnings as the prompt has"
        raise SettingError("--sequences", plan.sequences, f"at most {most}{reason}")
    if plan.predicted is not None:
        if plan.wrong is None:
            raise SettingError("--predicted", plan.predicted, "only with --prediction")
        if not 1 <= plan.predicted <= plan.sequences:
            allowed = f"1 … {plan.sequences}, the requests of --sequences"
            raise SettingError("--predicted", plan.predicted, allowed)
    for option, given in (
        ("--columns", None if plan.columns == 1 else plan.columns),
        ("--against", plan.against),
        ("--text", plan.text),
    ):
        if plan.sequences > 1 and given is not None:
            raise SettingError(option, given, "only without --sequences")


def _row(
    plan: Plan,
    engine: Engine,
    contender: Contender,
    runs: list[Run],
    bandwidth: Bandwidth,
    clocks: rows.Clocks | None,
) -> rows.DecodeRow:
    name, drafting, wrong = contender.name, "", None
    if isinstance(contender, Ours) and contender.drafting is not None:
        wrong = contender.wrong
        drafting = "lookup" if wrong is None else "prediction"
    per_round = [run.tokens_per_round for run in runs if run.tokens_per_round is not None]
    accepted = [run.accepted for run in runs if run.accepted is not None]
    beside = [x for run in runs if (x := run.beside_tokens_per_s) is not None]
    columns, sharing = plan.columns * plan.sequences, 1
    if engine.model.shares_steps:
        sharing = plan.sequences
    speeds = [columns * (plan.new_tokens - 1) / run.decode_s for run in runs]
    speed = rows.Spread.of(speeds)
    chosen = engine.resolved
    kv = chosen.kv if name == "soloist" else plain(chosen.dtype)
    middle = plan.prompt_tokens + plan.new_tokens // 2
    streamed = engine.report.streamed_bytes + sharing * kv_bytes_seen(engine.config, kv, middle)
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
        columns=columns,
        runs=len(runs),
        ttft_ms=rows.Spread.of([run.ttft_s * 1e3 for run in runs]),
        decode_tokens_per_s=speed,
        streamed_bytes_per_token=streamed,
        bandwidth_gb_per_s=round(bandwidth.gb_per_s, 2),
        mbu=round(
            streamed
            * speed.median
            / (median(per_round) if per_round else plan.columns)
            / sharing
            / max(1, gpus)
            / bandwidth.gb_per_s
            / 1e9,
            3,
        ),
        speculation=bool(drafting),
        drafting=drafting,
        wrong=wrong,
        tokens_per_round=round(median(per_round), 2) if per_round else None,
        temperature=plan.temperature,
        output_ids_sha256=" ".join(sorted(hashes)),
        sequences=plan.sequences,
        start_position=plan.prompt_tokens,
        bandwidth_method=bandwidth.method,
        token_ms=token_ms(runs),
        clocks=clocks,
        weights=engine.report.weights if name == "soloist" else chosen.dtype.value,
        kv="" if kv.is_plain else kv.name,
        accepted=round(median(accepted), 3) if accepted else None,
        text="" if plan.text is None else plan.text.name,
        predicted=plan.predicted,
        beside_tokens_per_s=rows.Spread.of(beside) if beside else None,
        **record.origin(*packages),
    )


def token_ms(runs: Sequence[Run]) -> rows.Percentiles:
    """Times between tokens of all runs, in milliseconds."""
    return rows.Percentiles.of([t * 1e3 for run in runs for t in run.token_s])
