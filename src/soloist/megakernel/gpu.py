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
    """

    arch: str
    num_sms: int
    shared_bytes: int


# One typical chip for each architecture that the kernel is compiled for: H200, B200,
# RTX 5090. Sizes as in the CUDA programming guide, table of technical specifications.
TYPICAL = {
    gpu.arch: gpu
    for gpu in (
        Gpu("sm_90a", 132, 227 * 1024),
        Gpu("sm_100", 148, 227 * 1024),
        Gpu("sm_120", 170, 99 * 1024),
    )
}


def gpu_from_capability(major: int, minor: int, num_sms: int, shared_bytes: int) -> Gpu:
    """The GPU at hand, from what its driver says.

    Raises:
        GpuUnsupported: older than compute capability 9.0, the first with bulk copies.
    """
    if (major, minor) < (9, 0):
        raise GpuUnsupported(f"{major}.{minor}")
    suffix = "a" if (major, minor) == (9, 0) else ""
    return Gpu(f"sm_{major}{minor}{suffix}", num_sms, shared_bytes)
