"""What the planner has to know about a GPU. Pure: figures, no driver."""

from dataclasses import dataclass

from soloist.errors import GpuUnsupported


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or a typical one of its architecture.

    Attributes:
        arch: what the compiler calls it, such as 'sm_90a'.
        num_sms: streaming multiprocessors.
        shared_bytes: shared memory that one block may take.
        bulk_copies: has a copy engine that fills shared memory and signals a barrier (sm_90 on).
    """

    arch: str
    num_sms: int
    shared_bytes: int
    bulk_copies: bool


# One typical chip for each architecture that the kernel is compiled for: A100, RTX 3090, RTX 4090,
# H200, B200, RTX 5090. Sizes as in the CUDA programming guide, table of technical specifications.
TYPICAL = {
    gpu.arch: gpu
    for gpu in (
        Gpu("sm_80", 108, 163 * 1024, bulk_copies=False),
        Gpu("sm_86", 82, 99 * 1024, bulk_copies=False),
        Gpu("sm_89", 128, 99 * 1024, bulk_copies=False),
        Gpu("sm_90a", 132, 227 * 1024, bulk_copies=True),
        Gpu("sm_100", 148, 227 * 1024, bulk_copies=True),
        Gpu("sm_120", 170, 99 * 1024, bulk_copies=True),
    )
}


def gpu_from_capability(major: int, minor: int, num_sms: int, shared_bytes: int) -> Gpu:
    """The GPU at hand, from what its driver says.

    Raises:
        GpuUnsupported: older than compute capability 8.0.
    """
    if (major, minor) < (8, 0):
        raise GpuUnsupported(f"{major}.{minor}")
    suffix = "a" if (major, minor) == (9, 0) else ""
    return Gpu(f"sm_{major}{minor}{suffix}", num_sms, shared_bytes, bulk_copies=major >= 9)
