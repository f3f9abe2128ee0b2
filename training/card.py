"""Write README.md (the model card) and NOTICE.md beside exported weights, from the logs."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FENCE = "````"
CARD = (HERE / "templates" / "card.md").read_text(encoding="utf-8")
NOTICE = (HERE / "templates" / "notice.md").read_text(encoding="utf-8")
WHAT = {
    "etude": "A small code model that ships with Soloist, for trying the engine, measuring its\n"
    "speed and testing it in CI without a download.",
    "etude-draft": "The draft of `etude`, for speculative decoding: the same tokenizer and data,\n"
    "a seventh of the parameters. It ships with Soloist for speed tests and CI.",
}
BESIDE = {
    "etude": ", the draft on the same device for the first four",
    "etude-draft": ", beside `etude` on the same device",
}


def read(path: Path) -> Any:  # noqa: ANN401 - JSON of several forms
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def sample_text(sample: dict[str, Any]) -> str:
    """Show one sample: how it was made, the prompt, what followed."""
    return (
        f"\n### {sample['title']}\n\n"
        f"Prompt:\n\n{FENCE}python\n{sample['prompt'].rstrip()}\n{FENCE}\n"
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
