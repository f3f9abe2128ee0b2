"""Write README.md (the model card) and NOTICE.md beside exported weights, from the logs."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FENCE = "````"
CARD = """---
license: apache-2.0
language: [code]
tags: [python, qwen3, fill-in-the-middle]
library_name: transformers
pipeline_tag: text-generation
---

# {name}

{what}

It writes plausible Python and nothing more. **Do not rely on its code**: it is often wrong, it
invents names, and it repeats itself, most of all under greedy decoding. It is no assistant and
follows no instructions; the chat template merely turns a conversation into commented Python.

| | |
| --- | --- |
| parameters | {parameters:,} (embeddings tied, {embedding:,} of them) |
| layout | Qwen3: hidden {hidden_size}, {num_hidden_layers} layers, {num_attention_heads} query and \
{num_key_value_heads} KV heads of {head_dim}, FFN {intermediate_size} |
| context | {max_position_embeddings:,} tokens |
| weights | bf16, {megabytes:.1f} MB, SHA-256 `{digest}` |
| tokenizer | byte-level BPE, 8,192 entries, 3.65 bytes per token on the held-out files |
| tokens seen | {tokens:.2f} billion, {epochs:.1f} times the corpus; the last 13 % in windows of 8,192 |
| training | {minutes:.1f} minutes on one H200{beside}, Muon and AdamW, linear decay |
| licence | Apache-2.0; `NOTICE.md` names whose code it was trained on |

## Data

{train_megabytes:.0f} MB of Python in {train_files:,} files: the standard library and {packages} packages whose
metadata declares a permissive licence, without vendored folders, generated files,
data tables and near-duplicates. Half of the documents were rearranged for filling in the middle, at
random character positions. 2 % of the files, chosen by a hash of their text, were held out.
`training/` in the repository has every script, the list of packages and the loss curve.

## Validation

All {validation_files} held-out files in bf16: {validation_tokens:,} tokens in windows that do not overlap. The files come
from the packages that the model was trained on. Files of one package stand side by side, so a
longer window also shows the model other files of that package.

| context | bits per byte | nats per token |
| --- | --- | --- |
{validation}

## Prompts

- Completion: the text so far. `<|endoftext|>` ends a document.
- Fill in the middle: `<|fim_prefix|>` before `<|fim_suffix|>` after `<|fim_middle|>`. In training
  the middle ended with `<|endoftext|>`; the model often misses that end.
- `<|fim_pad|>`, `<|file_sep|>`, `<|im_start|>`, `<|im_end|>` and the reserved ones are untrained.

## Samples

Unedited first results of `training/samples.py` in f32, up to a token limit; only blank lines at
either end are not shown.
{samples}"""
WHAT = {
    "etude": "A small code model that ships with Soloist, for trying the engine, measuring its speed and\n"
    "testing it in CI without a download.",
    "etude-draft": "The draft of `etude`, for speculative decoding: the same tokenizer and data, a seventh\n"
    "of the parameters. It ships with Soloist for speed tests and CI.",
}
BESIDE = {
    "etude": ", the draft on the same device for the first four",
    "etude-draft": ", beside `etude` on the same device",
}
NOTICE = """# Notice

These weights are licensed under Apache-2.0. They were trained on the source code below, and what
they write may repeat passages of it. Copyright in the code remains with its authors, under the licence named here as its package declares
it. `training/attribution.json` in the repository also lists what was left out, and why.

| package | version | licence | authors | home page |
| --- | --- | --- | --- | --- |
{rows}

## Python standard library

Copyright (c) 2001-2024 Python Software Foundation; All Rights Reserved

{psf}"""


def read(path: Path) -> Any:  # noqa: ANN401 - JSON of several forms
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def sample_text(sample: dict[str, Any]) -> str:
    """Show one sample: how it was made, the prompt, what followed."""
    return (
        f"\n### {sample['title']}\n\nPrompt:\n\n{FENCE}python\n{sample['prompt'].rstrip()}\n{FENCE}\n"
        f"\nOutput:\n\n{FENCE}python\n{sample['output'].rstrip()}\n{FENCE}\n"
    )


def card(name: str, digest: str, num_bytes: int) -> str:
    """Fill in the model card."""
    shape = read(HERE / "shapes" / f"{name}.json")
    evaluation = read(HERE / "log" / f"{name}-evaluation.json")
    corpus = read(HERE / "attribution.json")
    last = json.loads((HERE / "log" / f"{name}.jsonl").read_text().splitlines()[-1])
    hidden, head = shape["hidden_size"], shape["head_dim"]
    heads = 2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]
    layer = hidden * (head * heads + 3 * shape["intermediate_size"]) + 2 * hidden + 2 * head
    embedding = shape["vocab_size"] * hidden
    rows = [
        f"| {int(key.split('_')[1]):,} | {value['bits_per_byte']} | {value['nats_per_token']} |"
        for key, value in evaluation.items()
        if key.startswith("context_")
    ]
    return CARD.format(
        **shape,
        name=name,
        what=WHAT[name],
        beside=BESIDE[name],
        parameters=embedding + hidden + layer * shape["num_hidden_layers"],
        embedding=embedding,
        megabytes=num_bytes / 1e6,
        digest=digest,
        tokens=last["tokens"] / 1e9,
        # 3.65 bytes per token, as measured on the held-out files.
        epochs=last["tokens"]
        * evaluation["bytes"]
        / evaluation["tokens"]
        / corpus["text_bytes"]["train"],
        minutes=last["seconds"] / 60,
        train_megabytes=corpus["text_bytes"]["train"] / 1e6,
        train_files=corpus["files"]["train"],
        packages=sum("standard-library" not in s["package"] for s in corpus["included"]),
        validation_files=corpus["files"]["validation"],
        validation_tokens=evaluation["tokens"],
        validation="\n".join(rows),
        samples="".join(map(sample_text, read(HERE / "log" / f"{name}-samples.json"))),
    )


def notice() -> str:
    """Name every source, with the notice that the standard library's licence asks for."""
    keys = ("package", "version", "licence", "authors", "home_page")
    rows = [
        "| " + " | ".join(source[key].replace("|", "/") for key in keys) + " |"
        for source in read(HERE / "attribution.json")["included"]
    ]
    psf = (HERE / "psf-licence.txt").read_text(encoding="utf-8")
    return NOTICE.format(rows="\n".join(rows), psf=f"```text\n{psf.rstrip()}\n```\n")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", choices=sorted(WHAT), required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder of the exported weights")
    arguments = parser.parse_args()

    weights = (arguments.model / "model.safetensors").read_bytes()
    text = card(arguments.name, hashlib.sha256(weights).hexdigest(), len(weights))
    (arguments.model / "README.md").write_text(text, encoding="utf-8")
    (arguments.model / "NOTICE.md").write_text(notice(), encoding="utf-8")


if __name__ == "__main__":
    main()
