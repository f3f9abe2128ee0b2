"""Room for requests side by side."""

import pytest

from soloist.device import HEADROOM_BYTES
from soloist.engine.config import EngineConfig, Resolved, host_cache_bytes, resolve
from soloist.engine.memory import MemoryEstimate, require_merging_memory
from soloist.errors import OutOfMemory, SettingError, ShapeUnsupported
from soloist.kv.layout import PAGE_POSITIONS
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.plan import make_plan
from soloist.model.config import Attention
from soloist.model.dtype import Dtype
from soloist.model.families.dense import decoder_tensors
from soloist.model.kv_format import kv_format
from soloist.model.quantized import Codes
from soloist.weights.choice import Rounding
from unit.prefill.models import model

DENSE = model(*[Attention(4, 2, 64)] * 2, hidden_size=256, ffn=512, vocab_size=1000)
TOKEN_BYTES = 2 * 2 * 2 * 64 * 4


def resolved(available_bytes: int, sequences: int, context: int = 500) -> Resolved:
    asked = EngineConfig(context_tokens=context, sequences=sequences)
    return resolve(
        asked, DENSE, lambda _: decoder_tensors(DENSE), Dtype.FP32, "cpu", available_bytes
    )


def test_every_sequence_gets_a_context_where_there_is_memory() -> None:
    one, eight = resolved(10**11, 1), resolved(10**11, 8)
    assert one.kv_tokens == 500
    assert one.memory.kv_bytes == 500 * TOKEN_BYTES
    assert eight.kv_tokens == 500 + 7 * 512, "whole pages: each may have any"
    assert eight.memory.kv_bytes == eight.kv_tokens * TOKEN_BYTES


def test_further_contexts_take_half_of_what_is_left() -> None:
    needed = resolved(10**11, 1).memory.total_bytes + HEADROOM_BYTES
    for left in (0, TOKEN_BYTES, 2 * PAGE_POSITIONS * TOKEN_BYTES, 3000 * TOKEN_BYTES):
        found = resolved(needed + left, 8)
        further = found.kv_tokens - 500
        assert further * TOKEN_BYTES <= left / 2 < (further + PAGE_POSITIONS) * TOKEN_BYTES
        assert found.memory.total_bytes + HEADROOM_BYTES <= needed + left


@pytest.mark.parametrize("sequences", [0, 9])
def test_sequences_are_one_to_eight(sequences: int) -> None:
    with pytest.raises(SettingError, match="1 … 8"):
        resolved(10**11, sequences)


def test_prompts_in_eight_bits_are_of_packed_weights() -> None:
    specs = decoder_tensors(DENSE)
    asked = EngineConfig(eight_bit_prompts=True)
    with pytest.raises(SettingError, match="without --packed-prompts"):
        resolve(asked, DENSE, lambda _: specs, Dtype.FP32, "cpu", 10**11)
    both = EngineConfig(context_tokens=500, packed_prompts=True, eight_bit_prompts=True)
    assert resolve(both, DENSE, lambda _: specs, Dtype.FP32, "cpu", 10**11).kv_tokens == 500


def test_prompts_either_read_packed_weights_or_have_them_unpacked() -> None:
    specs = decoder_tensors(DENSE)
    asked = EngineConfig(packed_prompts=True, unpacks_prompts=True)
    with pytest.raises(SettingError, match="--unpack-prompts is 'on, with --packed-prompts'"):
        resolve(asked, DENSE, lambda _: specs, Dtype.FP32, "cpu", 10**11)


@pytest.mark.parametrize("stored", list(Dtype), ids=lambda d: d.value)
def test_auto_on_a_cpu_is_fp32_or_bf16_and_never_fp16(stored: Dtype) -> None:
    large = model(*[Attention(16, 8, 128)] * 8, hidden_size=2048, ffn=8192)

    def made(available_bytes: int, device: str = "cpu") -> Resolved:
        specs = decoder_tensors(large)
        return resolve(EngineConfig(), large, lambda _: specs, stored, device, available_bytes)

    plenty = made(10**11)
    assert plenty.dtype is Dtype.FP32
    assert made(plenty.memory.weights_bytes).dtype is Dtype.BF16
    assert made(10**11, "cuda:0").dtype is stored


