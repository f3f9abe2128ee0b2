"""GPUs in figures, from their makers' publications. No driver is asked.

Those of the MI450 are from a report of what its maker announced; there is no datasheet yet.

Gigabytes and terabytes are decimal, as datasheets write them; where a chip has more (the 24 GB of
an RTX 4090 are 24 GiB), the difference is reserve. FLOP/s are dense, of 16-bit inputs summed in
fp32: where a source states sparse or 8-bit rates, what follows for these. Links stated for both
directions together count half. A figure that does not follow from what the maker states is None.
"""

import re
from dataclasses import dataclass

from soloist.errors import HardwareNotDetected, UnknownHardware

GB, TB = 10**9, 10**12


@dataclass(frozen=True, slots=True)
class Link:
    """How GPUs of one machine reach each other.

    Attributes:
        name: such as 'NVLink 4'.
        bytes_per_s: out of one GPU, in one direction, to all others together; None: not known.
    """

    name: str
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of GPU.

    Attributes:
        name: what `--hardware` calls it.
        memory_bytes: of one GPU.
        bandwidth: peak memory bandwidth in bytes a second.
        flops: dense 16-bit FLOP/s; None: not stated.
        link: to the other GPUs of a machine.
        source: where the figures are published.
        arch: what the compiler calls it; None: Soloist has no kernel for it.
        driver_name: how the driver names exactly this GPU; None: it is never detected.
        announced: not yet sold when this was written; figures may change.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops: float | None
    link: Link
    source: str
    arch: str | None = None
    driver_name: str | None = None
    announced: bool = False


_PCIE_4 = Link("PCIe 4.0 x16", 32 * GB)
_PCIE_5 = Link("PCIe 5.0 x16", 64 * GB)

HARDWARE = (
    Hardware(
        "RTX 3090", 24 * GB, 936 * GB, 71e12, _PCIE_4,
        "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf",
        "sm_86", "NVIDIA GeForce RTX 3090",
    ),
    Hardware(
        "RTX 4090", 24 * GB, 1_008 * GB, 165.2e12, _PCIE_4,
        "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
        "sm_89", "NVIDIA GeForce RTX 4090",
    ),
    Hardware(
        "RTX 5090", 32 * GB, 1_792 * GB, 209.5e12, _PCIE_5,
        "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf",
        "sm_120a", "NVIDIA GeForce RTX 5090",
    ),
    Hardware(
        "RTX 6000 Ada", 48 * GB, 960 * GB, 364.2e12, _PCIE_4,
        "https://www.nvidia.com/en-us/design-visualization/rtx-6000/",
        "sm_89", "NVIDIA RTX 6000 Ada Generation",
    ),
    Hardware(
        "A100 80GB", 80 * GB, 2_039 * GB, 312e12, Link("NVLink 3", 300 * GB),
        "https://www.nvidia.com/en-us/data-center/a100/",
        "sm_80", "NVIDIA A100-SXM4-80GB",
    ),
    Hardware(
        "H100 SXM", 80 * GB, 3.35 * TB, 989e12, Link("NVLink 4", 450 * GB),
        "https://www.nvidia.com/en-us/data-center/h100/",
        "sm_90a", "NVIDIA H100 80GB HBM3",
    ),
    Hardware(
        "H200", 141 * GB, 4.8 * TB, 989e12, Link("NVLink 4", 450 * GB),
        "https://www.nvidia.com/en-us/data-center/h200/",
        "sm_90a", "NVIDIA H200",
    ),
    Hardware(
        "B200", 180 * GB, 8 * TB, 2_250e12, Link("NVLink 5", 900 * GB),
        "https://www.nvidia.com/en-us/data-center/dgx-b200/",
        "sm_100a", "NVIDIA B200",
    ),
    Hardware(
        "MI300X", 192 * GB, 5.3 * TB, 1_307.4e12, Link("Infinity Fabric", 448 * GB),
        "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
    ),
    Hardware(
        "Rubin", 288 * GB, 22 * TB, None, Link("NVLink 6", 1_800 * GB),
        "https://developer.nvidia.com/blog/inside-the-nvidia-rubin-platform-six-new-chips-one-ai-supercomputer/",
        announced=True,
    ),
    Hardware(
        "MI450", 432 * GB, 19.6 * TB, None, Link("scale-up link", None),
        "https://hothardware.com/news/instinct-mi400-challenge-vera-rubin",
        announced=True,
    ),
)  # fmt: skip


def find_hardware(given: str) -> Hardware:
    """The GPU of this name; case and blanks do not count, and a part that only one has is enough.

    Raises:
        UnknownHardware: the table has none, or more than one with this part.
    """
    wanted = _plain(given)
    exact = [h for h in HARDWARE if wanted in {_plain(h.name), _plain(h.driver_name or h.name)}]
    found = exact or [h for h in HARDWARE if wanted and wanted in _plain(h.name)]
    if len(found) != 1:
        raise UnknownHardware(given, names())
    return found[0]


def from_driver_name(name: str) -> Hardware:
    """The GPU that the driver calls `name`.

    Raises:
        HardwareNotDetected: the table has no figures for it.
    """
    for hardware in HARDWARE:
        if hardware.driver_name == name:
            return hardware
    raise HardwareNotDetected(f"there are no figures for this machine's {name}", names())


def names() -> list[str]:
    """What `--hardware` takes."""
    return [h.name for h in HARDWARE]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
