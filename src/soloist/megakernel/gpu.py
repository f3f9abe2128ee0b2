"""What the planner has to know about a GPU. Pure: figures, no driver."""

from dataclasses import dataclass

from soloist.errors import GpuUnsupported

LEAST_CAPABILITY = (8, 0)

# Registers of a thread when a block of 9 to 12 warps starts: a quarter of the SM has 512 for every
# lane, which three warps share in eights.
_START_REGISTERS = 168
# After two groups of four warps took some from the third: 2 · 216 + 72 = 3 · 168.
_MOVED_CONSUMER_REGISTERS, _MOVED_HELPER_REGISTERS = 216, 72


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or a typical one of its architecture.

    Attributes:
        arch: what the compiler calls it, such as 'sm_90a'. The letter a: code for this architecture
            alone, which may move registers between warps (`setmaxnreg`).
        num_sms: streaming multiprocessors.
        shared_bytes: shared memory that one block may take.
    """

    arch: str
    num_sms: int
    shared_bytes: int

    @property
    def moves_registers(self) -> bool:
        """Warps may pass registers to others of their block."""
        return self.arch.endswith("a")

    @property
    def is_tuned(self) -> bool:
        """Kernels were weighed on it. Elsewhere they were only compiled, with fewer registers."""
        return self.arch == "sm_90a"

    @property
    def consumer_registers(self) -> int:
        """Of each thread that multiplies."""
        return _MOVED_CONSUMER_REGISTERS if self.moves_registers else _START_REGISTERS

    @property
    def helper_registers(self) -> int:
        """Of each thread that does not."""
        return _MOVED_HELPER_REGISTERS if self.moves_registers else _START_REGISTERS


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
