"""The table of GPUs, and how one is found in it."""

import pytest

from soloist.errors import HardwareNotDetected, UnknownHardware
from soloist.megakernel.gpu import TYPICAL
from soloist.planning.expectation import MEASURED
from soloist.planning.hardware import HARDWARE, find_hardware, from_driver_name


def test_the_table_holds_what_it_says():
    assert len({h.name for h in HARDWARE}) == len(HARDWARE)
    assert {h.name for h in HARDWARE if h.announced} == {"Rubin", "MI450"}
    assert MEASURED.hardware in {h.name for h in HARDWARE}
    for h in HARDWARE:
        assert h.source.startswith("https://")
        assert 20e9 < h.memory_bytes < 500e9
        assert 0.9e12 <= h.bandwidth <= 25e12
        assert h.flops is None or 50e12 < h.flops < 3e15
        assert h.arch is None or h.arch in TYPICAL


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("H200", "H200"),
        ("h100", "H100 SXM"),
        ("rtx-4090", "RTX 4090"),
        ("5090", "RTX 5090"),
        ("RTX 6000", "RTX 6000 Ada"),
        ("NVIDIA H200", "H200"),
        ("a100", "A100 80GB"),
    ],
)
def test_names(given, name):
    assert find_hardware(given).name == name


@pytest.mark.parametrize("given", ["", "RTX", "TPU v5", "00"])
def test_unclear_names_list_the_known(given):
    with pytest.raises(UnknownHardware, match=r"RTX 3090, .*, H200, .*, MI450"):
        find_hardware(given)


def test_the_driver_must_mean_exactly_this_gpu():
    assert from_driver_name("NVIDIA H100 80GB HBM3").name == "H100 SXM"
    with pytest.raises(HardwareNotDetected, match="H100 PCIe"):  # slower memory
        from_driver_name("NVIDIA H100 PCIe")
