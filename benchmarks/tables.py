"""Write the tables and figures of the documents: `python benchmarks/tables.py`.

A table stands between two marks, `<!-- table: NAME -->` and `<!-- end -->`, and comes from result
files, from `suites.py` or from the descriptions of rows. A figure in a sentence stands between
`<!-- value: FILE FIELD=VALUE … FIELD.PART FORMAT -->` and `<!-- end -->`: it is a field of the only
row of a result file that has these values, in a format of Python. `--check` changes nothing and
fails where a document is out of step.
"""

import argparse
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from soloist.bench import rows as kinds
from suites import IN_TURN, RIVALS, SUITES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "benchmarks" / "README.md", *ROOT.glob("docs/*.md"))
_TABLE = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_VALUE = re.compile(r"(<!-- value: (\S+) ([^>]*?)(\S+) (\S+) -->)([^<]*)(<!-- end -->)")

Row = Mapping[str, Any]


def main(given: Sequence[str] | None = None) -> int:
    """Exit status: 1 where a document was out of step and was only checked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say what is out of step")
    check = parser.parse_args(given).check
    stale = [document for document in DOCUMENTS if not in_step(document)]
    for document in stale:
        print(f"{document.relative_to(ROOT)} {'is out of step' if check else 'is written'}")
        if not check:
            document.write_text(written(document), encoding="utf-8")
    return int(check and bool(stale))


def in_step(document: Path) -> bool:
    """What stands there is what would be written."""
    return document.read_text(encoding="utf-8") == written(document)


def written(document: Path) -> str:
    """The document with every marked table and figure made anew."""
    text = _TABLE.sub(
        lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[4]}",
        document.read_text(encoding="utf-8"),
    )
    return _VALUE.sub(lambda found: f"{found[1]}{value(*found.group(2, 3, 4, 5))}{found[7]}", text)


def value(name: str, wanted: str, field: str, form: str) -> str:
    """A field of the only row of a result file in which other fields are as wanted."""
    conditions = dict(one.split("=", 1) for one in wanted.split())
    rows: list[Row] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    found = [r for r in rows if all(str(r.get(k)) == v for k, v in conditions.items())]
    if len(found) != 1:
        raise SystemExit(f"{name}: {len(found)} rows have {wanted.strip() or 'any values'}")
    held: Any = found[0]
    for part in field.split("."):
        held = held[part]
    return format(held, form)


def table(headings: Sequence[str], cells: Sequence[Sequence[str]], left: int = 1) -> str:
    """Markdown; columns after the first `left` are figures."""
    if not cells:
        return "Not recorded yet."
    rule = ["---" if i < left else "--:" for i in range(len(headings))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, rule, *cells))


def rows_of(name: str, bench: str = "decode") -> list[Row]:
    """Rows of one kind in a result file; none where nobody recorded it yet."""
    file = RESULTS / name
    found: list[Row] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return [row for row in found if row.get("bench", "decode") == bench]


def _speed(row: Row, digits: int) -> tuple[str, str]:
    speed = row["decode_tokens_per_s"]
    if speed is None:
        return "–", "–"
    return (
        f"{speed['median']:,.{digits}f}",
        f"{speed['min']:,.{digits}f} – {speed['max']:,.{digits}f}",
    )


def _stored(row: Row) -> str:
    """How weights are stored; older files know only the precision."""
    return str(row.get("weights") or row["precision"])


def _request(row: Row) -> bool:
    """One request of 128 tokens, as the README shows them."""
    return bool(row["columns"] == 1 and row["prompt_tokens"] == 128)


def _rival_rows() -> list[Any]:
    files = "h200-rivals.json", "h200-rivals-experts.json"
    return [row for file in files for row in rows_of(file, "rival")]


def h200_rivals() -> str:
    """Requests of known shapes beside another engine's best run on the same kind of card."""
    ours = {
        (r["shape"], _stored(r)): r
        for file in ("h200.json", "h200-quantized.json", "h200-experts.json")
        for r in rows_of(file)
        if _request(r) and r["start_position"] == 128
    }
    cells = []
    for rival in _rival_rows():
        if rival["prompt_tokens"] != 128:
            continue
        best = rival["decode_tokens_per_s"]["max"]
        row = ours.get((rival["shape"], rival["weights"]))
        speed = row["decode_tokens_per_s"]["median"] if row else None
        cells.append((
            rival["shape"], rival["weights"],
            f"**{speed:,.0f}**" if speed else "not yet",
            f"{row['mbu']:.0%}" if row else "–",
            f"{best:,.0f}",
            f"{speed / best:.1f} ×" if speed else "–",
        ))  # fmt: skip
    headings = (
        "shape",
        "weights",
        "Soloist tokens/s",
        "of the bandwidth",
        "vLLM tokens/s",
        "ratio",
    )
    return table(headings, cells, 2)


