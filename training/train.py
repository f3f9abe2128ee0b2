"""Train one shape on the corpus: Muon for matrices, AdamW for the rest, linear decay to zero.

Most tokens come in short windows, the last share in long ones. Writes state.pt (to resume), best.pt
(weights of the lowest validation loss) and log.jsonl into --out.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from documents import read_documents
from epochs import Corpus, Epochs, Plan, Progress, batches
from model import Qwen3, Shape, rotary_table
from pack import encode, windows

LOG_EVERY = 50  # steps


def optimizers(model: Qwen3, arguments: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Split the parameters among the optimizers; both read the learning rate set each step."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    embedding = [p for n, p in model.named_parameters() if "embed" in n]
    norms = [p for p in model.parameters() if p.ndim == 1]
    decay = arguments.weight_decay
    return [
        # match_rms_adamw: updates of AdamW's size, so one learning rate suits both.
        torch.optim.Muon(
            matrices, weight_decay=decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(
            [
                {"params": embedding, "weight_decay": decay},
                {"params": norms, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=arguments.device == "cuda",
        ),
    ]


def rate(share_done: float, warmup_share: float) -> float:
    """Give the share of the peak learning rate: linear warm-up, then linear decay to zero."""
    return min(share_done / warmup_share, max(0.0, 1 - share_done) / (1 - warmup_share), 1.0)


class Run:
    """One training run: the model, its optimizers, where it stands, and its files."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.began = time.monotonic()
        self.device = arguments.device
        self.out: Path = arguments.out
        shape = Shape.read(arguments.shape)
        self.model = Qwen3(shape).to(self.device)
        self.optimizers = optimizers(self.model, arguments)
        self.progress = Progress()
        self.resume()
        self.seconds_before = self.progress.seconds
        longest = max(arguments.window, arguments.long_window)
        self.tables = rotary_table(shape, longest, torch.device(self.device))
        compiled = not arguments.no_compile
        self.loss = torch.compile(self.model.loss, dynamic=False) if compiled else self.model.loss

        texts = [document.text for document in read_documents(arguments.documents, "validation")]
        tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
        stream = encode(tokenizer, texts, seed=0, fim_share=0.0)
        self.held_out = stream[: arguments.validation_tokens + 1]

    def resume(self) -> None:
        """Take up state.pt where there is one."""
        path = self.out / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])
        print(f"resumed at step {self.progress.step}", flush=True)

    def write(self, content: object, name: str) -> None:
        """Save aside and rename, so a run stopped meanwhile leaves the older file whole."""
        torch.save(content, self.out / f"{name}.new")
        (self.out / f"{name}.new").rename(self.out / name)

    def save(self) -> None:
        """Write all that resume needs."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": asdict(self.progress),
        }
        self.write(state, "state.pt")

    def to_device(self, cut: np.ndarray) -> Tensor:
        """Move windows [B, T + 1] to the device as int64."""
        ids = torch.from_numpy(cut.astype(np.int32))
        pinned = ids.pin_memory() if self.device == "cuda" else ids
        return pinned.to(self.device, non_blocking=True).long()

    def step(self, batch: np.ndarray) -> Tensor:
        """Train on one batch; returns its mean loss without waiting for the device."""
        arguments, progress = self.arguments, self.progress
        length = batch.shape[1] - 1
        micro = max(1, arguments.micro_tokens // length)
        total = torch.zeros((), device=self.device)
        for start in range(0, len(batch), micro):
            ids = self.to_device(batch[start : start + micro])
            with torch.autocast(self.device, dtype=torch.bfloat16):
                loss = self.loss(ids, *self.tables) * (len(ids) / len(batch))
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), arguments.clip)
        share = rate(progress.tokens / arguments.tokens, arguments.warmup_share)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = arguments.learning_rate * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens += len(batch) * length
        return total

    @torch.no_grad()
    def validation_loss(self, length: int) -> float:
        """Mean nats per token over held-out files as they are, in windows of one length."""
        cut = windows(self.held_out, length, seed=None)
        size = max(1, 32768 // length)
        total = 0.0
        for start in range(0, len(cut), size):
            ids = self.to_device(cut[start : start + size])
            with torch.autocast(self.device, dtype=torch.bfloat16):
                total += self.model.loss(ids, *self.tables).item() * len(ids)
        return total / len(cut)

    def validate(self) -> dict[str, float]:
        """Measure both window lengths and keep the weights if the short one is the best yet."""
        short = self.validation_loss(self.arguments.window)
        long = self.validation_loss(self.arguments.long_window)
        if short < self.progress.best_loss:
            self.progress.best_loss = short
            self.write(self.model.state_dict(), "best.pt")
        return {"validation": round(short, 5), "validation_long": round(long, 5)}

    def record(self, losses: list[Tensor], length: int, since: tuple[float, int]) -> None:
        """Append a line to the log, with the validation loss where one is due."""
        progress = self.progress
        train = torch.stack(losses).mean().item()  # waits for the device: the time below is true
        now = time.monotonic()
        progress.seconds = self.seconds_before + now - self.began
        entry: dict[str, float] = {
            "step": progress.step,
            "tokens": progress.tokens,
            "epoch": progress.epoch,
            "window": length,
            "train": round(train, 5),
            "tokens_per_second": round((progress.tokens - since[1]) / (now - since[0])),
            "seconds": round(progress.seconds, 1),
        }
        if self.done or progress.step % self.arguments.validate_every == 0:
            entry |= self.validate()
        print(json.dumps(entry), flush=True)
        with (self.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(entry) + "\n")

    @property
    def done(self) -> bool:
        """Whether the token budget is spent."""
        return bool(self.progress.tokens >= self.arguments.tokens)

    def train(self) -> None:
        """Run until the budget or the time is spent."""
        arguments, progress = self.arguments, self.progress
        corpus = Corpus(arguments.documents, arguments.tokenizer, arguments.share)
        long_from = (1 - arguments.long_share) * arguments.tokens
        plan = Plan(arguments.batch_tokens, arguments.window, arguments.long_window, long_from)
        epochs = Epochs(corpus, progress.epoch, self.out)
        losses: list[Tensor] = []
        since = time.monotonic(), progress.tokens
        for batch in batches(plan, epochs, progress):
            losses.append(self.step(batch))
            stop = self.done or time.monotonic() - self.began > arguments.max_seconds
            if stop or 0 in (progress.step % LOG_EVERY, progress.step % arguments.validate_every):
                self.record(losses, batch.shape[1] - 1, since)
                losses.clear()
                since = time.monotonic(), progress.tokens
            if stop or progress.step % arguments.save_every == 0:
                self.save()
            if stop:
                break
        epochs.close()


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=Path, required=True)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=float, default=1.0e9, help="budget; the schedule's end")
    parser.add_argument("--batch-tokens", type=int, default=262_144)
    parser.add_argument("--micro-tokens", type=int, default=131_072, help="of one forward pass")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--long-window", type=int, default=8192)
    parser.add_argument("--long-share", type=float, default=0.13, help="of the tokens")
    parser.add_argument("--learning-rate", type=float, default=6e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--warmup-share", type=float, default=0.02)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--validate-every", type=int, default=250, help="steps")
    parser.add_argument("--validation-tokens", type=int, default=524_288)
    parser.add_argument("--save-every", type=int, default=500, help="steps")
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="then save and stop")
    parser.add_argument("--share", type=float, default=1.0, help="of the documents, for trials")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Run the command line."""
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    run = Run(arguments)
    print(f"{sum(p.numel() for p in run.model.parameters())} parameters", flush=True)
    run.train()


if __name__ == "__main__":
    main()
