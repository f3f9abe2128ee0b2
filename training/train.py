"""Train one shape on the corpus: Muon for matrices, AdamW for the rest, linear decay to zero.

Most tokens come in short windows, the last share in long ones. Writes state.pt (to resume), best.pt
(weights of the lowest validation loss) and log.jsonl into --out.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from documents import read_documents
from model import Qwen3, Shape, rotary_table
from pack import encode, windows
from tokenizers import Tokenizer
from torch import Tensor


@dataclass
class Progress:
    """Where a run stands; part of state.pt."""

    step: int = 0
    tokens: int = 0
    epoch: int = 0
    windows_used: int = 0  # of this epoch
    long: bool = False
    seconds: float = 0.0
    best_loss: float = math.inf


@cache
def corpus(documents: Path, tokenizer: Path, share: float) -> tuple[Tokenizer, list[str]]:
    """Load once per process; a share below one keeps every n-th document, for trials."""
    texts = [document.text for document in read_documents(documents, "train")]
    return Tokenizer.from_file(str(tokenizer / "tokenizer.json")), texts[:: round(1 / share)]


def encode_epoch(documents: Path, tokenizer: Path, share: float, epoch: int, out: Path) -> Path:
    """Encode one epoch in a process beside the training loop and leave it as a file."""
    path = out / f"epoch-{epoch}-{os.getpid()}.npy"
    np.save(path, encode(*corpus(documents, tokenizer, share), seed=epoch))
    return path


class Epochs:
    """Token streams of successive epochs, the next one made while this one is used."""

    def __init__(self, arguments: argparse.Namespace, first: int) -> None:
        # spawn: a forked child of a process that holds a GPU context cannot run.
        self.pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        self.arguments = arguments
        self.upcoming = first
        self.future = self.submit()

    def submit(self) -> Future[Path]:
        arguments = self.arguments
        return self.pool.submit(
            encode_epoch,
            arguments.documents,
            arguments.tokenizer,
            arguments.share,
            self.upcoming,
            arguments.out,
        )

    def take(self) -> tuple[int, np.ndarray]:
        epoch, path = self.upcoming, self.future.result()
        stream = np.load(path)
        path.unlink()
        self.upcoming += 1
        self.future = self.submit()
        return epoch, stream

    def close(self) -> None:
        self.future.cancel()
        self.pool.shutdown(cancel_futures=True)
        if self.future.done() and not self.future.cancelled():
            self.future.result().unlink(missing_ok=True)


def batches(
    arguments: argparse.Namespace, epochs: Epochs, progress: Progress
) -> Iterator[np.ndarray]:
    """Yield [windows, length + 1] of --batch-tokens each; keeps the position in progress."""
    while True:
        epoch, stream = epochs.take()
        if epoch != progress.epoch:
            progress.epoch, progress.windows_used = epoch, 0
        length = arguments.long_window if progress.long else arguments.window
        cut = windows(stream, length, seed=epoch)
        size = arguments.batch_tokens // length
        while progress.windows_used + size <= len(cut):
            start = progress.windows_used
            progress.windows_used += size
            yield cut[start : start + size]
            if (
                not progress.long
                and progress.tokens >= (1 - arguments.long_share) * arguments.tokens
            ):
                progress.long = True
                break


def optimizers(model: Qwen3, arguments: argparse.Namespace) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    embedding = [p for n, p in model.named_parameters() if "embed" in n]
    norms = [p for p in model.parameters() if p.ndim == 1]
    return [
        # match_rms_adamw: updates of AdamW's size, so one learning rate suits both.
        torch.optim.Muon(
            matrices,
            lr=arguments.learning_rate,
            weight_decay=arguments.weight_decay,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [
                {"params": embedding, "weight_decay": arguments.weight_decay},
                {"params": norms, "weight_decay": 0.0},
            ],
            lr=arguments.learning_rate,
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=arguments.device == "cuda",
        ),
    ]


def rate(arguments: argparse.Namespace, tokens: int) -> float:
    """Share of the peak learning rate after so many tokens: linear warm-up, then linear decay to zero."""
    warm = tokens / (arguments.warmup_share * arguments.tokens)
    return min(1.0, warm, max(0.0, (1 - tokens / arguments.tokens) / (1 - arguments.warmup_share)))


def to_device(cut: np.ndarray, device: str) -> Tensor:
    ids = torch.from_numpy(cut.astype(np.int32))
    return (ids.pin_memory() if device == "cuda" else ids).to(device, non_blocking=True).long()


@torch.no_grad()
def validation_loss(
    model: Qwen3, stream: np.ndarray, length: int, tables: tuple[Tensor, Tensor], device: str
) -> float:
    """Mean nats per token over unrearranged held-out files, in windows of one length."""
    cut = windows(stream, length, seed=None)
    size = max(1, 32768 // length)
    total = 0.0
    for start in range(0, len(cut), size):
        ids = to_device(cut[start : start + size], device)
        with torch.autocast(device, dtype=torch.bfloat16):
            total += model.loss(ids, *tables).item() * len(ids)
    return total / len(cut)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=Path, required=True)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--tokens", type=float, default=1.0e9, help="token budget; the schedule ends there"
    )
    parser.add_argument("--batch-tokens", type=int, default=262_144)
    parser.add_argument(
        "--micro-tokens", type=int, default=131_072, help="tokens of one forward and backward"
    )
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--long-window", type=int, default=8192)
    parser.add_argument(
        "--long-share", type=float, default=0.13, help="share of the tokens seen in long windows"
    )
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--warmup-share", type=float, default=0.02)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--validate-every", type=int, default=250, help="steps")
    parser.add_argument("--validation-tokens", type=int, default=524_288)
    parser.add_argument(
        "--save-every", type=int, default=500, help="steps between writes of state.pt"
    )
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=math.inf,
        help="save and stop after this time; resume later",
    )
    parser.add_argument(
        "--share", type=float, default=1.0, help="share of the documents, for trials"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Run the command line."""
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    device = arguments.device

    shape = Shape.read(arguments.shape)
    model = Qwen3(shape).to(device)
    steppers = optimizers(model, arguments)
    progress = Progress()
    state_path = arguments.out / "state.pt"
    if state_path.exists():
        state = torch.load(state_path, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for stepper, saved in zip(steppers, state["optimizers"], strict=True):
            stepper.load_state_dict(saved)
        progress = Progress(**state["progress"])
        print(f"resumed at step {progress.step}", flush=True)
    epochs = Epochs(arguments, progress.epoch)

    tables = rotary_table(shape, max(arguments.window, arguments.long_window), torch.device(device))
    held_out = [document.text for document in read_documents(arguments.documents, "validation")]
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    held_stream = encode(tokenizer, held_out, seed=0, fim_share=0.0)[
        : arguments.validation_tokens + 1
    ]
    loss_of = model.loss if arguments.no_compile else torch.compile(model.loss, dynamic=False)

    def record(entry: dict[str, float | int]) -> None:
        print(json.dumps(entry), flush=True)
        with (arguments.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(entry) + "\n")

    def save() -> None:
        state = {
            "model": model.state_dict(),
            "optimizers": [stepper.state_dict() for stepper in steppers],
            "progress": asdict(progress),
        }
        # Written aside and renamed, so a run stopped meanwhile leaves the older state whole.
        torch.save(state, state_path.with_suffix(".new"))
        state_path.with_suffix(".new").rename(state_path)

    def validate() -> dict[str, float]:
        short = validation_loss(model, held_stream, arguments.window, tables, device)
        long = validation_loss(model, held_stream, arguments.long_window, tables, device)
        if short < progress.best_loss:
            progress.best_loss = short
            torch.save(model.state_dict(), arguments.out / "best.new")
            (arguments.out / "best.new").rename(arguments.out / "best.pt")
        return {"validation": round(short, 5), "validation_long": round(long, 5)}

    print(
        f"{sum(p.numel() for p in model.parameters())} parameters, {len(held_stream)} validation tokens",
        flush=True,
    )
    seconds_before = progress.seconds
    mark_seconds, mark_tokens = time.monotonic(), progress.tokens
    running = torch.zeros((), device=device)
    since = 0
    for batch in batches(arguments, epochs, progress):
        length = batch.shape[1] - 1
        micro = max(1, arguments.micro_tokens // length)
        for stepper in steppers:
            for group in stepper.param_groups:
                group["lr"] = arguments.learning_rate * rate(arguments, progress.tokens)
        for start in range(0, len(batch), micro):
            ids = to_device(batch[start : start + micro], device)
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = loss_of(ids, *tables) * (len(ids) / len(batch))
            loss.backward()
            running += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), arguments.clip)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens += len(batch) * length
        since += 1

        done = progress.tokens >= arguments.tokens
        late = time.monotonic() - began > arguments.max_seconds
        validate_now = progress.step % arguments.validate_every == 0 or done
        if progress.step % 50 == 0 or validate_now or late:
            train_loss = running.item() / since  # waits for the device, so the time below is true
            now = time.monotonic()
            progress.seconds = seconds_before + now - began
            entry: dict[str, float | int] = {
                "step": progress.step,
                "tokens": progress.tokens,
                "epoch": progress.epoch,
                "window": length,
                "train": round(train_loss, 5),
                "tokens_per_second": round((progress.tokens - mark_tokens) / (now - mark_seconds)),
                "seconds": round(progress.seconds, 1),
            }
            if validate_now:
                entry |= validate()
            record(entry)
            running.zero_()
            since = 0
            mark_seconds, mark_tokens = time.monotonic(), progress.tokens
        if progress.step % arguments.save_every == 0 or done or late:
            save()
        if done or late:
            break
    epochs.close()


if __name__ == "__main__":
    main()
