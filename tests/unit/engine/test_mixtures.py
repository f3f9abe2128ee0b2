"""How a mixture's weights are put in place for its prompts, with the operations of plain torch."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from interpreter.mixtures import MIXTURES, SMS
from interpreter.models import CONTEXT, gpu, prompt, reference_logits
from interpreter.quantised import alike, formats_of, quantised
from soloist.engine import kernel
from soloist.engine.kernel import Capacity, _load_rank, _Reads
from soloist.kv.pool import PagePool
from soloist.megakernel.plan import make_plan
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.prefill.elementwise import TorchElementwise, Vectors
from soloist.prefill.runner import Prefill
from soloist.weights.sharding import shard_all
from unit.prefill.models import random_weights

CPU, TOKENS = torch.device("cpu"), 150


class NoDecoder:
    """In the place of what launches the kernel."""

    def __init__(self, *_: object, **__: object) -> None:
        self.page_tables = torch.zeros(1, CONTEXT // 64, dtype=torch.int32)


class OnCpu(TorchElementwise):
    """Made like `FusedElementwise`."""

    def __init__(
        self, config: ModelConfig, vectors: Vectors, pool: PagePool, arch: str,
        cache_root: Path | None, rope: Tensor | None = None, ranks: int = 1,
    ) -> None:  # fmt: skip
        del arch, cache_root, ranks
        super().__init__(config, vectors, pool, rope)


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[tuple[Any, str, Any]] = [
        (kernel, "Decoder", NoDecoder),
        (kernel, "FusedElementwise", OnCpu),
        (torch.cuda, "synchronize", lambda _: None),
    ]
    for place, name, value in replaced:
        monkeypatch.setattr(place, name, value)


@pytest.mark.parametrize("reads", [_Reads.ROWS, _Reads.UNPACKED], ids=["rows", "unpacked"])
@pytest.mark.parametrize("kind", [None, "fp8-block", "int4"], ids=str)
@pytest.mark.parametrize("name", ["half steps", "some layers dense"])
def test_prompts_of_what_was_loaded(name: str, kind: str | None, reads: _Reads) -> None:
    config = MIXTURES[name]
    stored = alike(config, kind) if kind else {}
    formats = formats_of(stored)
    rounded = {
        k: v if "router" in k else v.bfloat16().float() for k, v in random_weights(config).items()
    }
    parts, meant = quantised(rounded, stored)
    own = {matrix + part for matrix, of in formats.items() for part in of.parts}
    weights = {
        k: v if k in own or "router" in k else v.bfloat16() for k, v in parts.items()
    }  # fmt: skip
    plan = make_plan(config, Dtype.BF16, gpu(SMS), formats=formats)
    share = shard_all(plan.part_of(0), weights)
    rank = _load_rank(plan, 0, share, CPU, Capacity(CONTEXT), None, reads)
    ids = prompt(config, TOKENS)
    wanted, errors = reference_logits(config, meant, ids), []
    for start, stop in pairwise((0, 1, 70, 71, 100, TOKENS)):
        seen = Prefill([rank.prefill]).run(ids[start:stop], start, [2, 0, 1])
        assert seen is not None
        errors.append((seen - wanted[stop - 1]).norm() / wanted[stop - 1].norm())
    # Where a choice hangs on rounding a token has another expert, which is no small difference.
    assert float(torch.stack(errors).median()) < 0.02
