"""The ends of prompts: which way they are read, that nothing but a prompt's length decides it."""

import json
import random
from pathlib import Path

import pytest
import torch

from soloist.engine import tail_path
from soloist.engine.config import EngineConfig, resolve
from soloist.engine.kernel_executor import KernelExecutor
from soloist.engine.tail_path import (
    DECODE_PATH_TOKENS,
    MOST_LOSS,
    TailCosts,
    TailFacts,
    TailPath,
    TailRule,
    tail_costs,
)
from soloist.errors import SettingError
from soloist.kv.chunks import PrefixChunks, growing_chunks
from soloist.kv.memory import kv_bytes_per_token
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.kv_format import plain
from soloist.planning import expectation
from soloist.planning.hardware import HARDWARE
from soloist.sampling import Sampler, SamplingParams
from unit.engine.fakes import VOCAB, Cache, FakePrefill, IdleDecoder, opened
from unit.engine.test_kernel import EOS, expected, prompt_of
from unit.prefill.models import MODELS

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
WIDTHS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
BLOCK, PAGE, CONTEXT = 256, 64, 4096
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=3, ignore_eos=True)
# Of `rule`: no cold prompt is lengthened by this.
FREE = TailCosts(0.0, 0.0, 1.0, 0.0, 1.0, 0.0)


def shape(name: str) -> ModelConfig:
    return read_config(BENCHMARKS / "shapes" / f"{name}.json")


def costs(name: str, *, page_attention: bool = False) -> TailCosts:
    """As a model on one H200 has them in bf16."""
    config = shape(name)
    specs = tensors(config)
    held = [s for s in specs if config.tied_head or s.name != "embedding"]
    return tail_costs(
        TailFacts(
            2 * sum(s.num_values for s in held),
            sum(s.num_values for s in specs if s.is_layer_matrix),
            kv_bytes_per_token(config, plain(Dtype.BF16)),
            config.num_layers, config.layers[0].attention.head_dim, page_attention,
        )
    )  # fmt: skip


# --- figures --------------------------------------------------------------------------------------


def rows(file: str) -> list[dict]:
    return json.loads((BENCHMARKS / "results" / file).read_text())


def test_rounds_take_what_was_measured() -> None:
    count = 0
    for row in rows("h200.json"):
        if row["bench"] != "decode" or (row["columns"], row["sequences"]) != (8, 1):
            continue
        if row["engine"] == "soloist" and (BENCHMARKS / f"shapes/{row['shape']}.json").exists():
            measured = row["columns"] / row["decode_tokens_per_s"]["median"]
            stop = row["start_position"] + row["new_tokens"] // 2
            told = costs(row["shape"]).of_rounds(8, stop) - tail_path.LAUNCH_S
            assert told == pytest.approx(measured, rel=0.06), row["shape"]
            count += 1
    assert count >= 4


def test_passes_take_at_least_what_is_told() -> None:
    count = 0
    for row in rows("h200-prefill.json"):
        if row["cached_tokens"]:
            stop = row["prompt_tokens"]
            told = costs(row["shape"]).of_pass(stop - row["cached_tokens"], stop)
            measured = row["ttft_ms"]["median"] / 1e3
            assert 0.8 * measured < told < measured, (row["shape"], stop)
            count += 1
    assert count == 4


def test_figures_are_the_planners() -> None:
    measured = expectation.MEASURED
    of_layer = measured.waits[expectation.Kind.DENSE].layer_s[1] + measured.queries_wait_s
    assert measured.read_bandwidth == tail_path.READ_BANDWIDTH
    assert of_layer == pytest.approx(tail_path.ROUND_LAYER_S)
    assert tail_path.PASS_START_S == expectation.PROMPT_START_S
    assert tail_path.PASS_LAYER_S == expectation.PROMPT_LAYER_S
    assert tail_path.PASS_READ_SHARE == expectation.PROMPT_READ_SHARE
    h200 = next(one for one in HARDWARE if one.name == measured.hardware)
    assert h200.arch == tail_path.MEASURED_ARCH
    assert h200.flops is not None
    flops = expectation.PROMPT_FLOPS_SHARE * h200.flops
    assert flops == pytest.approx(tail_path.PASS_FLOPS)


# --- the rule -------------------------------------------------------------------------------------


def rule(some: TailCosts | None, path: TailPath = "auto") -> TailRule:
    return TailRule(path, some, WIDTHS)