def rivals() -> str:
    """Other engines in full."""
    cells = [
        (
            f"{r['engine']} {r['version']}", r["shape"], r["weights"], f"{r['prompt_tokens']:,}",
            f"{r['ttft_ms']['median']:.1f}", *_speed(r, 0),
        )
        for r in _rival_rows()
    ]  # fmt: skip
    headings = ("engine", "shape", "weights", "prompt tokens", "TTFT ms", "decode tokens/s")
    return table((*headings, "min – max"), cells, 3)


def h200_accuracy() -> str:
    """16-bit logits against fp32 arithmetic on the same weights."""
    return _accuracy("h200-accuracy.json")


def etude_held_out() -> str:
    """Drafts of Python that étude has not seen, each in turn with the same text without."""
    cells, plain = list[tuple[str, ...]](), dict[str, Any]()
    for file, machine in (("etude-cpu-held-out.json", "two cores"), ("h200-held-out.json", "H200")):
        for r in rows_of(file):
            if not r["speculation"]:
                plain = r
                continue
            drafts = "lookup" if r["wrong"] is None else "the rest of the file"
            drafts += f", {r['wrong']:.0%} replaced" if r["wrong"] else ""
            right = "–" if r["accepted"] is None else f"{r['accepted']:.0%}"
            cells.append((
                machine, r["text"], drafts, right, f"{r['tokens_per_round']:.2f}",
                _speed(r, 0)[0], _speed(plain, 0)[0],
            ))  # fmt: skip
    headings = ("machine", "file", "drafts", "right", "tokens a step", "tokens/s", "without")
    return table(headings, cells, 3)


def h200_quantized_accuracy() -> str:
    """The same of quantised models; transformers reads the numbers that codes stand for."""
    return _accuracy("h200-quantized-accuracy.json")


def h200_experts_accuracy() -> str:
    """The same of a mixture, whole and with fewer layers."""
    return _accuracy("h200-experts-accuracy.json")


def _accuracy(name: str) -> str:
    cells = [
        (
            r["shape"], _stored(r), r["engine"], f"{r['positions']:,}", f"{r['mean_kl']:.1e}",
            f"{r['max_kl']:.1e}", f"{r['nll_difference']:+.1e} ± {r['nll_standard_error']:.0e}",
            f"{r['top_1_agreement']:.1%}",
        )
        for r in rows_of(name, "accuracy")
    ]  # fmt: skip
    headings = ("shape", "precision", "engine", "positions", "mean KL", "largest KL")
    return table((*headings, "NLL less that of fp32", "same first choice"), cells, 3)


def etude_quantized() -> str:
    """What rounding étude's weights costs: held against fp32 on the weights as they were."""
    cells = [
        (
            r["weights"], f"{r['nll']:.3f}",
            f"{r['nll_difference']:+.4f} ± {r['nll_standard_error']:.4f}",
            f"{r['mean_kl']:.4f}", f"{r['top_1_agreement']:.1%}",
        )
        for r in rows_of("etude-quantized-cpu.json", "accuracy")
        if r["fp32_weights"] == "unquantised"
    ]  # fmt: skip
    headings = ("weights", "NLL", "less that of bf16's weights", "mean KL", "same first choice")
    return table(headings, cells)


def etude_kv() -> str:
    """What a KV cache in fewer bits costs étude, held against fp32."""
    found = rows_of("etude-kv-cpu.json", "accuracy")
    cells = [
        (
            r["kv"], f"{r['mean_kl']:.5f}",
            f"{r['nll_difference']:+.4f} ± {r['nll_standard_error']:.4f}",
            f"{r['top_1_agreement']:.1%}",
        )
        for r in found
    ]  # fmt: skip
    return table(("KV cache", "mean KL", "NLL less that of fp32", "same first choice"), cells)


