from soloist.model.dtype import Dtype
from soloist.prefill.header import header
from unit.prefill.models import MODELS


def test_every_constant_of_the_kernels() -> None:
    text = header(MODELS["qwen3"], Dtype.FP16)
    for line in (
        "constexpr bool kBf16 = false;",
        "constexpr unsigned kLayers = 2u;",
        "constexpr unsigned kHidden = 32u;",
        "constexpr unsigned kQueryHeads = 4u;",
        "constexpr unsigned kKvHeads = 2u;",
        "constexpr unsigned kHeadDim = 64u;",
        "constexpr unsigned kIntermediate = 40u;",
        "constexpr unsigned kPagePositions = 64u;",
        "constexpr unsigned kHalfPagePositions = 32u;",
        "constexpr float kEpsilon = 0x1.4f8b580000000p-17f;",  # 1e-5, rounded to fp32
    ):
        assert line in text.splitlines()


def test_models_that_differ_in_windows_and_rope_share_a_header() -> None:
    texts = {header(MODELS[name], Dtype.BF16) for name in ("windows", "nope")}
    assert len(texts) == 1
