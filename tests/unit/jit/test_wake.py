"""Waking a GPU is a hint: it never fails, and asks for nothing where no GPU is wanted."""

import pytest

from soloist.jit.wake import wake


@pytest.mark.parametrize("device", ["cpu", "cpu:0", "tpu", "cuda:x", "cuda:-1", ""])
def test_no_gpu_is_woken(device: str) -> None:
    assert wake(device) is None


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0", "cuda:99"])
def test_a_gpu_may_be_missing(device: str) -> None:
    thread = wake(device)
    assert thread is not None
    thread.join(30)
    assert not thread.is_alive()
    assert thread.daemon, "a process that ends does not wait for it"


@pytest.mark.gpu
def test_torch_uses_the_context() -> None:
    import torch

    thread = wake("cuda:0")
    assert thread is not None
    thread.join(30)
    assert torch.ones(3, device="cuda:0").sum().item() == 3