def etude_kv_positions() -> str:
    """The same texts by position: NLL in fp32, what each format adds, and its KL."""
    found = rows_of("etude-kv-cpu.json", "accuracy")
    cells = []
    for parts in zip(*(r["by_position"] for r in found), strict=True):
        first = parts[0]
        exact = first["nll"] - first["nll_difference"]
        added = [
            cell
            for part in parts
            for cell in (
                f"{part['nll_difference']:+.4f} ± {part['nll_standard_error']:.4f}",
                f"{part['mean_kl']:.5f}",
            )
        ]
        cells.append((f"{first['first']:,} … {first['stop'] - 1:,}", f"{exact:.3f}", *added))
    names = [name for r in found for name in (str(r["kv"]), "KL")]
    return table(("positions", "NLL, fp32", *names), cells)


def h200_quantized() -> str:
    """Requests of models whose files are quantised, and steps of several query tokens."""
    cells = [
        (
            r["shape"], _stored(r), str(r["columns"]),
            f"{r['streamed_bytes_per_token'] / 1e9:.2f}", f"{r['ttft_ms']['median']:.1f}",
            *_speed(r, 0), f"{r['mbu']:.0%}",
        )
        for r in rows_of("h200-quantized.json")
    ]  # fmt: skip
    headings = ("shape", "weights", "query tokens a step", "GB a step", "TTFT ms")
    return table((*headings, "decode tokens/s", "min – max", "MBU"), cells, 2)


def h200_gguf() -> str:
    """One model as GGUF files, and rounded to int4."""
    cells = [
        (
            f"`{Path(r['command'].split()[3]).parent.name}`",
            f"{r['streamed_bytes_per_token'] / 1e9:.2f}", *_speed(r, 0), f"{r['mbu']:.0%}",
        )
        for r in rows_of("h200-gguf.json")
    ]  # fmt: skip
    return table(("file", "GB a step", "decode tokens/s", "min – max", "MBU"), cells)


def h200_experts() -> str:
    """Requests of a mixture of experts, and steps of several query tokens."""
    cells = [
        (
            r["shape"], _stored(r), f"{r['start_position']:,}", str(r["columns"]),
            f"{r['streamed_bytes_per_token'] / 1e9:.2f}", *_speed(r, 0), f"{r['mbu']:.0%}",
        )
        for r in rows_of("h200-experts.json")
    ]  # fmt: skip
    headings = ("shape", "weights", "position", "query tokens a step", "GB a step")
    return table((*headings, "decode tokens/s", "min – max", "MBU"), cells, 2)


def h200_kv() -> str:
    """One model with keys and values in fewer bits, far into a text."""
    cells = [
        (f"{r['start_position']:,}", str(r["kv"] or "none"), *_speed(r, 0), f"{r['mbu']:.0%}")
        for r in rows_of("h200-kv.json")
    ]
    return table(("position", "--kv", "decode tokens/s", "min – max", "MBU"), cells, 2)


def h200_kept() -> str:
    """Long prompts of which others kept a part or nothing: both ways, two GPUs, vLLM."""
    found: dict[tuple[str, int, int], dict[str, str]] = {}
    for file in ("h200-kept-prompts.json", "2-h200-kept-prompts.json"):
        for r in rows_of(file, "prefill"):
            name = r["shape"], int(r["prompt_tokens"]), int(r["cached_tokens"])
            library = "--no-page-attention" in r["command"].split()
            way = "library" if library else f"pages, {r['gpus']}"
            found.setdefault(name, {})[way] = f"{r['ttft_ms']['median']:,.1f}"
    for r in rows_of("h200-rivals-kept-prompts.json", "rival"):
        name = r["shape"], int(r["prompt_tokens"]), int(r["kept_tokens"])
        found[name]["vLLM"] = f"{r['ttft_ms']['median']:,.1f}"
    ways = ("pages, 1", "library", "pages, 2", "vLLM")
    cells = [
        (shape, f"{tokens:,}", f"{kept:,}", *(of[way] for way in ways))
        for (shape, tokens, kept), of in found.items()
    ]
    headings = ("shape", "prompt tokens", "of them cached", "ms from pages", "ms by the library")
    return table((*headings, "ms from pages, two GPUs", "ms of vLLM, one GPU"), cells)


