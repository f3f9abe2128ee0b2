"""Laneformer on one GPU, as one rank and as several with SMs of their own, is the reference."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from interpreter.lane_models import CASES, configured
from interpreter.models import CONTEXT, prompt, reference_logits, rope_table
from soloist.engine.kernel import Capacity, load_kernel
from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.pool import PagePool
from soloist.megakernel.choice import Choice
from soloist.megakernel.decoder import Decoder
from soloist.megakernel.header import Build
from soloist.megakernel.launch import Query
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import Plan
from soloist.megakernel.ranks import Ranks
from soloist.model.config import ModelConfig
from soloist.sampling import Sampler, SamplingParams
from soloist.weights.packed import pack_weights
from soloist.weights.sharding import shard_all

pytestmark = pytest.mark.gpu

TOKENS = 150  # three pages
# Relative error of all logits: what rounding to bf16 may do (the interpreter's is 0.007 at most).
MOST_ERROR = 0.02


class Spread:
    """A Laneformer over the ranks of a plan, all on the current GPU unless told otherwise."""

    def __init__(
        self,
        config: ModelConfig,
        plan: Plan,
        weights: dict[str, Tensor],
        devices: Sequence[torch.device] = (),
    ) -> None:
        self.plan = plan
        here = torch.device("cuda", torch.cuda.current_device())
        pages = -(-CONTEXT // PAGE_POSITIONS)
        self.decoders = []
        for rank, device in enumerate(devices or [here] * plan.ranks):
            whole = {k: v.to(device, torch.bfloat16) for k, v in weights.items()}
            pool = PagePool(
                config.num_layers, plan.shape.pool_kv_heads, plan.shape.head_dim, 2 * pages,
                torch.bfloat16, device,
            )  # fmt: skip
            packed = pack_weights(plan, shard_all(plan.part_of(rank), whole), device)
            decoder = Decoder(
                plan, packed, rope_table(config, CONTEXT).to(device), pool.tensor, rank=rank,
                max_rounds=256, max_sequences=2,
            )  # fmt: skip
            decoder.page_tables.copy_(torch.arange(2 * pages).flip(0).view(2, -1))
            self.decoders.append(decoder)
        self.ranks = Ranks(self.decoders)

    def logits(self, ids: list[int], queries: int, sequence: int = 0) -> Tensor:
        """[T, V] of forced tokens, `queries` positions side by side."""
        rounds = len(ids) // queries
        kept = torch.zeros(rounds, queries, self.plan.exchanges.sampled_rows, device="cuda")
        side_by_side = [Query(sequence, c, ids[c::queries], stride=queries) for c in range(queries)]
        self.ranks.run(side_by_side, rounds, logits=kept)
        return kept.flatten(0, 1)[:, : self.plan.model.vocab_size]


def rounded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.to(torch.bfloat16) for k, v in weights.items()}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_the_references(name: str, ranks: int, tmp_path: Path) -> None:
    config, plan, weights = configured(name, tmp_path, ranks)
    ids = prompt(config, TOKENS)
    wanted = reference_logits(config, rounded(weights), ids)
    spread = Spread(config, plan, weights)
    one_by_one = spread.logits(ids, 1)
    error = (one_by_one.cpu() - wanted).norm() / wanted.norm()
    assert error < MOST_ERROR
    for queries in (2, 5):
        assert torch.equal(spread.logits(ids, queries), one_by_one)
    assert torch.equal(spread.logits(ids, 3, sequence=1), one_by_one)


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("name", ["mean of lanes", "vocabulary slices"])
def test_no_bit_depends_on_when_buffers_are_cleaned(name: str, ranks: int, tmp_path: Path) -> None:
    config, plan, weights = configured(name, tmp_path, ranks)
    ids = prompt(config, 96)
    spread = Spread(config, plan, weights)
    wanted = spread.logits(ids, 1)
    assert torch.equal(spread.logits(ids, MAX_QUERIES), wanted)
    for decoder in spread.decoders:
        decoder.load(Build(cleaner_cycles=50_000))  # longer than a layer takes
    for queries in (1, MAX_QUERIES):
        assert torch.equal(spread.logits(ids, queries), wanted), queries


def test_bits_do_not_depend_on_the_ranks(tmp_path: Path) -> None:
    ids, seen = None, []
    for ranks in (1, 2, 8):
        config, plan, weights = configured("seven layers", tmp_path, ranks)
        ids = ids or prompt(config, TOKENS)
        seen.append(Spread(config, plan, weights).logits(ids, 5))
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


@pytest.mark.parametrize("ranks", [1, 4])
def test_lanes_choose_alike_again_and_again(ranks: int, tmp_path: Path) -> None:
    config, plan, weights = configured("seven layers", tmp_path, ranks)
    spread = Spread(config, plan, weights)
    queries = [Query(0, 0, prompt(config, 20)), Query(1, 0, prompt(config, 9, seed=1))]
    made = spread.ranks.run(queries, 150)
    chosen = [d._shown[:150, :2].tolist() for d in spread.decoders]
    assert chosen == [made] * ranks
    for _ in range(20):
        assert spread.ranks.run(queries, 150) == made


def test_a_launch_stops_on_request(tmp_path: Path) -> None:
    config, plan, weights = configured("mean of lanes", tmp_path, 2)
    spread = Spread(config, plan, weights)
    spread.ranks.start([Query(0, 0, [1])], 150)
    spread.ranks.stop()
    made = list(spread.ranks.tokens())
    assert 1 <= len(made) <= 150
    assert spread.ranks.run([Query(0, 0, [1])], len(made)) == made


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("name", ["mean of lanes", "vocabulary slices"])
def test_lanes_sample_as_the_host_does(name: str, ranks: int, tmp_path: Path) -> None:
    config, plan, weights = configured(name, tmp_path, ranks)
    launches = Spread(config, plan, weights).ranks
    params = SamplingParams(max_tokens=60, temperature=0.9, top_p=0.9, seed=3, ignore_eos=True)
    sampler = Sampler(params, config.vocab_size, [7])
    kept = torch.zeros(60, 1, plan.exchanges.sampled_rows, device="cuda")
    query = Query(0, 0, [7], choice=Choice(params, sampler.counts, frozenset()))
    made = launches.run([query], 60, logits=kept)
    for i, (token,) in enumerate(made):
        assert sampler.pick(kept[i, 0, : config.vocab_size].cpu(), i + 1) == token
        sampler.observe(token)


@pytest.mark.parametrize("keep_rows", [True, False], ids=["rows", "unpacked"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("name", ["mean of lanes", "vocabulary slices", "tied", "scales per lane"])
def test_prompts_of_a_loaded_model(name: str, ranks: int, keep_rows: bool, tmp_path: Path) -> None:
    """In uneven chunks by products; then the kernel goes on."""
    config, plan, weights = configured(name, tmp_path, ranks)
    device = torch.device("cuda", torch.cuda.current_device())
    own = [
        {k: v.to(device) for k, v in shard_all(plan.part_of(rank), rounded(weights)).items()}
        for rank in range(ranks)
    ]
    capacity = Capacity(CONTEXT, keeps_prefixes=keep_rows)
    model = load_kernel(plan, own, [device] * ranks, capacity, None, keep_rows=keep_rows)
    model.prepare()
    ids = prompt(config, TOKENS)
    wanted = reference_logits(config, rounded(weights), ids)
    for start, stop in ((0, 3), (3, 100), (100, TOKENS - 20)):
        logits = model.prefill.run(ids[start:stop], start, model.page_tables[0])
        assert logits is not None
        error = (logits.cpu() - wanted[stop - 1]).norm() / wanted[stop - 1].norm()
        assert error < MOST_ERROR
    kept = torch.zeros(20, 1, plan.exchanges.sampled_rows, device=device)
    model.decoder.run([Query(0, TOKENS - 20, ids[-20:])], 20, logits=kept)
    made = kept[:, 0, : config.vocab_size].cpu()
    error = (made - wanted[-20:]).norm() / wanted[-20:].norm()
    assert error < MOST_ERROR


@pytest.mark.gpus(2)
def test_lanes_over_gpus_of_their_own(tmp_path: Path) -> None:
    config, plan, weights = configured("seven layers", tmp_path, 2)
    ids = prompt(config, TOKENS)
    alone = Spread(config, plan, weights).logits(ids, 5)
    spread = Spread(config, plan, weights, [torch.device("cuda", n) for n in range(2)])
    assert torch.equal(spread.logits(ids, 5), alone)
