"""Measure an exported folder: bits per byte of the held-out files by context length.

The model is run by transformers.

Windows do not overlap, so a context of n means at most n tokens before each one; tokens past the
last full window of the longest context are left out for every context alike.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM

from documents import read_documents
from pack import encode


@torch.no_grad()
def nats(model: torch.nn.Module, stream: np.ndarray, context: int, device: str) -> float:
    """Total negative log likelihood of stream[1:], restarted every `context` tokens."""
    inputs = torch.from_numpy(stream[:-1].astype(np.int64)).view(-1, context)
    targets = torch.from_numpy(stream[1:].astype(np.int64)).view(-1, context)
    size = max(1, 32768 // context)
    total = 0.0
    for start in range(0, len(inputs), size):
        logits = model(inputs[start : start + size].to(device)).logits
        wanted = targets[start : start + size].to(device).flatten()
        total += functional.cross_entropy(
            logits.flatten(0, 1).float(), wanted, reduction="sum"
        ).item()
    return total


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument(
        "--max-tokens", type=int, default=None, help="measure only the first tokens"
    )
    parser.add_argument("--out", type=Path, default=None, help="JSON to write")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = (
        AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
        .to(device)
        .eval()
    )
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    texts = [document.text for document in read_documents(arguments.documents, "validation")]
    stream = encode(tokenizer, texts, seed=0, fim_share=0.0)
    num_tokens = min(len(stream) - 1, arguments.max_tokens or len(stream))
    num_tokens -= num_tokens % max(arguments.contexts)
    stream = stream[: num_tokens + 1]
    num_bytes = len(tokenizer.decode(stream[1:].tolist(), skip_special_tokens=True).encode("utf-8"))
    result = {"tokens": num_tokens, "bytes": num_bytes, "dtype": "bfloat16"}
    for context in arguments.contexts:
        loss = nats(model, stream, context, device)
        result[f"context_{context}"] = {
            "bits_per_byte": round(loss / math.log(2) / num_bytes, 4),
            "nats_per_token": round(loss / num_tokens, 4),
        }
    print(json.dumps(result))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