def h200_contexts() -> str:
    """Prompts that come back from the host's memory or from files, and a prompt beside a stream."""
    where = {
        "offloaded": "in the host's memory", "saved": "in files", "cold": "nowhere; a stream beside"
    }  # fmt: skip
    cells = []
    for r in rows_of("h200-contexts.json", "prefill"):
        gap = r["longest_gap_ms"]
        cells.append((
            r["shape"], where[r["prefix"]], f"{r['prompt_tokens']:,}", f"{r['cached_tokens']:,}",
            f"{r['ttft_ms']['median']:,.1f}", "–" if gap is None else f"{gap['median']:.1f}",
        ))  # fmt: skip
    headings = ("shape", "the prompt is", "tokens", "of them cached", "ms to the first token")
    return table((*headings, "longest gap of the stream, ms"), cells, 2)


def h200_agent() -> str:
    """A long conversation, step by step."""
    (row,) = rows_of("h200-agent.json", "agent")
    cells = [
        (str(number), f"{turn['prompt_tokens']:,}", f"{turn['cached_tokens']:,}",
         f"{turn['new_tokens']}", f"{turn['step_ms']:,.0f}")
        for number, turn in enumerate(row["by_turn"], 1)
    ]  # fmt: skip
    return table(("step", "prompt tokens", "of them cached", "new tokens", "ms"), cells)


def h200_predictions() -> str:
    """Predicted answers, each in turn with the same texts without drafts."""
    cells, plain = list[tuple[str, ...]](), dict[str, Any]()
    for r in rows_of("h200-predictions.json"):
        if r.get("predicted") is not None:
            continue
        if not r["speculation"]:
            plain = r
            continue
        drafts = "lookup" if r["wrong"] is None else f"prediction, {r['wrong']:.0%} wrong"
        cells.append((
            r["shape"], _stored(r), f"{r['temperature']:.0f}", drafts, str(r["sequences"]),
            f"{r['tokens_per_round']:.2f}", *_speed(r, 0), _speed(plain, 0)[0],
        ))  # fmt: skip
    headings = ("shape", "weights", "temperature", "drafts", "requests", "tokens a step of each")
    return table((*headings, "tokens/s", "min – max", "without"), cells, 4)


def h200_beside_drafts() -> str:
    """Requests without drafts beside one whose prediction is right."""
    cells, plain = list[tuple[str, ...]](), dict[str, Any]()
    for r in rows_of("h200-predictions.json"):
        if r.get("predicted") is None:
            continue
        if not r["speculation"]:
            plain = r
            continue
        alone, beside = (row["beside_tokens_per_s"]["median"] for row in (plain, r))
        cells.append((
            r["shape"], _stored(r), str(r["sequences"]), f"{alone:,.0f}", f"{beside:,.0f}",
            f"{beside / alone:.3f}",
        ))  # fmt: skip
    headings = ("shape", "weights", "requests", "nobody drafts", "one drafts", "of it")
    return table(headings, cells, 2)


def h200_one_copy() -> str:
    """Prompts by rows beside packed weights, by these alone, and with activations in 8 bits."""
    found: dict[tuple[str, str], dict[tuple[str, int], str]] = {}
    for r in rows_of("h200-one-copy.json", "prefill"):
        way = next((w for w in ("eight-bit", "packed") if f"--{w}" in r["command"]), "rows")
        ways = found.setdefault((r["shape"], r["weights"]), {})
        ways[way, r["prompt_tokens"]] = f"{r['ttft_ms']['median']:.1f}"
    columns = [(way, count) for count in (128, 2048) for way in ("rows", "packed", "eight-bit")]
    cells = [
        (*which, *(ways.get(column, "") for column in columns)) for which, ways in found.items()
    ]
    names = {"rows": "rows", "packed": "packed", "eight-bit": "8 bits"}
    headings = (f"{count:,} tokens: {names[way]}" for way, count in columns)
    return table(("shape", "weights", *headings), cells, 2)


def h200_gguf_prompts() -> str:
    """Prompts of a GGUF file by rows beside packed weights, and by these alone."""
    return _two_ways("h200-gguf-prompts.json", "--packed-prompts", "packed")


def unpacked_prompts() -> str:
    """Prompts by rows beside packed weights, and by matrices that are unpacked one by one."""
    return _two_ways(
        ("h200-unpacked-prompts.json", "2-h200-unpacked-prompts.json"), "--unpack-prompts",
        "unpacked",
    )  # fmt: skip


