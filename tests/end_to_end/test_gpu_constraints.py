"""étude under grammars on the decode kernel: masks from the host, and forced tokens at once."""

import json
import subprocess
import sys
import time
from functools import cache

import pytest
import torch

from end_to_end.test_constraints import PROMPT, REQUESTS, SCHEMA
from end_to_end.test_gpu_loop import end_of
from end_to_end.test_gpu_sampling import model, prompt_ids
from soloist.engine import Completion, Engine, EngineConfig
from soloist.engine.loop import EngineLoop
from soloist.megakernel.choice import Choice
from soloist.megakernel.launch import Query
from soloist.sampling import Sampler, SamplingParams
from soloist.sampling.constraint import num_words, words_of
from soloist.text.answers import answer_grammar, json_form, regex_form

pytestmark = pytest.mark.gpu

FORMS = {
    "schema": json_form(SCHEMA),
    "few-forced": regex_form(r"([a-z]{2}[0-9] = \(){8}"),
    "nothing-forced": regex_form("[a-z ]{60}"),
    "long-span": regex_form("[ab]" + "the same words again and again " * 5 + "[cd]{5}"),
}


@cache
def engine() -> Engine:
    asked = EngineConfig("etude", device="cuda", context_tokens=2048, sequences=4)
    return Engine.load(asked)


def grammar(name: str):
    return engine().grammars.compile(answer_grammar(FORMS[name]))


def sampler_of(params: SamplingParams, name: str) -> Sampler:
    ids = engine().tokenizer.encode(PROMPT)
    eos_ids = engine().tokenizer.eos_ids
    return Sampler(params, engine().config.vocab_size, ids, eos_ids, grammar(name).start())


def kernel_logits(ids: list[int]) -> torch.Tensor:
    """[T, V] after each of these tokens, from the kernel, one a round."""
    decoder = model().decoder
    kept = torch.zeros(len(ids), 1, decoder.logits.shape[1], device="cuda")
    decoder.run([Query(0, 0, ids)], len(ids), logits=kept)
    return kept[:, 0, : engine().config.vocab_size].cpu()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("params", REQUESTS.values(), ids=REQUESTS)
def test_tokens_are_the_definitions_from_the_kernels_logits(params, name) -> None:
    """Also where forced tokens went through the kernel eight at a time: bits are the same."""
    *_, end = engine().generate(PROMPT, params, grammar=grammar(name))
    assert isinstance(end, Completion)
    made, ids = list(end.token_ids), engine().tokenizer.encode(PROMPT)
    assert len(ids) <= 24, "it rides, so that its logits are the kernel's"
    logits = kernel_logits(ids + made[:-1])
    sampler = sampler_of(params, name)
    for number, token_id in enumerate(made):
        position = len(ids) + number
        assert token_id == sampler.pick(logits[position - 1], position), f"output {number}"
        sampler.observe(token_id)
    assert sampler.is_complete or end.finish_reason in ("eos", "length")
    if name == "schema" and end.finish_reason == "stop":
        assert set(json.loads(end.text)) == set(SCHEMA["properties"])


def test_log_probabilities_change_no_token() -> None:
    """With them every launch has one round, and forced tokens come one by one."""
    loop = EngineLoop(engine().model, engine().tokenizer, engine().config.vocab_size)
    ids = engine().tokenizer.encode(PROMPT)
    for name in FORMS:
        plain, shown = (
            end_of(
                loop.submit(
                    ids, REQUESTS["sampled"], top_logprobs=top, constraint=grammar(name).start()
                )
            )
            for top in (None, 2)
        )
        assert shown.token_ids == plain.token_ids
    loop.close()


