"""`soloist trace`: where a token's time goes in the decode kernel, by its own time stamps.

And by builds that leave something out: what the rest takes without it. A second traced round,
without the stream, tells what multiplying takes where nothing has to be waited for.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from soloist.bench import record
from soloist.bench.sizes import require_at_least
from soloist.bench.subject import (
    NOT_ROUNDED,
    Subject,
    model_subject,
    require_gpu,
    shape_placement,
    shape_subject,
)
from soloist.bench.timeline import About, Timeline, timeline, times_by_phase
from soloist.engine import EngineConfig
from soloist.engine.bandwidth import Bandwidth, read_bandwidth
from soloist.engine.config import GpuCount, Precision
from soloist.engine.core import tokens_of
from soloist.engine.request import Request
from soloist.errors import SettingError
from soloist.megakernel.header import ABLATIONS, Build
from soloist.megakernel.launch import Query
from soloist.megakernel.trace import BlockTimes, block_times, spans
from soloist.sampling import Sampler, SamplingParams
from soloist.weights.choice import Rounding

# Launches that are timed, after one that is not.
_LAUNCHES = 3
_MOST_ROUNDS = 4000


@dataclass(frozen=True, slots=True)
class Plan:
    """What to look at.

    Attributes:
        model: a folder, a hub id or a shipped model; unused with a shape.
        shape: a config.json, for random weights instead.
        prompt: text; None for `prompt_tokens` of Python text or, with a shape, random tokens.
        prompt_tokens: length of the prompt where no text is given.
        context: with a shape, position from which to decode, over random keys and values.
        at_round: which of a launch's rounds to look at, or how many to time.
        device: 'auto', 'cuda' or 'cuda:N'.
        precision: of weights and KV cache.
        gpus: how many run it together, or 'auto'; a trace shows the first one.
        rounding: what matrices are rounded to or, with a shape, random codes of.
        accepted_fields: of the model's config.json, that nobody knows.
    """

    model: str
    shape: Path | None
    prompt: str | None
    prompt_tokens: int
    context: int | None
    at_round: int
    device: str
    precision: Precision
    gpus: GpuCount = 1
    rounding: Rounding = NOT_ROUNDED
    accepted_fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BuildTime:
    """How long a round of one build takes.

    Attributes:
        leaves_out: a name of `ABLATIONS`.
        round_us: median over launches.
    """

    leaves_out: str
    round_us: float


@dataclass(frozen=True, slots=True)
class Ablations:
    """All builds, and what memory alone would allow.

    Attributes:
        shape, device, precision: what was measured.
        position: of the middle round.
        streamed_bytes: of that round.
        bandwidth_gb_per_s: measured read bandwidth of the device.
        builds: one for each of `ABLATIONS`.
        weights: how matrices are stored, as result files call it.
    """

    shape: str
    device: str
    precision: str
    position: int
    streamed_bytes: int
    bandwidth_gb_per_s: float
    builds: tuple[BuildTime, ...]
    weights: str

    @property
    def floor_us(self) -> float:
        """The round's bytes at the measured bandwidth."""
        return self.streamed_bytes / self.bandwidth_gb_per_s / 1e3


def trace(plan: Plan) -> Timeline:
    """Trace one round of one sequence.

    Raises:
        SettingError: sizes that cannot be traced.
        UserError, DeviceError: no GPU, or a model that the kernel does not run.
    """
    subject, bandwidth = _subject(plan)
    rounds = plan.at_round + 2
    first = _first_token(subject)
    untraced_us = _round_us(subject, [first], rounds)
    host_us = _host_us(subject, first, rounds)
    # The traced round is not the last: the stream goes on behind it, as it does in any other.
    made = _tokens(subject, first, rounds)
    resident = _traced(subject, [first, *made[:-1]], plan.at_round, "stream")
    blocks = _traced(subject, [first], plan.at_round, "none")
    position = subject.start + plan.at_round
    kernel = subject.model.plan
    between = spans(kernel)
    about = About(
        shape=subject.name,
        device=subject.device_name,
        precision=kernel.dtype.value,
        position=position,
        num_layers=kernel.model.num_layers,
        streamed_bytes=subject.streamed_bytes(position),
        bandwidth_gb_per_s=round(bandwidth.gb_per_s, 2),
        untraced_us=round(untraced_us, 2),
        commit=record.commit(),
        command=record.command(),
        date=record.now(),
        phase_bytes=subject.phase_bytes(position),
        host_us=round(host_us, 2),
        weights=subject.weights,
    )
    alone = timeline(resident, between, about)
    resident_us = {
        phase.phase: round(phase.multiplying_us, 3)
        for phase in times_by_phase(alone.slices, len(alone.sms))
    }
    return timeline(blocks, between, replace(about, resident_us=resident_us))