def _two_ways(files: str | tuple[str, ...], option: str, name: str) -> str:
    """First tokens by rows, and with an option; a line for each model."""
    found: dict[tuple[str, str, str], dict[tuple[str, int], str]] = {}
    for file in (files,) if isinstance(files, str) else files:
        for r in rows_of(file, "prefill"):
            which = (r["shape"], _stored(r), str(r["gpus"]))
            way = name if f" {option}" in r["command"] else "rows"
            ways = found.setdefault(which, {})
            ways[way, r["prompt_tokens"]] = f"{r['ttft_ms']['median']:.1f}"
    columns = [(way, count) for count in (128, 2048) for way in ("rows", name)]
    cells = [(*which, *(ways[column] for column in columns)) for which, ways in found.items()]
    headings = (f"{count:,} tokens: {way}" for way, count in columns)
    return table(("shape", "weights", "GPUs", *headings), cells, 2)


def h200_tails() -> str:
    """A prompt's last tokens by a pass of prefill, and in rounds of the decode kernel."""
    found: dict[tuple[str, int, int], dict[str, str]] = {}
    for r in rows_of("h200-tails.json", "prefill"):
        tail = r["prompt_tokens"] - r["cached_tokens"]
        path = "decode" if "--path decode" in r["command"] else "prefill"
        ways = found.setdefault((r["shape"], r["cached_tokens"], tail), {})
        ways[path] = f"{r['ttft_ms']['median']:.1f}"
    cells = [
        (shape, f"{kept:,}", str(tail), ways["prefill"], ways["decode"])
        for (shape, kept, tail), ways in found.items()
    ]
    return table(("shape", "kept tokens", "new tokens", "by a pass", "in rounds"), cells)


def h200_quantized_startup() -> str:
    """Time and memory to load files of about as many bytes, quantised and not."""
    cells = []
    for r in rows_of("h200-quantized-startup.json", "startup"):
        apart = r["gpu_memory_bytes"] - r["kv_cache_bytes"]
        cells.append((
            r["shape"], _stored(r), f"{r['checkpoint_bytes'] / 1e9:.2f}",
            f"{r['weights_s']['median']:.2f}", f"{r['total_s']['median']:.2f}",
            f"{apart / 1e9:.2f}", f"{r['kv_cache_bytes'] / 1e9:.2f}",
        ))  # fmt: skip
    headings = ("shape", "weights", "GB in files", "seconds to read", "to the first token")
    return table((*headings, "GB of the GPU but for KV", "GB of KV"), cells, 2)


def h200_one_copy_startup() -> str:
    """What a model takes of a GPU's memory and of the host's, with 8,192 positions."""
    cells = []
    for r in rows_of("h200-one-copy-startup.json", "startup"):
        beside = r["checkpoint_bytes"] + r["kv_cache_bytes"]
        sizes = (
            r["checkpoint_bytes"], r["kv_cache_bytes"], r["gpu_tensors_bytes"] - beside,
            r["gpu_memory_bytes"], r["host_memory_bytes"],
        )  # fmt: skip
        cells.append((
            r["shape"], _stored(r), *(f"{n / 1e9:.2f}" for n in sizes),
            f"{r['total_s']['median']:.2f}",
        ))  # fmt: skip
    headings = ("GB in files", "GB of KV", "GB of tensors beside both", "GB of the GPU, all")
    return table(
        ("shape", "weights", *headings, "GB of the host", "seconds to the first token"), cells, 2
    )


def h200_prompt_accuracy() -> str:
    """Prompts with activations in 8 bits, and decoding, against fp32."""
    return _accuracy("h200-prompt-accuracy.json")


def h200_speed() -> str:
    """Requests of known shapes."""
    cells = [
        (r["shape"], f"{r['ttft_ms']['median']:.1f}", *_speed(r, 0), f"{r['mbu']:.0%}")
        for r in rows_of("h200.json")
        if _request(r) and r["start_position"] == 128
    ]
    return table(("shape", "TTFT ms", "decode tokens/s", "min – max", "MBU"), cells)


def h200_context() -> str:
    """The same over longer contexts, the shortest first."""
    found = [r for r in rows_of("h200.json") if _request(r) and r["start_position"] != 128]
    cells = [
        (r["shape"], f"{r['start_position']:,}", _speed(r, 0)[0], f"{r['mbu']:.0%}")
        for r in sorted(found, key=lambda r: int(r["start_position"]))
    ]
    return table(("shape", "context", "decode tokens/s", "MBU"), cells)