def rounds_from(some: TailRule, num_tokens: int) -> int:
    return some.rounds_from(num_tokens, (num_tokens - 1) // BLOCK * BLOCK)


def most_in_rounds(some: TailRule, boundary: int) -> int:
    """The longest tail there that rounds read; all shorter ones are read so, too."""
    ways = [rounds_from(some, boundary + tail) == boundary for tail in range(1, BLOCK + 1)]
    count = sum(ways)
    assert all(ways[:count]), "longer tails take no way that shorter ones do not"
    return count


def test_a_few_tokens_on_a_long_context_are_read_in_rounds() -> None:
    for name, count in (("llama-3.1-8b", 8), ("llama-3.2-1b", 16)):
        gathered, pages = (rule(costs(name, page_attention=on)) for on in (False, True))
        assert most_in_rounds(gathered, 99_840) >= 32, "a pass takes as long as many rounds"
        assert most_in_rounds(pages, 99_840) == 8, "a pass takes less than two rounds"
        assert most_in_rounds(pages, 31_744) == count


def test_a_cold_prompt_loses_little() -> None:
    """Nothing where its last pass is the narrower for it; else no more than a share."""
    some = costs("llama-3.1-8b", page_attention=True)
    assert most_in_rounds(rule(some), 2048) == 8, "all of a pass is saved"
    assert most_in_rounds(rule(some), 1024) == 8, "1,024 rows instead of 1,536"
    assert most_in_rounds(rule(some), 1280) == 0, "1,536 rows either way"
    assert most_in_rounds(rule(some), 256 * 79) == 8, "a round is a hundredth of it"
    assert most_in_rounds(rule(some), 4096) == 8, "a pass more"
    for boundary in range(BLOCK, 20_000, BLOCK):
        for tail in (1, 8, 40):
            n, auto = boundary + tail, rule(some)
            if rounds_from(auto, n) < n:
                with_rounds = auto.cold_s(boundary) + some.of_rounds(tail, n)
                assert with_rounds <= (1 + MOST_LOSS) * auto.cold_s(n)


def test_where_each_tail_has_a_pass_of_its_own_the_quicker_way_is_taken() -> None:
    some = costs("llama-3.1-8b", page_attention=True)
    chunks, alone = growing_chunks(2048), TailRule("auto", some)
    for n in (1281, 1288, 5000, 20_001):
        boundary = chunks.last_boundary(n)
        is_quicker = some.of_rounds(n - boundary, n) < some.of_pass(n - boundary, n)
        assert (alone.rounds_from(n, boundary) == boundary) == is_quicker
    assert alone.rounds_from(1281, 1280) == 1280


def test_what_was_not_measured_or_not_asked_for_is_read_by_passes() -> None:
    for some in (rule(None), rule(FREE, "prefill"), TailRule()):
        assert [rounds_from(some, n) for n in (25, 257, 2049, 50_001)] == [25, 257, 2049, 50_001]
    assert [rounds_from(rule(None, "decode"), n) for n in (257, 512, 50_100)] == [256, 256, 49_920]
    for path in ("prefill", "decode", "auto"):
        some = rule(FREE, path)
        assert [rounds_from(some, n) for n in (1, DECODE_PATH_TOKENS)] == [0, 0]
        assert rounds_from(some, 256) == 256, "nothing of it is kept"


@pytest.mark.parametrize("chunks", [PrefixChunks(256, 256), growing_chunks(2048)], ids=str)
def test_the_last_boundary_is_that_before_the_last_token(chunks: PrefixChunks) -> None:
    for n in (1, 255, 256, 257, 512, 2048, 2049, 2560, 2561, 9000, 99_841):
        boundary = chunks.last_boundary(n)
        assert 0 <= boundary < n <= boundary + chunks.width(boundary)
        ends = {0, *(end for _, end in chunks.whole(0, n))}
        assert boundary in ends
        assert max(end for end in ends if end < n) == boundary


def test_a_path_has_one_of_three_names() -> None:
    asked = EngineConfig(tail_path="both")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="prefill, decode, auto"):
        resolve(asked, MODELS["mha"], lambda _: (), Dtype.FP32, "cpu", 10**9)


# --- in an executor -------------------------------------------------------------------------------


