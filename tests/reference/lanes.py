"""Delayed tensor parallelism written a second time: the published equations, literally, in fp64.

One token after the other, one lane after the other, one head after the other, rope with complex
numbers. Shares no code with the package: it reads a configuration and tensors as they are stored.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

FIELDS: dict[str, Any] = {
    "model_type": "laneformer",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 68,
    "max_position_embeddings": 128,
    "rope_theta": 300.0,
    "norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "num_lanes": 4,
    "broadcast_delay": 2,
    "use_comm": True,
    "use_early_comm": True,
    "lm_head_type": "replicate",
    "pre_norm_lane_agg": False,
    "replicated_rmsn_scale": True,
}


def random_tensors(fields: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """A checkpoint of these fields, lane first, with random norm scales."""
    generator = torch.Generator().manual_seed(seed)
    lanes, hidden, vocab = fields["num_lanes"], fields["hidden_size"], fields["vocab_size"]
    head_dim = fields.get("head_dim") or hidden // fields["num_attention_heads"]
    queries = fields["num_attention_heads"] // lanes * head_dim
    keys = fields["num_key_value_heads"] // lanes * head_dim
    ffn = fields["intermediate_size"] // lanes

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    stored = {"model.tok_embeddings.weight": torch.randn(vocab, hidden, generator=generator)}

    def norm(name: str) -> None:
        if fields["replicated_rmsn_scale"]:
            stored[f"{name}.weight"] = 1 + 0.3 * torch.randn(hidden, generator=generator)
        else:
            stored[f"{name}.scale"] = 1 + 0.3 * torch.randn(lanes, hidden, generator=generator)

    for i in range(fields["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        norm(f"{layer}.attention_norm")
        norm(f"{layer}.ffn_norm")
        stored[f"{layer}.attention.wq.weight"] = matrix(lanes, queries, hidden)
        stored[f"{layer}.attention.wk.weight"] = matrix(lanes, keys, hidden)
        stored[f"{layer}.attention.wv.weight"] = matrix(lanes, keys, hidden)
        stored[f"{layer}.attention.wo.weight"] = matrix(lanes, hidden, queries)
        stored[f"{layer}.feed_forward.w1.weight"] = matrix(lanes, ffn, hidden)
        stored[f"{layer}.feed_forward.w3.weight"] = matrix(lanes, ffn, hidden)
        stored[f"{layer}.feed_forward.w2.weight"] = matrix(lanes, hidden, ffn)
    norm("model.norm")
    if not fields["tie_word_embeddings"]:
        match fields["lm_head_type"]:
            case "replicate":
                stored["lm_head.weight"] = matrix(vocab, hidden)
            case "vocab_parallel":
                stored["lm_head.weight"] = matrix(lanes, vocab // lanes, hidden)
            case "lane":
                stored["lm_head.linear.weight"] = matrix(vocab, lanes * hidden)
    return stored


def write(fields: dict[str, Any], stored: dict[str, Tensor], folder: Path) -> Path:
    """A model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(stored, folder / "model.safetensors")
    return folder