def h200_prompts() -> str:
    """Times to the first token: a column for each length of prompt."""
    lengths = (16, 128, 2048, 8192)
    found: dict[str, dict[int, str]] = {}
    for row in rows_of("h200.json"):
        if row["columns"] == 1 and row["start_position"] == row["prompt_tokens"]:
            of_shape = found.setdefault(row["shape"], {})
            of_shape[row["prompt_tokens"]] = f"{row['ttft_ms']['median']:.1f}"
    for row in rows_of("h200-prefill.json", "prefill"):
        if row["prefix"] == "cold":
            of_shape = found.setdefault(row["shape"], {})
            of_shape.setdefault(row["prompt_tokens"], f"{row['ttft_ms']['median']:.1f}")
    cells = [(shape, *(of.get(n, "–") for n in lengths)) for shape, of in found.items()]
    return table(("shape", *(f"{n:,} tokens" for n in lengths)), cells)


def h200_ranks() -> str:
    """Requests over several GPUs, the fewest first."""
    cells = [
        (
            r["shape"], _stored(r), str(r["gpus"]), f"{r['start_position']:,}",
            f"{r['ttft_ms']['median']:.1f}", *_speed(r, 0), f"{r['mbu']:.0%}",
        )
        for gpus in (1, 2, 4, 8)
        for r in sorted(rows_of(f"{gpus}-h200.json"), key=lambda r: int(r["start_position"]))
        if r["prompt_tokens"] == 128
    ]  # fmt: skip
    headings = ("shape", "precision", "GPUs", "context", "TTFT ms", "decode tokens/s", "min – max")
    return table((*headings, "MBU"), cells, 2)


def h200_ranks_prompts() -> str:
    """Times to the first token over several GPUs, of prompts read whole or after cached ones."""
    found: dict[tuple[str, str, str], dict[int, str]] = {}
    for gpus in (2, 4, 8):
        for row in rows_of(f"{gpus}-h200-prompts.json", "prefill"):
            name = row["shape"], str(gpus), "whole" if row["prefix"] == "cold" else "cached"
            of_name = found.setdefault(name, {})
            if row["prefix"] == "cold" or row["cached_tokens"]:
                cached = f" ({row['cached_tokens']:,} cached)" if row["cached_tokens"] else ""
                of_name[row["prompt_tokens"]] = f"{row['ttft_ms']['median']:.1f}{cached}"
    lengths = (128, 512, 2048)
    cells = [(*name, *(of.get(n, "–") for n in lengths)) for name, of in found.items() if of]
    headings = ("shape", "GPUs", "prompt", *(f"{n:,} tokens" for n in lengths))
    return table(headings, cells, 3)


def h200_startup() -> str:
    """From starting the command to its first token."""
    cells = [
        (
            r["shape"], "compiled before" if r["kernel_cache"] == "warm" else "none compiled yet",
            *(f"{r[part]['median']:.2f}" for part in ("total_s", "weights_s", "kernels_s")),
        )
        for r in rows_of("h200-startup.json", "startup")
    ]  # fmt: skip
    headings = ("shape", "kernels", "seconds", "of it weights", "of it compiling")
    return table(headings, cells, 2)


def cpu_startup() -> str:
    """étude on a CPU, from starting a command to its first token."""
    cells = [
        (
            f"`{r['program']}`", f"{r['total_s']['median']:.1f}",
            f"{r['total_s']['min']:.1f} – {r['total_s']['max']:.1f}",
            "–" if r["ready_s"] is None else f"{r['ready_s']['median']:.1f}",
        )
        for r in rows_of("etude-cpu-startup.json", "startup")
    ]  # fmt: skip
    return table(("command", "seconds", "min – max", "of it until ready"), cells)


def gguf_cpu() -> str:
    """A model's GGUF files, each in turns with its folder in 16 bits."""
    found, cells = rows_of("gguf-cpu.json"), []
    for plain, r in zip(found[::2], found[1::2], strict=True):
        words = r["command"].split()
        name = Path(words[words.index("--beside") + 1]).parent.name.removeprefix("gguf-")
        cells.append((f"`{name}`", r["precision"], *_speed(r, 2), *_speed(plain, 2)))
    headings = ("file", "computed in", "decode tokens/s", "min – max", "bf16", "min – max")
    return table(headings, cells, 2)


def etude_cpu() -> str:
    """étude and its rivals in one process."""
    cells = [
        (r["engine"], f"{r['ttft_ms']['median']:.1f}", *_speed(r, 1), f"{r['mbu']:.0%}")
        for r in rows_of("etude-cpu.json")
    ]
    return table(("engine", "TTFT ms", "decode tokens/s", "min – max", "MBU"), cells)