def test_requests_side_by_side_are_those_alone() -> None:
    asked = [
        ("schema", REQUESTS["greedy"]), (None, SamplingParams(max_tokens=150, ignore_eos=True)),
        ("few-forced", REQUESTS["sampled"]), ("long-span", REQUESTS["all"]),
        (None, SamplingParams(max_tokens=90, temperature=0.8, seed=2, ignore_eos=True)),
        ("nothing-forced", REQUESTS["sampled"]),
    ]  # fmt: skip
    loop = EngineLoop(engine().model, engine().tokenizer, engine().config.vocab_size)
    ids = engine().tokenizer.encode(PROMPT)

    def submit(name, params):
        return loop.submit(ids, params, constraint=None if name is None else grammar(name).start())

    alone = [end_of(submit(*x)).token_ids for x in asked]
    together = [submit(*x) for x in asked]
    assert [end_of(ticket).token_ids for ticket in together] == alone
    loop.close()


def masked_query(allowed: list[int], sequence: int = 0) -> Query:
    vocab = engine().config.vocab_size
    (first, *_) = prompt_ids()
    sampler = Sampler(SamplingParams(), vocab, prompt_ids())
    choice = Choice(sampler.params, sampler.counts, allowed=words_of(allowed, vocab))
    return Query(sequence, 0, [first], choice=choice)


def test_a_host_that_takes_its_time_is_waited_for() -> None:
    """Longer than other waits may last."""
    decoder, vocab = model().decoder, engine().config.vocab_size
    decoder.start([masked_query([7])], 3)
    made = []
    for number, (token_id,) in enumerate(decoder.tokens()):
        made.append(token_id)
        time.sleep((2.5, 0, 0)[number])
        decoder.allow(0, words_of([8 + number], vocab))
    assert made == [7, 8, 9]


def test_the_host_ends_a_launch_where_a_mask_is_due() -> None:
    decoder, vocab = model().decoder, engine().config.vocab_size
    free = Query(1, 0, [prompt_ids()[0]])
    alone = decoder.run([free], 40)
    decoder.start([masked_query([7]), free], 40)
    made = []
    for number, tokens in enumerate(decoder.tokens()):
        made.append(tokens)
        decoder.allow(0, words_of([8 + number], vocab) if number < 3 else None)
    assert [row[0] for row in made[:4]] == [7, 8, 9, 10]
    assert len(made) == 5, "the round that waits is the last"
    assert [row[1:] for row in made] == alone[:5], "and others' tokens in it count"
    decoder.start([masked_query([7])], 40)
    assert next(decoder.tokens()) == [7]
    decoder.abandon()
    assert len(list(decoder.tokens())) < 5
    assert len(decoder.run([free], 5)) == 5


def test_masks_reach_every_block() -> None:
    """One token of each block's share alone, and of the vocabulary's ends."""
    decoder, vocab = model().decoder, engine().config.vocab_size
    wanted = [0, vocab - 1, *range(13, vocab, vocab // 150)]
    decoder.start([masked_query(wanted[:1])], len(wanted))
    made = []
    for number, (token_id,) in enumerate(decoder.tokens()):
        made.append(token_id)
        if number + 1 < len(wanted):
            decoder.allow(0, words_of(wanted[number + 1 : number + 2], vocab))
    assert made == wanted
    assert num_words(vocab) == 256


STUCK = """
import os
from soloist.engine import Engine, EngineConfig
from soloist.errors import KernelStuck
from soloist.megakernel.choice import Choice
from soloist.megakernel.header import Build
from soloist.megakernel.launch import Query
from soloist.sampling import Sampler, SamplingParams
from soloist.sampling.constraint import words_of

engine = Engine.load(EngineConfig("etude", device="cuda", context_tokens=256))
decoder, vocab = engine.model.decoder, engine.config.vocab_size
decoder.load(Build(mask_ns=300_000_000))
sampler = Sampler(SamplingParams(), vocab, [1])
choice = Choice(sampler.params, sampler.counts, allowed=words_of([7], vocab))
try:
    decoder.run([Query(0, 0, [1], choice=choice)], 4)
except KernelStuck as error:
    print(error.message, flush=True)
os._exit(0)  # the context is lost, and tidying up would say so
"""


def test_a_host_that_never_says_it_is_told_of() -> None:
    """In a process of its own: the trap ends the GPU's context."""
    command = [sys.executable, "-c", STUCK]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    for fact in ("round 1", "phase mask", "waits for the host to say which tokens"):
        assert fact in done.stdout, done.stdout + done.stderr