def attending(arch: str = "sm_90a", **given: object) -> Resolved:
    """As an engine decides on such a GPU."""
    asked = EngineConfig(context_tokens=500, **given)  # type: ignore[arg-type]
    kv = kv_format(asked.kv, DENSE, Dtype.BF16) if asked.kv else None
    ranks = len(asked.rank_devices) or 1
    plan = make_plan(DENSE, Dtype.BF16, TYPICAL[arch], ranks, kv=kv)
    return resolve(
        asked, DENSE, lambda _: decoder_tensors(DENSE), Dtype.BF16, "cuda:0", 10**11,
        lambda _: plan,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "given"),
    [
        ("sm_90a", {"page_attention": False}), ("sm_90a", {"kv": "int8"}), ("sm_80", {}),
        ("sm_100a", {}), ("sm_90a", {"rank_devices": (0, 0)}),
    ],
)  # fmt: skip
def test_prompts_attend_to_pages_where_that_runs_and_the_estimate_follows(
    arch: str, given: dict[str, object]
) -> None:
    """One rank or several, in 16 bits, on Hopper: otherwise keys and values are gathered."""
    here, there = attending(), attending(arch, **given)
    assert here.page_attention
    assert not there.page_attention
    assert attending(page_attention=True) == here
    assert attending(rank_devices=(0, 1)).page_attention
    if given == {"page_attention": False}:
        gathered = 3 * 512 * TOKEN_BYTES // 2 // DENSE.num_layers  # in 16 bits
        of_pages, of_library = here.memory.scratch_bytes, there.memory.scratch_bytes
        assert of_pages == of_library - gathered, "500 positions are one split"
    else:
        with pytest.raises((ShapeUnsupported, SettingError)):
            attending(arch, page_attention=True, **given)


def host_cache(wanted: int | None, *, keeps: bool = True, has_kernel: bool = True) -> int:
    asked = EngineConfig(keeps_prefixes=keeps, host_cache_bytes=wanted)
    return host_cache_bytes(asked, has_kernel=has_kernel, free_bytes=1000)


def test_the_host_cache_takes_a_quarter_of_what_is_free_or_what_was_asked() -> None:
    assert host_cache(None) == 250
    assert host_cache(700) == 700
    assert host_cache(0) == host_cache(None, keeps=False) == host_cache(None, has_kernel=False) == 0


def test_a_host_cache_without_effect_or_memory_is_refused() -> None:
    with pytest.raises(SettingError, match="0 GB or more"):
        host_cache(-1)
    with pytest.raises(SettingError, match="without the prefix cache"):
        host_cache(5, keeps=False)
    with pytest.raises(SettingError, match="without the decode kernel"):
        host_cache(5, has_kernel=False)
    with pytest.raises(OutOfMemory, match="host cache"):
        host_cache(1001)


def test_codes_may_be_given_by_name() -> None:
    named = EngineConfig(weights="int4", head_weights=Codes.INT8)  # type: ignore[arg-type]
    assert named.rounding == Rounding(Codes.INT4, Codes.INT8)
    assert EngineConfig().rounding == Rounding()
    with pytest.raises(SettingError, match=r"head_weights is 'int3'.*int4, int8, fp8"):
        _ = EngineConfig(head_weights="int3").rounding  # type: ignore[arg-type]


def test_merging_an_adapter_has_to_fit_beside_the_weights() -> None:
    estimate = MemoryEstimate(weights_bytes=1000, kv_bytes=10**9, scratch_bytes=10**9)
    room = 1000 + 70 + HEADROOM_BYTES
    require_merging_memory(70, estimate, room)
    with pytest.raises(OutOfMemory, match="merging the adapter"):
        require_merging_memory(71, estimate, room)
