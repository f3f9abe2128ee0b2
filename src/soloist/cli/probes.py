"""Questions to this machine, one a function, each of which may fail without harm to the others.

A probe returns lines for people by name. It raises whatever its libraries raise: the doctor turns
that into a line, and gives up on a probe that takes too long. No probe names users or hosts.
"""

import os
import platform
import re
import shutil
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

import psutil

from soloist import __version__
from soloist.cli.machine import Card, read_cards
from soloist.device import available_memory_bytes, cpu_name, usable_cores
from soloist.errors import CudaMissing, gigabytes
from soloist.jit.bindings import driver
from soloist.jit.compiler import nvrtc_version
from soloist.parallel.peers import can_access, largest_group
from soloist.parallel.share import RANKS
from soloist.settings import read_settings

Lines = dict[str, str]

_NAME = re.compile(r"[\w.-]+")

# Instructions that products on a CPU are quick with, as Linux and macOS call them.
_INSTRUCTIONS = (
    "avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "avx_vnni", "avx512_vnni",
    "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimdhp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip


def software() -> Lines:
    """Soloist, Python and the system."""
    return {
        "soloist": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def packages() -> Lines:
    """Versions of what Soloist requires, as installed."""
    required = [r for r in metadata.requires("soloist") or [] if "extra ==" not in r]
    names = [found[0] for r in required if (found := _NAME.match(r))]
    return {name: _version(name) for name in names if name != "torch"}  # which has its own probe


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def torch() -> Lines:
    """Its version, and whether it sees a GPU."""
    import torch as library

    cuda = library.version.cuda
    sees = f"sees {library.cuda.device_count()} GPUs" if cuda else "built without CUDA"
    return {
        "torch": f"{library.__version__}, CUDA {cuda}, {sees}"
        if cuda
        else f"{library.__version__}, {sees}"
    }


def cuda() -> Lines:
    """Driver and compiler."""
    found = {}
    try:
        _, number = driver().cuDriverGetVersion()
        found["CUDA driver"] = f"{number // 1000}.{number % 1000 // 10}"
    except CudaMissing as error:
        found["CUDA driver"] = f"none: {error.message}"
    try:
        found["NVRTC"] = ".".join(map(str, nvrtc_version()))
    except CudaMissing as error:
        found["NVRTC"] = f"none: {error.message}"
    return found


def gpus() -> Lines:
    """Each card, and which can reach each other's memory."""
    try:
        cards = read_cards()
    except CudaMissing:  # the line of the CUDA driver says why
        return {"GPUs": "none, without a driver"}
    if not cards:
        return {"GPUs": "the driver shows none"}
    found = {f"GPU {number}": _card(card) for number, card in enumerate(cards)}
    if len(cards) > 1:
        numbers = range(len(cards))
        group = largest_group(numbers, can_access)
        together = max(n for n in RANKS if n <= len(group))
        reached = f"GPUs {', '.join(map(str, group))} reach each other's memory"
        found["peer access"] = reached if len(group) > 1 else "none between any two GPUs"
        found["together"] = f"up to {together} for one model (--gpus {together})"
    return found


def _card(card: Card) -> str:
    free = "" if card.free_bytes is None else f", {gigabytes(card.free_bytes)} free"
    major, minor = card.capability
    return (
        f"{card.name}, {gigabytes(card.memory_bytes)}{free}, compute capability {major}.{minor}, "
        f"{card.num_sms} SMs"
    )


def nvml() -> Lines:
    """The display driver's version and each card's NVLinks."""
    import pynvml  # type: ignore[import-untyped]

    pynvml.nvmlInit()
    found = {"NVIDIA driver": str(pynvml.nvmlSystemGetDriverVersion())}
    for number in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(number)
        up = 0
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            try:
                up += pynvml.nvmlDeviceGetNvLinkState(handle, link)
            except pynvml.NVMLError:  # no such link
                break
        found[f"card {number}"] = f"{up} NVLinks up"
    return found


def cpu() -> Lines:
    """Cores, instructions and memory."""
    cores = usable_cores()
    flags = _cpu_flags()
    known = [name for name in _INSTRUCTIONS if name in flags]
    return {
        "CPU": cpu_name(cores),
        "instructions": ", ".join(known) or "not known",
        "memory": f"{gigabytes(psutil.virtual_memory().total)}, "
        f"{gigabytes(available_memory_bytes())} free for this process",
    }


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    names = ("flags", "Features")
    return next(
        (set(line.split(":", 1)[1].split()) for line in lines if line.startswith(names)), set()
    )


def models() -> Lines:
    """The hub's cache: where, how large, how much room."""
    from soloist.model.hub_cache import cache_folder, cached_models

    hub = cache_folder()
    held = sum(model.num_bytes for model in cached_models())
    return {"models": f"{hub}, {gigabytes(held)}, {_room(hub)}"}


def kernels() -> Lines:
    """The cache of compiled kernels: where, how large, how much room."""
    folder = read_settings().cache
    if folder is None:
        return {"kernels": "not kept: no home folder is known, and SOLOIST_CACHE is not set"}
    files = [f for f in folder.rglob("*") if f.is_file()] if folder.is_dir() else []
    size = gigabytes(sum(f.stat().st_size for f in files))
    built = len(list((folder / "kernels").glob("*")))
    return {"kernels": f"{folder}, {size} in {built} kernels, {_room(folder)}"}


def _room(folder: Path) -> str:
    at = next(place for place in (folder, *folder.parents) if place.exists())
    writable = "" if os.access(at, os.W_OK) else ", not writable"
    return f"{gigabytes(shutil.disk_usage(at).free)} free on its disk{writable}"


PROBES: Mapping[str, Callable[[], Lines]] = {
    "software": software, "packages": packages, "torch": torch, "cuda": cuda, "gpus": gpus,
    "nvml": nvml, "cpu": cpu, "models": models, "kernels": kernels,
}  # fmt: skip
