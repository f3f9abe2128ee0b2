"""What the host and the decode kernel give each other, field by field.

Every structure is defined here once: the host fills it as a numpy record, and spec.cuh has the
text that `Struct.cuda` makes of it. Offsets are computed by the rules of C, and the text asserts
each of them: what compiles agrees with the host. Pure: no torch, no device.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from soloist.megakernel.limits import MAX_QUERIES

MAX_STOPS = 16
# Tokens that a round may check beside the latest one.
MOST_DRAFTS = MAX_QUERIES - 1
# Sequences of a launch that drafts: with one more, no query would be left for a draft.
MOST_DRAFTING_SEQUENCES = MAX_QUERIES - 1
# A prediction, and matches of four lengths.
DRAFT_KINDS = 5

_SCALARS: dict[str, np.dtype[Any]] = {
    "u32": np.dtype(np.uint32),
    "i32": np.dtype(np.int32),
    "u64": np.dtype(np.uint64),
    "float": np.dtype(np.float32),
}


@dataclass(frozen=True, slots=True)
class Length:
    """Of an array: a constant of spec.cuh, and its value."""

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a structure.

    Attributes:
        name: on both sides.
        kind: u32, i32, u64, float, a pointer as CUDA has it, or another structure.
        meaning: with units; where it is memory, in which order it lies there.
        length: of an array; None where the field is none.
    """

    name: str
    kind: "str | Struct"
    meaning: str = ""
    length: Length | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of one element; pointers are addresses, u64."""
        if isinstance(self.kind, Struct):
            return self.kind.dtype
        return np.dtype(np.uint64) if self.kind.endswith("*") else _SCALARS[self.kind]

    @property
    def alignment(self) -> int:
        """Bytes, by the rules of C."""
        return self.kind.alignment if isinstance(self.kind, Struct) else self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Of all elements."""
        return self.dtype.itemsize * (self.length.value if self.length else 1)

    @property
    def cuda(self) -> str:
        """The declaration, with its meaning."""
        kind = self.kind.name if isinstance(self.kind, Struct) else self.kind
        length = f"[{self.length.name}]" if self.length else ""
        return f"  {kind} {self.name}{length};" + (f"  // {self.meaning}" if self.meaning else "")


