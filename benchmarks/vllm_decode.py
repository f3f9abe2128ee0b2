"""How fast vLLM answers one request: `python benchmarks/vllm_decode.py SHAPE [--weights fp8]`.

Runs what `vllm serve` runs, without HTTP and tokenizer: its asynchronous engine in a process of
its own, with its defaults (compiled, CUDA graphs, chunked prefill). Prefix caching is off, so that
every prompt is read. Weights are random; the request is greedy and each run's prompt is new. Speeds
count as in `soloist bench decode`: from the first token to the last. Prints lines of JSON for
`rivals.py`.
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
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

ROOT = Path(__file__).resolve().parents[1]
CONTEXT_TOKENS = 4096
_LOCK = Path(tempfile.gettempdir()) / "vllm_decode.lock"

_INT4 = {
    "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128,
    "observer": "minmax",
}  # fmt: skip
# How checkpoints say what their weights are.
WEIGHTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "int4": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": _INT4, "input_activations": None}
        },
    },
}  # fmt: skip


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shape", help="a file of benchmarks/shapes, without .json")
    parser.add_argument("--weights", choices=WEIGHTS, default="bf16")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[128, 2048])
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    asked = parser.parse_args()
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    asyncio.run(measure(asked))


async def measure(asked: argparse.Namespace) -> None:
    """Load the engine and print a line for each length of prompt."""
    import torch  # noqa: PLC0415 - not needed for --help
    import vllm  # noqa: PLC0415
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    folder = model_folder(asked.shape, asked.weights)
    vocab_size = json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"]
    with alone(fcntl.LOCK_SH):
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(folder), load_format="dummy", skip_tokenizer_init=True,
                max_model_len=CONTEXT_TOKENS, max_num_seqs=8, enable_prefix_caching=False,
                kv_cache_memory_bytes=2 << 30, generation_config="vllm", disable_log_stats=True,
            )
        )  # fmt: skip
        for length in asked.prompt_tokens:
            await arrivals(engine, length, asked.new_tokens, vocab_size)
    with alone(fcntl.LOCK_EX):
        for length in asked.prompt_tokens:
            runs = [
                await arrivals(engine, length, asked.new_tokens, vocab_size)
                for _ in range(asked.runs + 1)
            ][1:]
            row = {
                "engine": "vLLM",
                "version": vllm.__version__,
                "shape": asked.shape,
                "weights": asked.weights,
                "device": torch.cuda.get_device_name(),
                "prompt_tokens": length,
                "new_tokens": asked.new_tokens,
                "ttft_ms": [1e3 * (times[1] - times[0]) for times in runs],
                "decode_tokens_per_s": [(len(t) - 2) / (t[-1] - t[1]) for t in runs],
                "conditions": "AsyncLLM with its defaults, prefix caching off, random weights, "
                "greedy, no speculation",
                "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
                "command": shlex.join(["python", "benchmarks/vllm_decode.py", *sys.argv[1:]]),
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    engine.shutdown()


def model_folder(shape: str, weights: str) -> Path:
    """A folder with the config.json of a shape whose weights are stored like that."""
    file = ROOT / "benchmarks" / "shapes" / f"{shape}.json"
    config = json.loads(file.read_text("utf-8")) | {"torch_dtype": "bfloat16"}
    config["max_position_embeddings"] = max(CONTEXT_TOKENS, config["max_position_embeddings"])
    if WEIGHTS[weights]:
        config["quantization_config"] = WEIGHTS[weights]
    folder = Path(tempfile.mkdtemp(prefix=f"{shape}-{weights}-"))
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


async def arrivals(
    engine: "AsyncLLM", length: int, new_tokens: int, vocab_size: int
) -> list[float]:
    """When a request was handed in, and when each of its tokens came."""
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

    sampling = SamplingParams(
        temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    prompt = {"prompt_token_ids": random.choices(range(10, vocab_size), k=length)}  # noqa: S311
    times = [time.perf_counter()]
    async for output in engine.generate(prompt, sampling, str(times[0])):
        times += [time.perf_counter()] * len(output.outputs[0].token_ids)
    return times


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
