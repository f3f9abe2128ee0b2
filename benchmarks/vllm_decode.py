"""How fast vLLM answers one request: `python benchmarks/vllm_decode.py SHAPE [--weights fp8]`.

Runs what `vllm serve` runs, without HTTP and tokenizer: its asynchronous engine in a process of
its own, with a server's defaults (compiled, CUDA graphs, chunked prefill). Weights are random, and
the request is greedy, or sampled with `--temperature`. Speeds count as in `soloist bench decode`:
from the first token to the last. Prints lines of JSON for `rivals.py`.

Without `--keep` prefix caching is off, and each run's prompt is new. With it caching is on: the
first tokens of some prompts came before, and what follows them is another text in every run, as in
`soloist bench prefill --kept`.
"""

import argparse
import asyncio
import fcntl
import json
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

ROOT = Path(__file__).resolve().parents[1]
# The least that an engine is made for, so that short prompts all find the same one.
CONTEXT_TOKENS, KV_BYTES = 4096, 2 << 30
_FEWEST_FOR_SPEED = 32  # new tokens: with fewer, single gaps decide what the speed seems to be
_LOCK = Path(tempfile.gettempdir()) / "vllm_decode.lock"

_INT4 = {
    "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128,
    "observer": "minmax",
}  # fmt: skip
# How checkpoints say what their weights are.
WEIGHTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8-block": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    },
    "int4": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": _INT4, "input_activations": None}
        },
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked for.

    Attributes:
        length: number of tokens.
        kept: how many first tokens came before.
    """

    length: int
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One request.

    Attributes:
        times: when it was handed in, and when each of its tokens came, in seconds.
        cached: prompt tokens that the engine found in its cache.
    """

    times: list[float]
    cached: int

    @property
    def ttft_ms(self) -> float:
        """Request handed in → first token."""
        return 1e3 * (self.times[1] - self.times[0])

    @property
    def tokens_per_s(self) -> float:
        """From the first token to the last."""
        return (len(self.times) - 2) / (self.times[-1] - self.times[1])


def main() -> None:
    """Measure what the command line asks for."""
    asked = parsed(sys.argv[1:])
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    asyncio.run(measure(asked))


def parsed(given: Sequence[str]) -> argparse.Namespace:
    """What a command line asks for; `prompts` holds the prompts of both options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shape", help="a file of benchmarks/shapes, without .json")
    parser.add_argument("--weights", choices=WEIGHTS, default="bf16")
    parser.add_argument(
        "--prompt-tokens", type=int, nargs="+", default=[], metavar="LENGTH",
        help="prompts of which nothing came before; 128 and 2048 where no prompt is named",
    )  # fmt: skip
    parser.add_argument(
        "--keep", type=kept_prompt, nargs="+", default=[], metavar="LENGTH:KEPT",
        help="prompts of so many tokens, of which the first KEPT came before",
    )  # fmt: skip
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--temperature", type=float, default=0.0,
        help="above 0 answers are sampled, so that a mixture's experts vary",
    )  # fmt: skip
    asked = parser.parse_args(given)
    if min(asked.runs, asked.new_tokens) < 1:
        parser.error("--runs and --new-tokens are at least 1")
    if not 0 <= asked.temperature < float("inf"):
        parser.error(f"--temperature {asked.temperature}: wanted 0 or more")
    asked.prompts = [*map(Prompt, asked.prompt_tokens), *asked.keep] or [Prompt(128), Prompt(2048)]
    return asked


def kept_prompt(word: str) -> Prompt:
    """A prompt as `--keep` names it."""
    length, _, kept = word.partition(":")
    if not (length.isdecimal() and kept.isdecimal() and 0 < int(kept) < int(length)):
        raise argparse.ArgumentTypeError(f"{word} (wanted: LENGTH:KEPT, with 0 < KEPT < LENGTH)")
    return Prompt(int(length), int(kept))


async def measure(asked: argparse.Namespace) -> None:
    """Load the engine and print a line for each prompt."""
    import torch  # noqa: PLC0415 - not needed for --help
    import vllm  # noqa: PLC0415

    longest = max(prompt.length for prompt in asked.prompts)
    context = max(CONTEXT_TOKENS, longest + asked.new_tokens)
    config = shape_config(asked.shape, asked.weights, context)
    vocab_size = config["vocab_size"]
    opening = random_ids(longest, vocab_size)
    with alone(fcntl.LOCK_SH):
        engine = load(config, context, caches=bool(asked.keep))
        for prompt in asked.prompts:
            for ids in texts(prompt, opening, vocab_size, runs=0):
                await answer(engine, ids, asked.new_tokens, asked.temperature)
    with alone(fcntl.LOCK_EX):
        for prompt in asked.prompts:
            runs = [
                await answer(engine, ids, asked.new_tokens, asked.temperature)
                for ids in texts(prompt, opening, vocab_size, asked.runs)
            ][-asked.runs :]
            row = {
                "engine": "vLLM",
                "version": vllm.__version__,
                "shape": asked.shape,
                "weights": asked.weights,
                "device": torch.cuda.get_device_name(),
                "prompt_tokens": prompt.length,
                "kept_tokens": min(run.cached for run in runs),
                "new_tokens": asked.new_tokens,
                **figures(runs, asked.new_tokens),
                "conditions": conditions(asked.temperature, caches=bool(asked.keep)),
                "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
                "command": shlex.join(["python", "benchmarks/vllm_decode.py", *sys.argv[1:]]),
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    engine.shutdown()


def shape_config(shape: str, weights: str, context: int) -> dict[str, Any]:
    """The config.json of a shape whose weights are stored like that, for so many tokens."""
    file = ROOT / "benchmarks" / "shapes" / f"{shape}.json"
    config: dict[str, Any] = json.loads(file.read_text("utf-8")) | {"torch_dtype": "bfloat16"}
    config["max_position_embeddings"] = max(context, config["max_position_embeddings"])
    if WEIGHTS[weights]:
        config["quantization_config"] = WEIGHTS[weights]
    return config


def load(config: Mapping[str, Any], context: int, *, caches: bool) -> "AsyncLLM":
    """An engine with the defaults of vLLM's server, for requests of up to `context` tokens."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
    from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    folder = Path(tempfile.mkdtemp(prefix="vllm-decode-"))
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True,
            max_model_len=context, max_num_seqs=8, enable_prefix_caching=caches,
            kv_cache_memory_bytes=kv_bytes(config, context), generation_config="vllm",
            disable_log_stats=True,
            # What has to be free when it starts, and no more: several may load side by side.
            gpu_memory_utilization=0.1,
        ),
        # A server's passes take up to 8,192 tokens of a prompt, those of other uses fewer.
        usage_context=UsageContext.OPENAI_API_SERVER,
    )  # fmt: skip


