"""A checkpoint's weights arrive in the form that the executor takes."""

import time
from pathlib import Path

import pytest
import torch

from soloist.model.checkpoint import open_checkpoint
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.folder import CONFIG_FILE, shipped_folder
from soloist.parallel.share import part_of
from soloist.weights.loading import Destination, Source, load_ranks
from soloist.weights.reading import LoadProgress, load_weights
from soloist.weights.sharding import shard_all
from soloist.weights.upload import GpuMemory, Upload

FOLDER = shipped_folder("etude-draft")
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(("ranks", "for_kernel"), [(1, False), (1, True), (2, True)])
def test_every_rank_gets_its_share(ranks: int, for_kernel: bool) -> None:
    checkpoint, config = open_checkpoint(FOLDER), read_config(FOLDER / CONFIG_FILE)
    seen: list[LoadProgress] = []
    to = Destination((CPU,) * ranks, Dtype.BF16, for_kernel=for_kernel, stays_on_host=False)
    began_s = time.perf_counter()
    weights, load_s = load_ranks(Source(checkpoint, config, tensors(config)), to, seen.append)
    assert 0 < load_s <= time.perf_counter() - began_s
    assert seen[-1].done_bytes == seen[-1].total_bytes
    assert len(weights) == ranks
    whole = load_weights(checkpoint, tensors(config), Dtype.BF16, CPU)
    for rank, own in enumerate(weights):
        wanted = shard_all(part_of(config, ranks, rank), whole) if for_kernel else whole
        assert own.keys() == wanted.keys()
        assert all(torch.equal(own[name], wanted[name]) for name in wanted)


def test_an_upload_that_fails_is_no_failure_and_is_closed() -> None:
    checkpoint, config = open_checkpoint(FOLDER), read_config(FOLDER / CONFIG_FILE)
    upload = Upload(checkpoint.files, GpuMemory(99), "cuda:99")
    to = Destination((CPU,), Dtype.FP32, for_kernel=False, stays_on_host=False)
    source = Source(checkpoint, config, tensors(config), upload=upload)
    (weights,), _ = load_ranks(source, to, lambda _: None)
    assert weights.keys() == {spec.name for spec in tensors(config)}
    assert upload.address(Path(checkpoint.files[0])) is None


@pytest.mark.parametrize(
    ("devices", "stays_on_host", "home"),
    [((CUDA,), False, CUDA), ((CUDA,), True, CPU), ((CUDA, CUDA), False, CPU)],
)
def test_whole_tensors_are_read_where_there_is_room(devices, stays_on_host, home) -> None:
    to = Destination(devices, Dtype.BF16, for_kernel=True, stays_on_host=stays_on_host)
    assert to.home == home