@dataclass
class LiteralLanes:
    """The model as an equation; `keys[layer][lane]` and `values` grow by one entry a token."""

    fields: dict[str, Any]
    stored: dict[str, Tensor]
    keys: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    values: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stored = {name: tensor.double() for name, tensor in self.stored.items()}
        self.lanes = self.fields["num_lanes"]
        self.delay = self.fields["broadcast_delay"]
        hidden, heads = self.fields["hidden_size"], self.fields["num_attention_heads"]
        self.head_dim = self.fields.get("head_dim") or hidden // heads

    def logits(self, ids: Tensor) -> Tensor:
        """[T, V] of a whole sequence."""
        return torch.stack([self.token(int(word), t) for t, word in enumerate(ids)])

    def token(self, word: int, position: int) -> Tensor:
        """[V] for the token at `position`; all earlier ones came before."""
        x = [self.stored["model.tok_embeddings.weight"][word].clone() for _ in range(self.lanes)]
        partials: dict[tuple[str, int], list[Tensor]] = {}
        for layer in range(self.fields["num_hidden_layers"]):
            for module in ("attention", "mlp"):
                own = []
                for lane in range(self.lanes):
                    if module == "attention":
                        h = self.norm(x[lane], f"model.layers.{layer}.attention_norm", lane)
                        own.append(self.attention(h, layer, lane, position))
                    else:
                        h = self.norm(x[lane], f"model.layers.{layer}.ffn_norm", lane)
                        own.append(self.mlp(h, layer, lane))
                partials[module, layer] = own
                for lane in range(self.lanes):
                    x[lane] = x[lane] + self.received(partials, module, layer, lane)
        return self.head(x)

    def received(
        self, partials: dict[tuple[str, int], list[Tensor]], module: str, layer: int, lane: int
    ) -> Tensor:
        """What a lane adds to its stream: 'present', 'none' or 'past'."""
        own = partials[module, layer]
        split = {"attention": "use_attention_comm", "mlp": "use_mlp_comm"}[module]
        talks = self.fields["use_comm"] if "use_comm" in self.fields else self.fields[split]
        if layer < self.delay and self.fields["use_early_comm"]:
            total = torch.zeros_like(own[lane])
            for partial in own:
                total = total + partial
            return total
        if layer < self.delay or not talks:
            return math.sqrt(self.lanes) * own[lane]
        total = own[lane].clone()
        for other in range(self.lanes):
            if other != lane:
                total = total + partials[module, layer - self.delay][other]
        return total

    def norm(self, x: Tensor, name: str, lane: int) -> Tensor:
        if self.fields["replicated_rmsn_scale"]:
            scale = self.stored[f"{name}.weight"]
        else:
            scale = self.stored[f"{name}.scale"][lane]
        return x / torch.sqrt((x * x).mean() + self.fields["norm_eps"]) * scale

    def attention(self, h: Tensor, layer: int, lane: int, position: int) -> Tensor:
        w = {
            n: self.stored[f"model.layers.{layer}.attention.{n}.weight"][lane]
            for n in ("wq", "wk", "wv", "wo")
        }
        queries = (w["wq"] @ h).reshape(-1, self.head_dim)
        keys = self.keys.setdefault((layer, lane), [])
        values = self.values.setdefault((layer, lane), [])
        keys.append(self.rotate((w["wk"] @ h).reshape(-1, self.head_dim), position))
        values.append((w["wv"] @ h).reshape(-1, self.head_dim))
        group = len(queries) // len(keys[0])
        window = self.window(layer)
        first = 0 if window is None else max(0, position - window + 1)
        mixed = []
        for q, query in enumerate(self.rotate(queries, position)):
            kv = q // group
            scores = [
                float(query @ keys[t][kv]) / math.sqrt(self.head_dim)
                for t in range(first, position + 1)
            ]
            shares = torch.softmax(torch.tensor(scores, dtype=torch.float64), 0)
            heads = torch.stack([values[t][kv] for t in range(first, position + 1)])
            mixed.append(shares @ heads)
        return w["wo"] @ torch.cat(mixed)

    def rotate(self, heads: Tensor, position: int) -> Tensor:
        """Neighbours (0, 1), (2, 3), … are complex numbers, turned by position · theta^(-2i/D)."""
        theta = self.fields["rope_theta"]
        turns = torch.tensor(
            [position * theta ** (-2 * i / self.head_dim) for i in range(self.head_dim // 2)],
            dtype=torch.float64,
        )
        numbers = torch.view_as_complex(heads.reshape(len(heads), -1, 2).contiguous())
        turned = numbers * torch.polar(torch.ones_like(turns), turns)
        return torch.view_as_real(turned).reshape(len(heads), -1)

    def window(self, layer: int) -> int | None:
        layers, slides = self.fields["num_hidden_layers"], self.fields.get("swa_layers")
        if slides is None:
            count = self.fields.get("sliding_window_n_layers", 0)
            slides = range(count) if count >= 0 else range(layers + count, layers)
            slides = set(slides) - set(self.fields.get("unclamped_layers", []))
        return self.fields["sliding_window"] if layer in slides else None

    def mlp(self, h: Tensor, layer: int, lane: int) -> Tensor:
        prefix = f"model.layers.{layer}.feed_forward"
        gate = self.stored[f"{prefix}.w1.weight"][lane] @ h
        up = self.stored[f"{prefix}.w3.weight"][lane] @ h
        return self.stored[f"{prefix}.w2.weight"][lane] @ (gate * torch.sigmoid(gate) * up)

    def head(self, x: list[Tensor]) -> Tensor:
        if self.fields["pre_norm_lane_agg"]:
            total = torch.stack(x).sum(0)
            return self.replicated_head() @ self.norm(total, "model.norm", 0)
        normed = [self.norm(stream, "model.norm", lane) for lane, stream in enumerate(x)]
        match self.fields["lm_head_type"]:
            case "replicate":
                return self.replicated_head() @ (torch.stack(normed).sum(0) / self.lanes)
            case "vocab_parallel":
                slices = self.stored["lm_head.weight"]
                return torch.cat([slices[lane] @ h for lane, h in enumerate(normed)])
            case kind:
                assert kind == "lane"
                return self.stored["lm_head.linear.weight"] @ torch.cat(normed)

    def replicated_head(self) -> Tensor:
        tied = self.fields["tie_word_embeddings"]
        return self.stored["model.tok_embeddings.weight" if tied else "lm_head.weight"]
