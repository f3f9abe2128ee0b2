"""Write the model card's samples: fixed prompts, fixed settings, fixed seed, nothing edited."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Sample(NamedTuple):
    """A prompt and how to continue it."""

    title: str
    prompt: str
    temperature: float  # 0 is greedy
    num_tokens: int


SAMPLES = [
    Sample("Greedy", "def fibonacci(n):\n", 0.0, 96),
    Sample(
        "Temperature 0.7, seed 1",
        '"""Read a CSV file and print the mean of each column."""\n\nimport csv\n',
        0.7,
        192,
    ),
    Sample(
        "Fill in the middle, greedy",
        "<|fim_prefix|>def count_words(path):\n    counts = {}\n    with open(path) as f:\n"
        "<|fim_suffix|>    return counts\n<|fim_middle|>",
        0.0,
        96,
    ),
]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=None, help="JSON to write")
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    results = []
    for sample in SAMPLES:
        torch.manual_seed(1)
        ids = tokenizer(sample.prompt, return_tensors="pt", add_special_tokens=False).input_ids
        settings = (
            {"do_sample": True, "temperature": sample.temperature, "top_k": 0, "top_p": 1.0}
            if sample.temperature
            else {}
        )
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=sample.num_tokens, **settings
        )
        text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=False)
        results.append({"title": sample.title, "prompt": sample.prompt, "output": text})
        print(f"--- {sample.title}\n{sample.prompt}>>>{text}\n")
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