@dataclass(frozen=True)
class Struct:
    """A structure of both sides.

    Attributes:
        name: in CUDA.
        meaning: who writes and who reads it.
        fields: in order.
    """

    name: str
    meaning: str
    fields: tuple[Field, ...]

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Bytes from the start to each field."""
        offsets, end = {}, 0
        for field in self.fields:
            offsets[field.name] = _aligned(end, field.alignment)
            end = offsets[field.name] + field.num_bytes
        return offsets

    @cached_property
    def alignment(self) -> int:
        """Bytes: of the field that needs most."""
        return max(field.alignment for field in self.fields)

    @cached_property
    def num_bytes(self) -> int:
        """With padding."""
        last = self.fields[-1]
        return _aligned(self.offsets[last.name] + last.num_bytes, self.alignment)

    @cached_property
    def dtype(self) -> np.dtype[np.void]:
        """The record that the host fills."""
        return np.dtype(
            {
                "names": [field.name for field in self.fields],
                "formats": [
                    (field.dtype, (field.length.value,)) if field.length else field.dtype
                    for field in self.fields
                ],
                "offsets": [self.offsets[field.name] for field in self.fields],
                "itemsize": self.num_bytes,
            }
        )

    def record(self, **values: object) -> NDArray[np.void]:
        """One structure, shape []; every field has to be given, pointers as addresses."""
        assert values.keys() == self.offsets.keys(), (
            f"{self.name}: {values.keys() ^ self.offsets.keys()}"
        )
        record = np.zeros((), self.dtype)
        for name, value in values.items():
            record[name] = value
        return record

    @property
    def cuda(self) -> str:
        """CUDA text: the structure, and that it lies as `dtype` does."""
        return "\n".join(
            [
                f"// {self.meaning}",
                f"struct {self.name} {{",
                *(field.cuda for field in self.fields),
                "};",
                f'static_assert(sizeof({self.name}) == {self.num_bytes}, "{self.name}");',
                *(
                    f'static_assert(OFFSET_OF({self.name}, {name}) == {offset}, "{name}");'
                    for name, offset in self.offsets.items()
                ),
            ]
        )


def _aligned(num_bytes: int, alignment: int) -> int:
    return math.ceil(num_bytes / alignment) * alignment


_PER_QUERY = Length("kMaxQueries", MAX_QUERIES)

QUERY_START = Struct(
    "QueryStart",
    "One query of a launch.",
    (
        Field("sequence", "i32", "row of the page tables"),
        Field("position", "i32", "of the first round"),
        Field("stride", "i32", "positions from one round to the next"),
        Field("forced", "i32", "rounds whose input token the host gives"),
        Field("num_stops", "i32"),
        Field("keep", "i32", "rounds before a stop token counts"),
        Field("stops", "u32", "token ids", Length("kMaxStops", MAX_STOPS)),
    ),
)

SAMPLE_PARAMS = Struct(
    "SampleParams",
    "How one query samples. A limit of 0 is off.",
    (
        Field("temperature", "float"),
        Field("flags", "u32", "bits kSample…"),
        Field("top_k", "u32"),
        Field("top_p_steps", "u32", "of 2^-24"),
        Field("min_p_steps", "u32", "of 2^-24"),
        Field("repetition_penalty", "float"),
        Field("frequency_penalty", "float"),
        Field("presence_penalty", "float"),
        Field("seed_low", "u32"),
        Field("seed_high", "u32"),
        Field("min_tokens", "u32"),
        Field("ban_begin", "u32", "ids that end generation: part of list_ids"),
        Field("ban_count", "u32"),
        Field("bias_begin", "u32", "part of list_ids and list_values"),
        Field("bias_count", "u32"),
        Field("history", "u32", "row of seen"),
    ),
)

SAMPLE_STEP = Struct(
    "SampleStep",
    "What changes with every token that a query samples.",
    (
        Field("position_low", "u32"),
        Field("position_high", "u32"),
        Field("num_output", "u32", "tokens so far"),
        Field("unused", "u32"),
    ),
)

LAUNCH = Struct(
    "Launch",
    "Written by the host for each launch.",
    (
        Field("queries", "u32"),
        Field("rounds", "u32"),
        Field("logits_round_stride", "u64", "values; 0 overwrites the logits in every round"),
        Field("query", QUERY_START, "", _PER_QUERY),
        Field("sampling", SAMPLE_PARAMS, "this and step: for kernels that sample", _PER_QUERY),
        Field("step", SAMPLE_STEP, "of the first round", _PER_QUERY),
    ),
)

SAMPLE_BUFFERS = Struct(
    "SampleBuffers",
    "What kernels that sample need beside the workspace.",
    (
        Field("seen", "u32*", "[query][kSampledRows]"),
        Field("adjusted", "float*", "[query][kSampledRows]"),
        Field("workspace", "u8*", "zeroed for each launch"),
        Field("list_ids", "const u32*", "of all bans and biases"),
        Field("list_values", "const float*", "biases, at the same places"),
    ),
)

MASKS = Struct(
    "Masks",
    "Host memory: what masked queries may choose. See `wait_for_masks` in ops/choose.cuh.",
    (
        Field("words", "const u32*", "[query][kVocabWords], a bit a token"),
        Field(
            "ready",
            "const u32*",
            "[query][kMaskReadyWords]: rounds whose masks are there, or kMaskEnd",
        ),
    ),
)

DEPTH = Struct(
    "Depth",
    "How often drafts of one kind are accepted, see soloist.speculation.depth.",
    (
        Field("acceptance", "u32"),
        Field("pause", "u32", "rounds of the next pause"),
        Field("left", "u32", "rounds of this one"),
        Field("best", "u32", "number of drafts"),
    ),
)

DRAFTER = Struct(
    "Drafter",
    "What a sequence's drafts depend on; every block has it, and changes it alike.",
    (
        Field("depths", DEPTH, "by kind", Length("kDraftKinds", DRAFT_KINDS)),
        Field("num_history", "u32", "tokens of prompt and answer"),
        Field("num_prompt", "u32", "of them, those of the prompt"),
        Field("num_prediction", "u32"),
        Field("num_archive", "u32"),
        Field("at", "u32", "token of the prediction that is expected next"),
        Field("is_good", "u32", "the answer follows the prediction there"),
        Field("left", "u32", "tokens that the answer may still have"),
        Field("made", "u32", "tokens of this launch"),
        Field("count", "u32", "drafted tokens that this round checks"),
        Field("kind", "u32", "of the draft"),
    ),
)

DRAFT_START = Struct(
    "DraftStart",
    "Written by the host for each sequence of a launch that drafts.",
    (
        Field("drafter", DRAFTER, "its draft stands in the launch's input tokens"),
        Field("costs", "u32", "of rounds, by drafts from 1 on", Length("kMostDrafts", MOST_DRAFTS)),
        Field("num_costs", "u32", "0 where it drafts nothing"),
        Field("looks_up", "u32", "drafts come from other texts than the prediction, too"),
        Field("num_stops", "u32"),
        Field("column", "u32", "query of the first round that has its latest token"),
        Field("history", "u32*", "with room for what the launch may make; block 0 appends"),
        Field("prediction", "const u32*"),
        Field("archive", "const u32*", "kDraftGap between two answers"),
        Field("stops", "const u32*", "tokens that end the answer, all of them"),
    ),
)

DRAFT_BUFFERS = Struct(
    "DraftBuffers",
    "What kernels that draft need beside the workspace.",
    (
        Field("starts", "const DraftStart*", "[sequence]"),
        Field("records", "uint4*", "[sequence][block], zeroed for each launch"),
        Field("drafters", "Drafter*", "[block][sequence], but for the first sequence"),
        Field("num_sequences", "u32"),
        Field("most_beside", "u32", "queries of a round in which a sequence has no draft"),
    ),
)

WHERE = Struct(
    "Where",
    "Where a block is: consumers and producer write it, the watchdog reads it.",
    (
        Field("round", "u32", "of the consumers"),
        Field("layer", "u32", "of the consumers"),
        Field("phase", "u32", "of the consumers, a Phase"),
        Field("producer_round", "u32"),
        Field("producer_layer", "u32"),
        Field("copies", "u32", "slots that the producer asked memory for"),
    ),
)

FAULT = Struct(
    "Fault",
    "Host memory: what a stuck block was doing.",
    (
        Field("code", "u32", "1 once the rest is there"),
        Field("block", "u32"),
        Field("sm", "u32"),
        Field("where", WHERE),
        Field("landed", "u32", "copies of the producer that memory has delivered"),
        Field("released", "u32", "of them, those that all consumers have read"),
        Field("missing", "u32", "of several ranks, bits of those whose data is missing"),
    ),
)


@cache
def params(ranks: int, *, drafts: bool = False, experts: bool = False) -> Struct:
    """The kernel's parameter, for a plan of so many ranks.

    Args:
        ranks: of the plan.
        drafts: of a build that drafts.
        experts: of a model that has experts.
    """
    drafting = (Field("draft", DRAFT_BUFFERS),) if drafts else ()
    of_experts = (Field("experts", "const u8*", "packed, layer by layer"),) if experts else ()
    return Struct(
        "Params",
        "The kernel's parameter. Pointers are to the GPU's memory, or as they say to the host's.",
        (
            Field("image", "const u8*", "packed weights"),
            Field("vectors", "const float*", "norm weights and biases"),
            Field("embedding", "const u16*", "[V][H] row-major, or null where the head is tied"),
            Field("pool", "u16*", "KV pages"),
            Field("page_tables", "const i32*", "[sequence][page]"),
            Field("rope", "const float2*", "[position][D / 2] cosine, sine"),
            Field("workspace", "u8*", "exchange buffers"),
            Field("logits", "float*", "[query][kVocabRows], of all lanes here"),
            Field("forced", "const u32*", "[query][rounds] input tokens"),
            Field("launch", "const Launch*"),
            Field("emitted", "u32*", "host: [round][query]"),
            Field("progress", "u32*", "host: rounds emitted"),
            Field("yield_requested", "const u32*", "host: wish to stop at the next round"),
            Field("fault", "Fault*", "host"),
            Field(
                "trace",
                "u64*",
                "[block][kTraceWords] of the traced round; trace.py knows their order",
            ),
            Field("page_values", "u64", "of one page over all layers"),
            Field("page_table_stride", "u32", "pages"),
            Field("embedding_scale", "float", "1 / root mean square of the embedding"),
            Field("sample", SAMPLE_BUFFERS),
            Field("rank", "u32"),
            Field(
                "peers", "u8*", "every rank's workspace, this one's included",
                Length("kPeers", ranks),
            ),
            Field("masks", MASKS, "for kernels that sample"),
            *drafting,
            *of_experts,
        ),
    )  # fmt: skip


def structs(ranks: int, *, drafts: bool = False, experts: bool = False) -> tuple[Struct, ...]:
    """All of them, each after those that it has; arguments as of `params`."""
    return (
        SAMPLE_PARAMS, SAMPLE_STEP, QUERY_START, LAUNCH, SAMPLE_BUFFERS, MASKS, WHERE, FAULT,
        DEPTH, DRAFTER, DRAFT_START, DRAFT_BUFFERS, params(ranks, drafts=drafts, experts=experts),
    )  # fmt: skip


def enumeration(name: str, members: Iterable[str]) -> str:
    """CUDA text of an enum whose values count from 0; 'gate_up' becomes kGateUp."""
    values = ", ".join(
        "k" + "".join(part.capitalize() for part in member.split("_")) for member in members
    )
    return f"enum class {name} : u32 {{ {values} }};"