def etude_busy() -> str:
    """étude in one process, with and without another one that only counts."""
    file = "etude-cpu-busy.json"
    alone: dict[object, float] = {}
    cells = []
    for r in [*rows_of(file, "decode"), *rows_of(file, "prefill")]:
        is_decode = r["bench"] == "decode"
        speed = r["decode_tokens_per_s" if is_decode else "prompt_tokens_per_s"]["median"]
        what = "decode" if is_decode else f"prompt of {r['prompt_tokens']:,}"
        share = speed / alone.setdefault(what, speed)
        busy = str(r["busy_processes"])
        cells.append((what, busy, f"{r['ttft_ms']['median']:.1f}", f"{speed:,.0f}", f"{share:.0%}"))
    headings = ("", "busy processes", "TTFT ms", "tokens/s", "of the speed alone")
    return table(headings, cells)


def etude_servers() -> str:
    """étude behind two servers, as a client sees them."""
    cells = [
        (
            r["engine"], f"{r['prompt_tokens']:,}", f"{r['ttft_ms']['median']:.1f}", *_speed(r, 1),
            f"{r['mbu']:.0%}" if r["mbu"] is not None else "–",
        )
        for r in rows_of("etude-cpu-servers.json", "serve")
    ]  # fmt: skip
    headings = ("server", "prompt tokens", "TTFT ms", "decode tokens/s", "min – max", "MBU")
    return table(headings, cells)


def etude_loops() -> str:
    """Agents' loops against the same two servers."""
    cells = [
        (
            r["engine"], str(r["turns"]), f"{r['step_ms']['p50']:,.0f}",
            f"{r['step_ms']['p90']:,.0f}", f"{r['loop_s']['median']:.2f}",
        )
        for r in rows_of("etude-cpu-servers.json", "agent")
    ]  # fmt: skip
    headings = ("server", "steps", "a step ms (median)", "90 %", "a loop s")
    return table(headings, cells)


def etude_neighbours() -> str:
    """What other clients' requests do to a stream of étude."""
    cells = [
        (
            r["neighbour"],
            f"{r['neighbour_bytes'] / 1e6:.1f}" if r["neighbour_bytes"] else "–",
            _speed(r, 1)[0],
            "–" if r["gap_ms"] is None else f"{r['gap_ms']['max']:,.0f}",
            "yes" if r["same_text"] else "no",
            ", ".join(sorted({*r["neighbour_statuses"]})) or "–",
            "–" if r["neighbour_s"] is None else f"{r['neighbour_s']['median']:.2f}",
            "–" if r["health_ms"] is None else f"{r['health_ms']['max']:,.0f}",
            "–" if r["memory_peak_bytes"] is None else f"{r['memory_peak_bytes'] / 1e6:,.0f}",
            "–" if r["memory_after_bytes"] is None else f"{r['memory_after_bytes'] / 1e6:,.0f}",
            "–" if r["memory_per_body_byte"] is None else f"{r['memory_per_body_byte']:.1f}",
        )
        for r in rows_of("etude-cpu-neighbours.json", "neighbours")
    ]
    headings = (
        "neighbour", "its body MB", "tokens/s", "worst gap ms", "same text", "answered", "in s",
        "worst health ms", "peak MB", "after MB", "a body's byte",
    )  # fmt: skip
    return table(headings, cells)


def ray_hop() -> str:
    """What the way over Ray adds to one server, each time beside that server itself."""
    cells = [
        (
            r["engine"], f"{r['ttft_ms']['median']:.1f}",
            f"{r['ttft_ms']['min']:.1f} – {r['ttft_ms']['max']:.1f}", *_speed(r, 1),
            f"{r['gap_ms']['p99']:.1f}",
        )
        for name in ("ray-hop.json", "ray-hop-as-it-comes.json")
        for r in rows_of(name, "serve")
    ]  # fmt: skip
    headings = (
        "server", "TTFT ms", "min – max", "decode tokens/s", "min – max", "99 % of gaps below ms",
    )  # fmt: skip
    return table(headings, cells)


