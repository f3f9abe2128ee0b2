"""What a machine makes of a model's files: whether it fits, and which executor runs it.

Headers are read, weights are not.
"""

from dataclasses import dataclass
from pathlib import Path

from soloist.cli.machine import Machine
from soloist.errors import SoloistError, gigabytes
from soloist.model.checkpoint import Checkpoint, open_checkpoint
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import FAMILIES, read_config, tensors
from soloist.model.folder import config_file
from soloist.model.quantization.matrices import describe
from soloist.model.tensors import TensorSpec
from soloist.weights.choice import Rounding, choose, held_tensors, left_in_files


@dataclass(frozen=True, slots=True)
class Fit:
    """A model on a machine.

    Attributes:
        weights: how they are stored, such as 'bf16' or 'int4 (gptq: groups of 128)'.
        precision: in which it runs by default; None where it does not run.
        needed_bytes: with a context of one token.
        room_bytes: what is free where it would run.
        context_tokens: how many fit; 0 where the weights do not.
        most_tokens: context of the model.
        executor: 'decode kernel' or 'reference'; None where it does not run.
        obstacle: why it does not run, or not on the kernel; empty where nothing is in the way.
    """

    weights: str = "–"
    precision: str | None = None
    needed_bytes: int | None = None
    room_bytes: int | None = None
    context_tokens: int = 0
    most_tokens: int = 0
    executor: str | None = None
    obstacle: str = ""

    @property
    def fits_in_words(self) -> str:
        """'yes', or what is missing."""
        if self.needed_bytes is None or self.room_bytes is None:
            return "–"
        if self.context_tokens == 0:
            return f"no: {gigabytes(self.needed_bytes)}, {gigabytes(self.room_bytes)} free"
        if self.context_tokens < self.most_tokens:
            return f"context {self.context_tokens:,} of {self.most_tokens:,}"
        return f"yes, context {self.most_tokens:,}"

    @property
    def runs_in_words(self) -> str:
        """The executor, or why there is none."""
        if self.executor is None:
            return f"no: {self.obstacle}"
        because = f" ({self.obstacle})" if self.obstacle else ""
        return f"{self.executor}, {self.precision}{because}"

    @property
    def in_words(self) -> str:
        """All of it in one line."""
        if self.executor is None:
            return self.runs_in_words
        return f"{self.weights} · fits: {self.fits_in_words} · runs on: {self.runs_in_words}"


def find_fit(folder: Path, machine: Machine) -> Fit:
    """Judge a model's folder; one that cannot be read says why in `obstacle`."""
    try:
        config = read_config(config_file(folder))
        specs = tensors(config)
        checkpoint = open_checkpoint(folder)
        checkpoint.check(specs, FAMILIES[config.family].ignored(config))
        return _judged(checkpoint, config, specs, machine)
    except SoloistError as error:
        return Fit(obstacle=error.message)


def _judged(
    checkpoint: Checkpoint, config: ModelConfig, specs: tuple[TensorSpec, ...], machine: Machine
) -> Fit:
    # The engine's modules import torch: seconds that a list without models need not take.
    from soloist.engine.memory import Footprint
    from soloist.engine.support import Support, support_on
    from soloist.prefill.packed_prompts import packs_prompts
    from soloist.prefill.page_form import page_form

    dtype, card = checkpoint.dtype, machine.card
    support, chosen = Support(None), choose(checkpoint, config, specs, Rounding())
    if card is not None:
        support = support_on(
            card.capability, card.num_sms, card.shared_bytes, config, dtype, stored=chosen.stored
        )

    def on_cpu(dtype: Dtype) -> Footprint:
        held = held_tensors(config, left_in_files(chosen, checkpoint, dtype))
        return Footprint(config, held, dtype)

    attends_pages = support.plan is not None and page_form(support.plan) is not None
    footprint = Footprint(
        config, specs, dtype, support.plan, packs_prompts(support.plan), attends_pages
    )
    if card is None:  # fp32 where it fits, as the engine chooses
        in_fp32 = on_cpu(Dtype.FP32)
        fits = in_fp32.fitting_context(machine.room_bytes) > 0
        footprint = in_fp32 if fits else on_cpu(Dtype.BF16)
    found = checkpoint.quantization
    return Fit(
        weights=dtype.value if found is None else describe(found, specs),
        precision=footprint.dtype.value,
        needed_bytes=footprint.estimate(1).needed_bytes,
        room_bytes=machine.room_bytes,
        context_tokens=footprint.fitting_context(machine.room_bytes),
        most_tokens=config.context_tokens,
        executor="reference" if support.plan is None else "decode kernel",
        obstacle=support.refusal.partition(";")[0],
    )
