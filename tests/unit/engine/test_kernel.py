"""The token loop over the decode kernel, with a decoder and a prefill that need no GPU."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from plan.shapes import LANEFORMER, MIXTURE
from soloist.engine import support as support_module
from soloist.engine.config import EngineConfig, resolve
from soloist.engine.core import tokens_of
from soloist.engine.kernel_executor import KernelExecutor
from soloist.engine.request import Request
from soloist.engine.support import find_support, support_on
from soloist.errors import BadLogits, CudaMissing, LaunchError, OutOfMemory
from soloist.megakernel.sampling_header import NO_TOKEN
from soloist.model.config import Attention, Lanes, Mlp, ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.families.dense import decoder_tensors
from soloist.model.quantized import Codes, Quantized
from soloist.sampling import Sampler, SamplingParams
from soloist.weights.memory import packed_bytes
from unit.engine.fakes import VOCAB, Cache, FakeDecoder, FakePrefill, logits_after, opened
from unit.model.configurations import PUBLISHED, written
from unit.prefill.models import model

EOS = (3,)
H200 = ((9, 0), 132, 227 * 1024)


@dataclass
class Parts:
    decoder: FakeDecoder
    prefill: FakePrefill
    executor: KernelExecutor

    def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        cancelled: Callable[[], bool] = lambda: False,
    ):
        return tokens_of(
            self.executor, Request(prompt, Sampler(params, VOCAB, prompt, EOS)), cancelled
        )

    def answer(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """What the engine would take."""
        test = Sampler(params, VOCAB, prompt, EOS).stop_test
        made: list[int] = []
        source = self.generate(prompt, params)
        for token_id in source:
            made.append(token_id)
            if test.finish_reason(token_id, len(made)) is not None:
                break
        source.close()
        assert not self.decoder.is_running
        return made


def parts(
    max_rounds: int = 4096, most_tokens: int = 2048, chunk_tokens: int = 2048, sequences: int = 1
) -> Parts:
    cache = Cache()
    decoder = FakeDecoder(cache, max_rounds, sequences)
    prefill = FakePrefill(cache, most_tokens)
    executor = KernelExecutor(decoder, prefill, 10 * sequences, VOCAB, chunk_tokens)
    return Parts(decoder, prefill, executor)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


def expected(prompt: list[int], params: SamplingParams) -> list[int]:
    """The definition: one token after the other."""
    sampler = Sampler(params, VOCAB, prompt, EOS)
    made: list[int] = []
    while True:
        token_id = sampler.pick(logits_after(prompt + made), len(prompt) + len(made))
        sampler.observe(token_id)
        made.append(token_id)
        if sampler.stop_test.finish_reason(token_id, len(made)) is not None:
            return made


PARAMS = {
    "greedy": SamplingParams(max_tokens=40, ignore_eos=True),
    "eos": SamplingParams(max_tokens=400),
    "one": SamplingParams(max_tokens=1),
    "stop-ids": SamplingParams(max_tokens=400, stop_token_ids=frozenset({5, 17, 30, 44})),
    "many-stop-ids": SamplingParams(max_tokens=400, stop_token_ids=frozenset(range(25, 50))),
    "sampled": SamplingParams(max_tokens=30, temperature=1.0, seed=5, ignore_eos=True),
    "penalties": SamplingParams(max_tokens=30, repetition_penalty=1.5, frequency_penalty=0.5),
    "bias": SamplingParams(max_tokens=30, logit_bias={7: 4.0}),
    "filters": SamplingParams(
        max_tokens=30, temperature=1.5, top_k=30, top_p=0.9, min_p=0.01, seed=6, ignore_eos=True
    ),
    "all": SamplingParams(
        max_tokens=60, temperature=0.8, top_k=40, top_p=0.95, min_p=0.02, seed=2**63 + 5,
        repetition_penalty=1.2, frequency_penalty=-0.4, presence_penalty=0.3,
        logit_bias={3: 5.0, 7: -2.0}, min_tokens=25, stop_token_ids=frozenset({5, 9, 50}),
    ),
    "min-tokens": SamplingParams(max_tokens=60, min_tokens=20, stop_token_ids=frozenset(range(30))),
}  # fmt: skip


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("length", [1, 5, 8, 9, 16, 20, 24, 25, 90])
def test_tokens_are_those_of_the_definition(length: int, params: SamplingParams) -> None:
    prompt = prompt_of(length)
    assert parts().answer(prompt, params) == expected(prompt, params)


def test_short_prompts_ride_and_longer_ones_do_not() -> None:
    rounds = {1: 1, 8: 1, 9: 2, 16: 2, 17: 3, 24: 3}
    for length, wanted in rounds.items():
        p = parts()
        p.answer(prompt_of(length), SamplingParams(max_tokens=1))
        (launch,) = p.decoder.launches
        assert launch.rounds == wanted
        assert [c.position for c in launch.queries] == list(range(min(length, 8)))
        assert not p.prefill.chunks
        assert not any(c.stops for c in launch.queries)
    p = parts()
    p.answer(prompt_of(25), SamplingParams(max_tokens=1))
    assert not p.decoder.launches
    assert p.prefill.chunks == [25]


@pytest.mark.parametrize(("chunk", "most"), [(64, 2048), (2048, 64)])
def test_long_prompts_are_cut(chunk: int, most: int) -> None:
    p = parts(most_tokens=most, chunk_tokens=chunk)
    list(p.generate(prompt_of(150), SamplingParams(max_tokens=2)))
    assert p.prefill.chunks == [64, 64, 22]


def test_a_greedy_request_is_one_launch_of_as_many_rounds_as_are_left() -> None:
    p = parts()
    p.answer(prompt_of(30), SamplingParams(max_tokens=50, ignore_eos=True))
    (launch,) = p.decoder.launches
    assert launch.rounds == 49  # the first token came with the prompt
    assert launch.queries[0].position == 30
    assert not launch.queries[0].stops


@pytest.mark.parametrize("max_tokens", [10, 11, 12, 21, 22])
def test_launches_follow_each_other(max_tokens: int) -> None:
    p, prompt = parts(max_rounds=10), prompt_of(30)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    made = list(p.generate(prompt, params))  # it ends without being told
    assert made == expected(prompt, params)
    assert sum(x.rounds for x in p.decoder.launches) == p.decoder.num_rounds == max_tokens - 1


@pytest.mark.parametrize("name", ["sampled", "filters", "penalties", "bias", "all"])
def test_the_kernel_is_told_how_to_choose(name: str) -> None:
    p, prompt = parts(), prompt_of(30)
    made = p.answer(prompt, PARAMS[name])
    (launch,) = p.decoder.launches
    choice = launch.queries[0].choice
    assert choice is not None
    assert choice.params == PARAMS[name]
    assert p.decoder.num_rounds == len(made) - 1


@pytest.mark.parametrize("name", ["sampled", "penalties", "bias", "min-tokens", "all"])
def test_a_choice_goes_on_in_the_next_launch(name: str) -> None:
    p, prompt = parts(max_rounds=7), prompt_of(30)
    made = p.answer(prompt, PARAMS[name])
    assert made == expected(prompt, PARAMS[name])
    assert len(p.decoder.launches) == -(-(len(made) - 1) // 7)


def test_a_seed_is_drawn_once_for_all_launches() -> None:
    p, params = parts(max_rounds=5), SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)
    p.answer(prompt_of(30), params)
    choices = [x.queries[0].choice for x in p.decoder.launches]
    assert len({c.params.seed for c in choices if c is not None}) == 1
    assert all(c is not None and c.params.seed is not None for c in choices)


def test_the_kernel_ends_at_a_stop_token() -> None:
    p, prompt = parts(), prompt_of(30)
    made = p.answer(prompt, PARAMS["stop-ids"])
    (launch,) = p.decoder.launches
    assert set(launch.queries[0].stops) == {3, 5, 17, 30, 44}
    assert p.decoder.num_rounds == len(made) - 1


def test_the_kernel_bans_while_min_tokens_say_so() -> None:
    p = parts(max_rounds=19)
    p.answer(prompt_of(30), PARAMS["min-tokens"])
    first, *later = (x.queries[0].choice for x in p.decoder.launches)
    assert first is not None
    assert first.ending_ids == frozenset({*range(30), *EOS})
    assert not any(later), "the largest logit decides"
    free = replace(PARAMS["min-tokens"], stop_token_ids=frozenset(), ignore_eos=True)
    p = parts()
    p.answer(prompt_of(30), free)
    (launch,) = p.decoder.launches
    assert launch.rounds == 59
    assert launch.queries[0].choice is None, "nothing to ban"


@pytest.mark.parametrize("length", [5, 100])
def test_cancelled_before_anything(length: int) -> None:
    p = parts()
    assert list(p.generate(prompt_of(length), PARAMS["greedy"], lambda: True)) == []
    assert not p.decoder.launches
    assert not p.prefill.chunks


@pytest.mark.parametrize("name", ["greedy", "sampled", "all"])
@pytest.mark.parametrize("after", [1, 2, 7])
def test_cancelled_on_the_way(name: str, after: int) -> None:
    p, prompt = parts(), prompt_of(5)
    made: list[int] = []
    source = p.generate(prompt, PARAMS[name], lambda: len(made) >= after)
    for token_id in source:
        made.append(token_id)  # noqa: PERF402 - `cancelled` looks at it
    assert made == expected(prompt, PARAMS[name])[:after]
    assert not p.decoder.is_running
    assert p.decoder.num_rounds <= after + 2


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_closed_on_the_way_the_next_request_can_start(name: str) -> None:
    p, prompt = parts(), prompt_of(5)
    source = p.generate(prompt, PARAMS[name])
    made = [next(source) for _ in range(4)]
    source.close()
    assert made == expected(prompt, PARAMS[name])[:4]
    assert not p.decoder.is_running
    other = prompt_of(12, seed=1)
    assert p.answer(other, PARAMS[name]) == expected(other, PARAMS[name])


def test_a_stream_that_somebody_interrupts_keeps_what_it_has_come_to() -> None:
    """More rounds than any launch is assured: their pages were taken while nobody needed them."""
    p, params = parts(sequences=2), SamplingParams(max_tokens=500, ignore_eos=True)
    prompt, other = prompt_of(30), prompt_of(600, seed=1)
    samplers = [Sampler(params, VOCAB, ids, EOS) for ids in (prompt, other)]
    stream = opened(p.executor, prompt, samplers[0])
    while p.executor.read(stream) is None:
        pass
    rounds = p.executor.rounds([stream], 400)
    for _ in range(300):
        next(rounds)
    rounds.close()
    late = opened(p.executor, other, samplers[1])
    while p.executor.read(late) is None:
        pass
    for _ in p.executor.rounds([stream], 1):
        pass
    assert samplers[0].output_ids == expected(prompt, params)[: len(samplers[0].output_ids)]
    assert len(samplers[0].output_ids) == 302


def test_faults_pass_through() -> None:
    p = parts()
    source = p.generate(prompt_of(30), PARAMS["greedy"])
    next(source)
    p.decoder.fault = LaunchError("the decode kernel", "it broke")
    with pytest.raises(LaunchError, match="it broke"):
        next(source)


def test_scores_without_a_best_one_are_refused() -> None:
    p = parts()
    source = p.generate(prompt_of(30), PARAMS["greedy"])
    next(source)
    p.decoder.forced_choice = NO_TOKEN["NAN"][0]
    with pytest.raises(BadLogits, match="position 31 is nan"):
        next(source)
    assert not p.decoder.is_running


def test_a_short_prompt_without_a_best_score_is_refused() -> None:
    p = parts()
    p.decoder.forced_choice = NO_TOKEN["NAN"][0]
    with pytest.raises(BadLogits, match="position 5 is nan"):
        next(p.generate(prompt_of(5), PARAMS["greedy"]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("name", ["sampled", "penalties"])
def test_a_sampled_launch_ends_at_bad_logits(name: str, bad: float) -> None:
    p = parts()
    source = p.generate(prompt_of(30), PARAMS[name])
    made = [next(source) for _ in range(5)]
    p.decoder.cache.bad = bad
    with pytest.raises(BadLogits, match=f"position 35 is {bad}"):
        next(source)
    assert len(made) == p.decoder.num_rounds == 5
    assert not p.decoder.is_running


# Support ------------------------------------------------------------------------------------------

DENSE = model(*[Attention(4, 2, 64)] * 2, hidden_size=256, ffn=512, vocab_size=1000)


RTX_3090 = ((8, 6), 82, 99 * 1024)


@pytest.mark.parametrize(
    "gpu", [H200, RTX_3090, ((8, 0), 108, 163 * 1024), ((8, 9), 128, 99 * 1024)]
)
def test_supported(gpu: tuple[tuple[int, int], int, int]) -> None:
    found = support_on(*gpu, DENSE, Dtype.BF16)
    assert found.plan is not None
    assert not found.refusal


@pytest.mark.parametrize(
    ("capability", "config", "dtype", "named"),
    [
        ((7, 5), DENSE, Dtype.BF16, "capability 7.5 (allowed: 8.0 and later)"),
        ((6, 1), DENSE, Dtype.BF16, "capability 6.1"),
        ((9, 0), DENSE, Dtype.FP32, "fp32"),
        ((9, 0), model(Attention(4, 2, 40)), Dtype.BF16, "head_dim 40"),
        ((9, 0), replace(DENSE, embedding_scale=8.0), Dtype.BF16, "a scale of embeddings"),
        (
            (9, 0),
            replace(
                DENSE,
                lanes=Lanes(
                    2, 1, early_sum=False, attention_comm=True, mlp_comm=True,
                    shared_norm_scales=True, head="lane", sum_before_norm=False,
                ),
            ),
            Dtype.BF16,
            "all lanes side by side",
        ),
    ],
)  # fmt: skip
def test_refusals_say_why_and_what_runs(
    capability: tuple[int, int], config: ModelConfig, dtype: Dtype, named: str
) -> None:
    found = support_on(capability, 132, 227 * 1024, config, dtype)
    assert found.plan is None
    assert found.refusal.startswith("the decode kernel does not support")
    assert named in found.refusal
    assert found.refusal.endswith("running the reference implementation")
    assert "\n" not in found.refusal


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_experts_are_supported_however_they_are_stored(ranks: int) -> None:
    """In 16 bits and quantised, on one GPU and several; in formats that it does not read, in 16."""
    config = read_config(MIXTURE)
    names = [spec.name for spec in tensors(config) if spec.is_layer_matrix]
    blocks = Quantized(Codes.FP8, group=128, scale_dtype=Dtype.FP32, scale_rows=128)
    whole = support_on(*H200, config, Dtype.BF16, ranks)
    quantised = support_on(*H200, config, Dtype.BF16, ranks, dict.fromkeys(names, blocks))
    assert whole.plan is not None
    assert quantised.plan is not None
    assert quantised.formats.keys() == set(names)
    assert packed_bytes(quantised.plan) < 0.85 * packed_bytes(whole.plan)
    permuted = Quantized(Codes.INT4, group=128, scale_dtype=Dtype.BF16, permuted=True)
    plain = support_on(*H200, config, Dtype.BF16, ranks, dict.fromkeys(names, permuted))
    assert plain.plan is not None
    assert not plain.formats


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_experts_run_on_hopper_alone(capability: tuple[int, int]) -> None:
    """Others have never run them, and not all builds for them are sound."""
    config = read_config(MIXTURE)
    found = support_on(capability, 132, 227 * 1024, config, Dtype.BF16)
    assert found.plan is None
    assert f"a mixture of experts on sm_{capability[0]}{capability[1]}" in found.refusal
    assert "(allowed: sm_90a, which is Hopper: H100 and H200)" in found.refusal
    dense = replace(config, layers=(replace(config.layers[0], mlp=Mlp(768)),))
    assert support_on(capability, 132, 227 * 1024, dense, Dtype.BF16).plan is not None


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("qwen1.5-moe-a2.7b", ""),
        ("glm-4.5-air", ""),
        ("olmoe-1b-7b", "norms over all heads of queries and keys"),
        ("mixtral-8x7b", ""),
    ],
)
def test_published_mixtures_run_or_are_refused_in_words(
    name: str, named: str, tmp_path: Path
) -> None:
    config = read_config(written(tmp_path, PUBLISHED[name]))
    found = support_on(*H200, config, Dtype.BF16)
    assert (found.plan is None) is bool(named)
    assert named in found.refusal
    assert not named or found.refusal.endswith("running the reference implementation")


def test_lanes_are_supported() -> None:
    config = read_config(LANEFORMER)
    found = support_on(*H200, config, Dtype.FP16)
    assert found.plan is not None
    assert found.plan.shape.lanes_here == 8
    assert found.plan.image.num_bytes > 2 * 2_222_000_000
    asked = EngineConfig(context_tokens=None)
    available = resolve(
        asked,
        config,
        lambda _: tensors(config),
        Dtype.FP16,
        "cuda:0",
        10**11,
        lambda _: found.plan,
    )
    embedding_bytes = 2 * 32_000 * 3_072
    assert available.memory.weights_bytes == found.plan.image.num_bytes + embedding_bytes


def test_too_little_shared_memory_is_refused() -> None:
    found = support_on((9, 0), 132, 48 * 1024, DENSE, Dtype.BF16)
    assert "49,152 bytes of shared memory" in found.refusal


def test_without_the_compiler_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise CudaMissing("the CUDA compiler library", "it is not there", "install it")

    monkeypatch.setattr(support_module, "driver", missing)
    found = find_support(DENSE, Dtype.BF16, torch.device("cuda:0"))
    assert found.plan is None
    assert "compiler library" in found.refusal
    assert not find_support(DENSE, Dtype.BF16, torch.device("cpu")).refusal


def test_the_estimate_is_the_kernels() -> None:
    specs = decoder_tensors(DENSE)
    plan = support_on(*H200, DENSE, Dtype.BF16).plan
    assert plan is not None

    def resolved(available_bytes: int, context: int | None = None):
        asked = EngineConfig(context_tokens=context)
        return resolve(
            asked, DENSE, lambda _: specs, Dtype.BF16, "cuda:0", available_bytes, lambda _: plan
        )

    all_of_it = resolved(10**10)
    assert all_of_it.context_tokens == DENSE.context_tokens
    assert all_of_it.memory.weights_bytes >= plan.image.num_bytes
    assert all_of_it.memory.kv_bytes == 2 * 2 * 2 * 2 * 64 * DENSE.context_tokens
    assert resolved(10**10, 65).memory.kv_bytes == resolved(10**10, 128).memory.kv_bytes
    with pytest.raises(OutOfMemory, match="weights"):
        resolved(plan.image.num_bytes)