class Parts:
    """An executor whose doubles tell which positions came by which way."""

    def __init__(self, tails: TailRule, num_pages: int = 120) -> None:
        cache = Cache()
        self.decoder = IdleDecoder(cache, sequences=3)
        self.decoder.page_tables = torch.zeros(3, CONTEXT // PAGE, dtype=torch.int32)
        self.prefill = FakePrefill(cache, tails.widths[-1], tails.widths)
        self.executor = KernelExecutor(
            self.decoder, self.prefill, num_pages, VOCAB, 512, keeps_prefixes=True
        )
        self.executor.tails = tails

    def read(self, prompt: list[int], params: SamplingParams = GREEDY) -> tuple[int, set[int]]:
        """Tokens that were cached, and the prompt's positions that rounds read."""
        request = opened(self.executor, prompt, Sampler(params, VOCAB, prompt, EOS))
        self.prefill.chunks.clear()
        self.decoder.launches.clear()
        made = None
        while made is None:
            assert self.executor.reserve([request])
            made = self.executor.read(request)
            self.executor.check()
        assert request.sampler.output_ids == expected(prompt, params)[:1]
        positions = [
            query.position + i * query.stride
            for launch in self.decoder.launches
            for query in launch.queries
            for i in range(len(query.tokens))
        ]
        assert len(positions) == len(set(positions)), "each once"
        own = request.num_cached + sum(self.prefill.chunks)
        assert sorted(positions) == list(range(own, len(prompt))), "and all of them"
        while not request.has_all_tokens:
            assert self.executor.reserve([request])
            for outcomes in self.executor.rounds([request], 5):
                assert outcomes
        assert request.sampler.output_ids == expected(prompt, params)
        self.executor.free(request)
        return request.num_cached, set(positions)


@pytest.mark.parametrize("path", ["decode", "auto"])
def test_what_was_kept_does_not_change_how_a_prompt_is_read(path: TailPath) -> None:
    """The bits of a position follow from the way that it was read."""
    rng = random.Random(0)
    some = rule(TailCosts(1e-3, 0.0, 0.0, 3.5e-3, 1e-5, 0.0), path)
    stem = prompt_of(1500)
    seen = {}
    for n in (257, 260, 300, 1033, 1281, 1290, 1300, 1400):
        for kept in (0, 256, 300, 1024, n - 1, n):
            parts = Parts(some)
            if kept:
                parts.read(stem[:kept])
            prompt = stem[:n] if rng.random() < 0.5 else [*stem[: min(n, kept)], *prompt_of(n, 7)]
            prompt = prompt[:n]
            num_cached, by_rounds = parts.read(prompt, rng.choice([GREEDY, SAMPLED]))
            assert num_cached <= kept
            assert seen.setdefault(n, by_rounds) == by_rounds, (n, kept)
    boundaries = {n: (n - 1) // BLOCK * BLOCK for n in seen}
    if path == "decode":
        assert seen == {n: set(range(boundaries[n], n)) for n in seen}
    else:
        assert {n for n, positions in seen.items() if positions} == {1033}


def test_nothing_of_a_tail_is_kept() -> None:
    parts, prompt = Parts(rule(None, "decode")), prompt_of(600)
    assert parts.read(prompt)[0] == 0
    longer = [*prompt, *prompt_of(300, 1)]
    assert parts.read(longer) == (512, set(range(768, 900)))
    assert parts.prefill.chunks == [256], "a pass reads anew what rounds had read"
    assert parts.read(prompt_of(512, 2)) == (0, set(range(256, 512)))
    assert parts.read(prompt_of(512, 2)) == (256, set(range(256, 512)))


def test_a_tail_takes_few_launches_and_no_page_that_is_not_its_own() -> None:
    parts = Parts(rule(None, "decode"))
    for tail, launches in {1: [1], 8: [1], 12: [2], 64: [8], 70: [8, 1], 200: [8, 8, 8, 1]}.items():
        parts.read(prompt_of(256 + tail, tail))
        made = [launch.rounds for launch in parts.decoder.launches if len(launch.queries) > 1]
        assert made == [rounds for rounds in launches if tail > 1], tail
    # The tail's last page is full, and no further one is there.
    request = opened(
        parts.executor, prompt := prompt_of(256 + 60), Sampler(GREEDY, VOCAB, prompt, EOS)
    )
    parts.decoder.launches.clear()
    while request.num_read < 256:
        assert parts.executor.reserve([request])
        parts.executor.read(request)
    allocation = parts.executor.allocation_of(request)
    del allocation.pages[5:]
    parts.executor.decoder.page_tables.fill_(10**6)
    assert parts.executor.read(request) is not None
    assert request.sampler.output_ids == expected(prompt, GREEDY)[:1]
    last = max(
        q.position + (x.rounds - 1) * q.stride for x in parts.decoder.launches for q in x.queries
    )
    assert last < 5 * PAGE


def test_a_preempted_request_reads_its_tail_again_as_before() -> None:
    parts, prompt = Parts(rule(None, "decode")), prompt_of(310)
    request = opened(parts.executor, prompt, Sampler(SAMPLED, VOCAB, prompt, EOS))
    while not request.is_read:
        assert parts.executor.reserve([request])
        parts.executor.read(request)
    for _ in parts.executor.rounds([request], 6):
        pass
    parts.executor.preempt(request)
    parts.decoder.launches.clear()
    assert parts.executor.open(request)
    while not request.is_read:
        assert parts.executor.reserve([request])
        assert parts.executor.read(request) is None
    first = parts.decoder.launches[0]
    assert [q.position for q in first.queries] == list(range(256, 264))
    while not request.has_all_tokens:
        assert parts.executor.reserve([request])
        for _ in parts.executor.rounds([request], 6):
            pass
    assert request.sampler.output_ids == expected(prompt, SAMPLED)
    parts.executor.free(request)
