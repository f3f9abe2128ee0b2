"""transformers' `generate` on the same weights, precision and threads: the rival on a CPU.

The only module of the package that imports transformers, which the `bench` extra installs.
"""

import time
from pathlib import Path
from typing import Any

import torch

from soloist.bench.contender import Contender, Run, gaps_s
from soloist.engine import Engine
from soloist.errors import SettingError
from soloist.model.dtype import Dtype
from soloist.model.torch_types import TORCH_DTYPES


class _Clock:
    """A streamer that notes when tokens arrive."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to note."""


class TransformersGenerate:
    """One cache mode of `generate`.

    Args:
        model: loaded once for all modes.
        cache: 'dynamic' or 'static'.
    """

    def __init__(self, model: Any, cache: str) -> None:  # noqa: ANN401 - untyped rival
        self.name = f"transformers generate, {cache} cache"
        self._model = model
        self._cache = {} if cache == "dynamic" else {"cache_implementation": cache}

    def run(self, prompt_ids: list[int], new_tokens: int) -> Run:
        """Greedy, exactly `new_tokens` tokens; times come from the streamer interface."""
        clock = _Clock()
        start = time.perf_counter()
        ids = torch.tensor([prompt_ids], device=self._model.device)
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                streamer=clock,
                **self._cache,
            )
        first, last = clock.times[1], clock.times[-1]  # the prompt itself comes first
        made = tuple(output[0, len(prompt_ids) :].tolist())
        return Run(first - start, last - first, made, gaps_s(clock.times[1:]))


def rivals(engine: Engine) -> list[Contender]:
    """Both cache modes, on the engine's folder, device and precision.

    Raises:
        SettingError: transformers is not installed.
    """
    resolved = engine.resolved
    model = _loaded(engine.report.folder, resolved.dtype, torch.device(resolved.device))
    return [TransformersGenerate(model, cache) for cache in ("dynamic", "static")]


def forward_logits(
    folder: Path, dtype: Dtype, device: torch.device, token_ids: list[int]
) -> torch.Tensor:
    """fp32 logits [T, V] of one forward pass in `dtype`.

    Raises:
        SettingError: transformers is not installed.
    """
    model = _loaded(folder, dtype, device)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids], device=device)).logits[0]
    return logits.float()


def _loaded(folder: Path, dtype: Dtype, device: torch.device) -> Any:  # noqa: ANN401 - untyped rival
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise SettingError(
            "--against", "transformers", "a library that is installed", "pip install soloist[bench]"
        ) from error
    if not folder.is_dir():
        raise SettingError(
            "--against", "transformers", "only for a folder",
            "measure the GGUF file alone, or the model's safetensors checkpoint against it",
        )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=TORCH_DTYPES[dtype])
    return model.to(device).eval()