def kv_bytes(config: Mapping[str, Any], context: int) -> int:
    """Bytes of 16-bit keys and values of two requests: of what is kept, and of another text."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    a_layer = 2 * config.get("num_key_value_heads", heads) * head_dim * 2
    return max(KV_BYTES, 2 * context * config["num_hidden_layers"] * a_layer)


def conditions(temperature: float, *, caches: bool) -> str:
    """The engine's settings in words."""
    choice = f"temperature {temperature:g}" if temperature else "greedy"
    return (
        f"AsyncLLM with the defaults of vllm serve, prefix caching {'on' if caches else 'off'}, "
        f"random weights, {choice}, no speculation"
    )


def random_ids(length: int, vocab_size: int) -> list[int]:
    """A text that no run had before."""
    return random.choices(range(10, vocab_size), k=length)  # noqa: S311


def texts(prompt: Prompt, opening: Sequence[int], vocab_size: int, runs: int) -> list[list[int]]:
    """Ids to hand in one after the other: those of `runs`, behind what warms the engine up.

    A run that is not timed comes before them. Of a kept prompt all share the first tokens of
    `opening`, which come even before that run, and one token behind them is another one each time.
    """
    if not prompt.kept:
        return [random_ids(prompt.length, vocab_size) for _ in range(runs + 1)]
    made = [list(opening[: prompt.kept])]
    for run in range(runs + 1):
        ids = list(opening[: prompt.length])
        ids[prompt.kept] = (ids[prompt.kept] + 1 + run) % vocab_size
        made.append(ids)
    return made


def figures(runs: Sequence[Run], new_tokens: int) -> dict[str, list[float] | None]:
    """Figures of each run; no speed where there are too few tokens to say one."""
    says_speed = new_tokens >= _FEWEST_FOR_SPEED
    return {
        "ttft_ms": [run.ttft_ms for run in runs],
        "decode_tokens_per_s": [run.tokens_per_s for run in runs] if says_speed else None,
    }


async def answer(engine: "AsyncLLM", ids: list[int], new_tokens: int, temperature: float) -> Run:
    """One request for an answer of so many tokens."""
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

    sampling = SamplingParams(
        temperature=temperature, max_tokens=new_tokens, ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    cached = 0
    times = [time.perf_counter()]
    async for output in engine.generate({"prompt_token_ids": ids}, sampling, str(times[0])):
        times += [time.perf_counter()] * len(output.outputs[0].token_ids)
        cached = output.num_cached_tokens or 0
    return Run(times, cached)


@contextmanager
def alone(kind: int) -> Iterator[None]:
    """Shared while loading, alone while timed: several of these may be started side by side."""
    with _LOCK.open("a") as file:
        fcntl.flock(file, kind)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # by hand: processes of the engine have it, too


if __name__ == "__main__":
    main()
