"""What can run on this machine: the planner's answer for each GPU, in each precision."""

from dataclasses import dataclass

from soloist.cli.machine import Card, read_cards
from soloist.errors import CudaMissing, SoloistError
from soloist.jit.compiler import nvrtc_version
from soloist.model.dtype import Dtype
from soloist.model.families import read_config
from soloist.model.folder import CONFIG_FILE, shipped_folder


@dataclass(frozen=True, slots=True)
class Verdict:
    """What runs here.

    Attributes:
        can_run: some model can, if only on the CPU.
        lines: for people, by executor.
    """

    can_run: bool
    lines: dict[str, str]


def judge() -> Verdict:
    """Ask torch, the engine and the planner; nothing is loaded or compiled.

    Raises whatever the import of a broken package raises: then nothing runs.
    """
    import torch

    import soloist.engine  # noqa: F401 - every package that it needs is imported here

    lines = {"reference": f"yes, on the CPU: {', '.join(dtype.value for dtype in Dtype)}"}
    if reason := _no_kernel():
        lines["decode kernel"] = f"no: {reason}"
        return Verdict(True, lines)
    if not torch.cuda.is_available():
        build = torch.version.cuda or "none"
        lines["decode kernel"] = (
            f"no: the driver shows a GPU, but torch {torch.__version__} cannot use it (its CUDA: "
            f"{build}); install torch's CUDA build: pip install --force-reinstall torch"
        )
        return Verdict(True, lines)
    for number, card in enumerate(read_cards()):
        lines[f"decode kernel, GPU {number}"] = _on(card)
    return Verdict(True, lines)


def _no_kernel() -> str:
    """What the kernel lacks whatever the model; empty where it lacks nothing."""
    try:
        cards = read_cards()
        nvrtc_version()
    except CudaMissing as error:
        return error.message
    return "" if cards else "the driver shows no GPU"


def _on(card: Card) -> str:
    from soloist.engine.support import support_on

    gpu = card.capability, card.num_sms, card.shared_bytes
    try:
        config = read_config(shipped_folder("etude") / CONFIG_FILE)
        found = {dtype: support_on(*gpu, config, dtype) for dtype in Dtype}
    except SoloistError as error:
        return f"no: {error.message}"
    if able := [dtype.value for dtype, support in found.items() if support.plan is not None]:
        return f"yes: {', '.join(able)}"
    return f"no: {found[Dtype.BF16].refusal.partition(';')[0]}"
