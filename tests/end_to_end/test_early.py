"""A model's files can go to the GPU before torch is there; what is loaded is the same."""

from pathlib import Path

import pytest
import torch

from soloist.cli.early import begin
from soloist.engine import Engine, EngineConfig
from soloist.jit.wake import driver
from soloist.model.checkpoint import open_checkpoint
from soloist.model.folder import shipped_folder
from soloist.weights.reading import open_stored
from soloist.weights.upload import GpuMemory, Upload
from soloist.weights.uploaded import early_files

ETUDE = shipped_folder("etude")


@pytest.mark.parametrize("device", ["cpu", "tpu", "cuda:x"])
def test_nothing_begins_for_other_devices(device: str) -> None:
    assert begin("etude", device, "1", None) is None


@pytest.mark.skipif(driver() is not None, reason="this machine has a driver")
def test_nothing_begins_without_a_driver() -> None:
    assert begin("etude", "auto", "1", None) is None


def test_files_that_are_not_there_are_read_from_disk() -> None:
    files = open_checkpoint(ETUDE).files
    upload = Upload(files, GpuMemory(99), "cuda:99")
    for device in (torch.device("cpu"), torch.device("cuda:99")):
        with early_files(upload, device) as open_with, open_with(files[0]) as opened:
            stored = opened.get_tensor("model.norm.weight")
        with open_stored(files[0]) as mapped:
            assert torch.equal(stored, mapped.get_tensor("model.norm.weight"))


@pytest.mark.gpu
@pytest.mark.timed  # it reads the card's free memory, which others beside it would take
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_is_loaded_is_the_same(precision: str) -> None:
    asked = EngineConfig("etude", "cuda:0", precision, 512, prepare=False)
    Engine.load(asked)  # a process's first one leaves what libraries keep
    torch.cuda.empty_cache()
    upload = begin("etude", "cuda:0", "1", None)
    assert upload is not None
    file = open_checkpoint(ETUDE).files[0]
    assert upload.address(file) is not None, "it is there"
    free_bytes = torch.cuda.mem_get_info()[0]
    early = Engine.load(asked, upload=upload)
    late = Engine.load(asked)
    assert torch.equal(early.model.decoder.image, late.model.decoder.image)
    assert torch.equal(early.model.decoder.vectors, late.model.decoder.vectors)
    assert early.resolved == late.resolved
    assert upload.address(file) is None, "it is closed"
    del early, late
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > free_bytes - (256 << 20)


def test_a_missing_model_is_no_failure_here() -> None:
    assert begin(str(Path("no") / "such"), "auto", "1", None) is None