def _tokens(subject: Subject, first: int, rounds: int) -> list[int]:
    """What the whole kernel makes after `first`."""
    chosen = subject.model.decoder.run([Query(0, subject.start, [first])], rounds)
    return [tokens[0] for tokens in chosen]


def _traced(
    subject: Subject, tokens: list[int], at_round: int, leaves_out: str
) -> list[BlockTimes]:
    """Marks of one round of a build, which is given these tokens first."""
    decoder = subject.model.decoder
    decoder.load(Build(trace_round=at_round, ablation=ABLATIONS[leaves_out]))
    decoder.trace.zero_()
    decoder.run([Query(0, subject.start, tokens)], at_round + 2)
    # Attention blocks have left where the cache is split.
    rows = (row for row in decoder.trace.tolist() if any(row))
    return [block_times(subject.model.plan, row) for row in rows]


def ablate(plan: Plan) -> Ablations:
    """Time a round of every build; each is given the tokens that the whole kernel chose.

    Raises:
        SettingError, UserError, DeviceError: as from `trace`.
    """
    subject, bandwidth = _subject(plan)
    rounds = plan.at_round + 2
    first = _first_token(subject)
    decoder = subject.model.decoder
    made = _tokens(subject, first, rounds)
    builds = []
    for name, ablation in ABLATIONS.items():
        decoder.load(Build(ablation=ablation))
        builds.append(BuildTime(name, round(_round_us(subject, [first, *made[:-1]], rounds), 2)))
    position = subject.start + rounds // 2
    return Ablations(
        shape=subject.name,
        device=subject.device_name,
        precision=subject.model.plan.dtype.value,
        position=position,
        streamed_bytes=subject.streamed_bytes(position),
        bandwidth_gb_per_s=round(bandwidth.gb_per_s, 2),
        builds=tuple(builds),
        weights=subject.weights,
    )


def _subject(plan: Plan) -> tuple[Subject, Bandwidth]:
    """The model, loaded after the bandwidth test, which wants some memory as well."""
    require_at_least(
        ("--prompt-tokens", plan.prompt_tokens, 1),
        ("--context", 1 if plan.context is None else plan.context, 1),
        ("--round", plan.at_round, 1),
    )
    if plan.at_round > _MOST_ROUNDS:
        raise SettingError("--round", plan.at_round, f"at most {_MOST_ROUNDS}")
    device = require_gpu(
        plan.device,
        "without one, look at a trace that was made elsewhere: soloist trace --from FILE",
    )
    bandwidth, rounds = read_bandwidth(device), plan.at_round + 2
    if plan.shape is None:
        asked = EngineConfig(
            plan.model, plan.device, plan.precision, gpus=plan.gpus,
            weights=plan.rounding.layers, head_weights=plan.rounding.head,
            accepted_fields=plan.accepted_fields,
        )  # fmt: skip
        return model_subject(asked, plan.prompt, plan.prompt_tokens, rounds), bandwidth
    placed = shape_placement(plan.shape, plan.precision, device, plan.device, plan.gpus)
    subject = shape_subject(
        plan.shape, plan.precision, placed, plan.prompt_tokens, rounds, plan.context,
        plan.rounding,
    )  # fmt: skip
    return subject, bandwidth


def _first_token(subject: Subject) -> int:
    """Run the prompt; what follows it."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    sampler = Sampler(params, subject.model.plan.model.vocab_size, subject.prompt_ids)
    (token_id,) = tokens_of(subject.model, Request(subject.prompt_ids, sampler))
    return token_id


def _host_us(subject: Subject, first: int, rounds: int) -> float:
    """By how much a token of a request takes longer than a round, over so many tokens."""
    prompt, results = subject.prompt_ids, []
    params = SamplingParams(max_tokens=rounds, ignore_eos=True)
    for _ in range(_LAUNCHES + 1):
        sampler = Sampler(params, subject.model.plan.model.vocab_size, prompt)
        made = tokens_of(subject.model, Request(prompt, sampler))
        times = [time.perf_counter() for _ in made]
        results.append((times[-1] - times[0]) / (rounds - 1) * 1e6)
    round_us = _round_us(subject, [first], rounds, len(prompt))
    return max(0.0, median(results[1:]) - round_us)


def _round_us(
    subject: Subject, tokens: list[int], rounds: int, position: int | None = None
) -> float:
    """Time of a round as the host sees tokens come, median over launches.

    From `position` on; None: from where measuring starts.
    """
    start, results = subject.start if position is None else position, []
    for _ in range(_LAUNCHES + 1):
        subject.model.decoder.start([Query(0, start, tokens)], rounds)
        times = [time.perf_counter() for _ in subject.model.decoder.tokens()]
        results.append((times[-1] - times[0]) / (rounds - 1) * 1e6)
    return median(results[1:])
