"""Write a trained model as a folder that transformers loads: bf16 weights, configs, tokenizer."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True, help="best.pt of train.py")
    parser.add_argument("--shape", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    state = torch.load(arguments.weights, map_location="cpu", weights_only=True)
    tensors = {
        name: weight.to(torch.bfloat16).contiguous() for name, weight in sorted(state.items())
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    shutil.copy(arguments.shape, arguments.out / "config.json")
    config = json.loads(arguments.shape.read_text(encoding="utf-8"))
    generation = {
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
        "do_sample": False,
        "max_new_tokens": 1024,
    }
    (arguments.out / "generation_config.json").write_text(
        json.dumps(generation, indent=2) + "\n", encoding="utf-8"
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(arguments.tokenizer / name, arguments.out / name)
    parameters = sum(weight.numel() for weight in tensors.values())
    print(f"{parameters} parameters, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    main()