def recorded() -> str:
    """Result files and what makes them."""
    cells = [
        (
            f"`results/{name}`",
            f"`python benchmarks/record.py {suite} --only {name}`",
            str(len(file.commands)),
        )
        for suite, files in SUITES.items()
        for name, file in files.items()
        if (RESULTS / name).exists()
    ]
    cells += [
        (f"`results/{name}`", f"`{commands[0]}` and others, then `rivals.py`", str(len(commands)))
        for name, commands in RIVALS.items()
    ]
    cells += [
        (
            f"`results/{name}`",
            f"`python benchmarks/in_turn.py A=TREE B=TREE --file {name}`",
            str(len(commands)),
        )
        for name, commands in IN_TURN.items()
    ]
    return table(("file", "reproduce", "commands"), cells, left=2)


def fields() -> str:
    """Every field of every kind of row, from its description."""
    rows = [
        *get_args(kinds.AnyRow), kinds.Turn, kinds.Stretch, kinds.Spread, kinds.Percentiles,
        kinds.Clocks,
    ]  # fmt: skip
    return "\n\n".join(_fields(row) for row in rows)


def _fields(row: type) -> str:
    documented = inspect.cleandoc(row.__doc__ or "")
    summary, _, rest = documented.partition("\n")
    told = described(rest)
    types = {f.name: _type(f.type) for f in dataclasses.fields(row)}
    if row is kinds.Spread:
        told = dict.fromkeys(types, "of the values of all runs")
    assert told.keys() == types.keys(), f"{row.__name__} describes {sorted(told)}"
    cells = [(f"`{name}`", types[name], told[name]) for name in types]
    return f"**{row.__name__}**: {summary}\n\n{table(('field', 'type', 'what it is'), cells, 3)}"


def described(text: str) -> dict[str, str]:
    """Fields and their descriptions under 'Attributes:' of a docstring."""
    _, _, listed = text.partition("Attributes:\n")
    told: dict[str, str] = {}
    names: list[str] = []
    for line in listed.splitlines():
        start = re.match(r"    (\w+(?:, \w+)*): (.*)", line)
        if start:
            names = start[1].split(", ")
            told |= dict.fromkeys(names, start[2])
        elif line.strip():
            told |= {name: f"{told[name]} {line.strip()}" for name in names}
    return told


def _type(annotation: object) -> str:
    """A type for people, of JSON: None is null, tuples are lists."""
    plain = isinstance(annotation, type) and not get_args(annotation)
    words = (
        getattr(annotation, "__name__", "")
        if plain
        else str(annotation).replace("soloist.bench.rows.", "")
    )
    return words.replace(" | ", " or ").replace("tuple", "list").replace(", ...", "")


TABLES: dict[str, Callable[[], str]] = {
    "h200-rivals": h200_rivals,
    "rivals": rivals,
    "h200-speed": h200_speed,
    "h200-context": h200_context,
    "h200-prompts": h200_prompts,
    "h200-ranks": h200_ranks,
    "h200-ranks-prompts": h200_ranks_prompts,
    "h200-startup": h200_startup,
    "h200-accuracy": h200_accuracy,
    "h200-quantized": h200_quantized,
    "h200-gguf": h200_gguf,
    "h200-experts": h200_experts,
    "h200-agent": h200_agent,
    "h200-contexts": h200_contexts,
    "h200-kv": h200_kv,
    "h200-kept": h200_kept,
    "h200-predictions": h200_predictions,
    "h200-beside-drafts": h200_beside_drafts,
    "h200-one-copy": h200_one_copy,
    "h200-gguf-prompts": h200_gguf_prompts,
    "unpacked-prompts": unpacked_prompts,
    "h200-tails": h200_tails,
    "etude-held-out": etude_held_out,
    "h200-quantized-accuracy": h200_quantized_accuracy,
    "h200-experts-accuracy": h200_experts_accuracy,
    "h200-quantized-startup": h200_quantized_startup,
    "h200-one-copy-startup": h200_one_copy_startup,
    "h200-prompt-accuracy": h200_prompt_accuracy,
    "etude-quantized": etude_quantized,
    "etude-kv": etude_kv,
    "etude-kv-positions": etude_kv_positions,
    "cpu-startup": cpu_startup,
    "gguf-cpu": gguf_cpu,
    "etude-cpu": etude_cpu,
    "etude-busy": etude_busy,
    "etude-servers": etude_servers,
    "etude-loops": etude_loops,
    "etude-neighbours": etude_neighbours,
    "ray-hop": ray_hop,
    "recorded": recorded,
    "fields": fields,
}

if __name__ == "__main__":
    sys.exit(main())
