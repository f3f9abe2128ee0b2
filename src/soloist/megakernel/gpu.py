"""What the planner has to know about a GPU. Pure: figures, no driver."""

from dataclasses import dataclass

from soloist.errors import GpuUnsupported
from soloist.megakernel.tuning import HOPPER, NEWER, OLDER, Tuning

LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A generation of GPUs: what its code may do, and what was weighed on it.

    Attributes:
        moves_registers: warps may pass registers to others of their block (`setmaxnreg`).
        consumer_registers: of each thread that multiplies.
        helper_registers: of each thread that does not.
        tuning: figures for the planner.
    """

    moves_registers: bool
    consumer_registers: int
    helper_registers: int
    tuning: Tuning


# When a block of 9 to 12 warps starts, a quarter of the SM has 512 registers for every lane, which
# three warps share in eights: 168. Two groups of four warps may then take some from the third:
# 2 · 216 + 72 = 3 · 168.
_OLDER = Architecture(False, 168, 168, OLDER)
_NEWER = Architecture(True, 216, 72, NEWER)
_HOPPER = Architecture(True, 216, 72, HOPPER)
# By what the compiler calls them. The letter a: code for this architecture alone, which may move
# registers. Any other is taken for an older one.
ARCHITECTURES = {
    "sm_90a": _HOPPER,
    **dict.fromkeys(("sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a"), _NEWER),
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or a typical one of its architecture.

    Attributes:
        arch: what the compiler calls it, such as 'sm_90a'.
        num_sms: streaming multiprocessors.
        shared_bytes: shared memory that one block may take.
    """

    arch: str
    num_sms: int
    shared_bytes: int

    @property
    def architecture(self) -> Architecture:
        """What its code may do, and what was weighed on it."""
        return ARCHITECTURES.get(self.arch, _OLDER)


# One typical chip for each architecture that the kernel is compiled for: A100, RTX 3090, RTX 4090,
# H200, B200, RTX 5090. Sizes as in the CUDA programming guide, table of technical specifications.
TYPICAL = {
    gpu.arch: gpu
    for gpu in (
        Gpu("sm_80", 108, 163 * 1024),
        Gpu("sm_86", 82, 99 * 1024),
        Gpu("sm_89", 128, 99 * 1024),
        Gpu("sm_90a", 132, 227 * 1024),
        Gpu("sm_100a", 148, 227 * 1024),
        Gpu("sm_120a", 170, 99 * 1024),
    )
}


def arch_from_capability(major: int, minor: int) -> str:
    """What the compiler calls a GPU of this compute capability.

    Raises:
        GpuUnsupported: older than 8.0, the first with asynchronous copies to shared memory and the
            barriers that they complete.
    """
    if (major, minor) < LEAST_CAPABILITY:
        raise GpuUnsupported(f"{major}.{minor}")
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def gpu_from_capability(major: int, minor: int, num_sms: int, shared_bytes: int) -> Gpu:
    """The GPU at hand, from what its driver says.

    Raises:
        GpuUnsupported: older than compute capability 8.0.
    """
    return Gpu(arch_from_capability(major, minor), num_sms, shared_bytes)
