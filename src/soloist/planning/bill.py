"""What tokens and interactive steps cost on hardware that is paid by the hour. Pure."""

from dataclasses import dataclass, replace

from soloist.planning.bounds import prompt_cost
from soloist.planning.cost import ApiPrices, Machine, Work
from soloist.planning.expectation import prompt_s
from soloist.planning.reach import Reach, Subject


@dataclass(frozen=True, slots=True)
class Costs:
    """What is paid.

    Attributes:
        machine: one GPU.
        work: an interactive step.
        api: prices to set beside it, or None.
    """

    machine: Machine
    work: Work
    api: ApiPrices | None


@dataclass(frozen=True, slots=True)
class Bill:
    """Of one precision on one number of GPUs, at expected speeds.

    Attributes:
        machine: all its GPUs.
        thousand_tokens: made, without speculation.
        read_s: reading a step's prompt; None where peak FLOP/s are not known.
        step_s: a step: reading, then making its tokens; None as `read_s`.
        step, step_speculating: what a step costs without and with speculation; None as `read_s`,
            the second also where nothing is drafted.
        api_step: the same step by the API; None without prices.
    """

    machine: Machine
    thousand_tokens: float
    read_s: float | None
    step_s: float | None
    step: float | None
    step_speculating: float | None
    api_step: float | None


def bill(subject: Subject, row: Reach, costs: Costs) -> Bill:
    """The arithmetic of `cost`, on the times of `expectation`."""
    work = costs.work
    machine = replace(costs.machine, price_per_hour=costs.machine.price_per_hour * row.gpus)
    reading = prompt_cost(subject.model, row.precision, work.prompt_tokens)
    read_s = prompt_s(reading, subject.model.num_layers, subject.hardware, row.gpus)
    step_s = speculating_s = None
    if read_s is not None:
        step_s = read_s + work.new_tokens * row.expected.token_s
        if row.speculating is not None:
            speculating_s = read_s + work.new_tokens / row.speculating.tokens_per_s
    return Bill(
        machine=machine,
        thousand_tokens=machine.cost(1000 * row.expected.token_s),
        read_s=read_s,
        step_s=step_s,
        step=None if step_s is None else machine.cost(step_s),
        step_speculating=None if speculating_s is None else machine.cost(speculating_s),
        api_step=None
        if costs.api is None
        else costs.api.cost(work.prompt_tokens, 0, work.new_tokens),
    )
