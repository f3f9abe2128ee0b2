"""What adapter_config.json says of a LoRA: which modules it changes, and how strongly. Pure.

The fields are those of `LoraConfig` in the package peft. What they mean is defined by its code and
by three papers: LoRA (arXiv 2106.09685), its rank-stabilised scale (arXiv 2312.03732) and DoRA
(arXiv 2402.09353). A field that would change the merged weights in another way is refused.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from soloist.errors import UnsupportedAdapter, WrongType
from soloist.model.quantization.patterns import compile_bounded
from soloist.model.reading import Fields, read_json

# Fields that say who made the file, how it was trained or how factors began. `ensure_weight_tying`
# only acts on an embedding that is also the head, which no adapter may change here.
_MADE: Final = frozenset(
    """
    auto_mapping corda_config ensure_weight_tying eva_config inference_mode loftq_config
    lora_dropout lora_ga_config megatron_core peft_version qalora_group_size revision
    runtime_config task_type
    """.split()  # noqa: SIM905 - one name a line would be four times as long
)

# Ways to begin that leave the model's own weights as they are; all others change those too.
_BEGINNINGS: Final = (True, False, "gaussian", "eva", "orthogonal", "mica")
_ALL_LINEAR: Final = "all-linear"

# Where a module's name has the number of its layer.
_LAYER: Final = r".*?\.[^.]*\.(?P<number>\d+)\."


@dataclass(frozen=True, slots=True)
class Targets:
    """Which modules have factors.

    Attributes:
        names: of modules, or ends of names behind a dot.
        pattern: instead, of whole names.
        all_linear: instead, all matrices of the layers.
        excluded: likewise of modules that have none in spite of it: names and ends.
        excluded_pattern: the same as a pattern.
        layers: numbers of the layers that `names` mean; None means all.
        layer_numbers: patterns that find a layer's number in a name.
    """

    names: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    all_linear: bool = False
    excluded: tuple[str, ...] = ()
    excluded_pattern: re.Pattern[str] | None = None
    layers: frozenset[int] | None = None
    layer_numbers: tuple[re.Pattern[str], ...] = ()

    def cover(self, module: str, *, is_in_layer: bool) -> bool:
        """Whether a module is one of them; `is_in_layer` tells a matrix of a layer."""
        if any(ends_with(module, name) for name in self.excluded):
            return False
        if self.excluded_pattern is not None and self.excluded_pattern.fullmatch(module):
            return False
        if self.all_linear:
            return is_in_layer
        if self.pattern is not None:
            return self.pattern.fullmatch(module) is not None
        if module in self.names:
            return True
        return any(ends_with(module, name) for name in self.names) and self._in_layers(module)

    def _in_layers(self, module: str) -> bool:
        if self.layers is None:
            return True
        found = (pattern.match(module) for pattern in self.layer_numbers)
        number = next((int(match["number"]) for match in found if match is not None), None)
        return number in self.layers


@dataclass(frozen=True, slots=True)
class Lora:
    """What a LoRA's configuration says.

    Attributes:
        file: where.
        base: the model that it was trained on, as the file names it; else empty.
        targets: which modules have factors.
        is_decomposed: DoRA: rows of the merged matrix get lengths of their own.
        saved: ends of names of modules that were trained as a whole.
    """

    file: str
    base: str
    targets: Targets
    is_decomposed: bool
    saved: tuple[str, ...]
    _rank: int
    _alpha: float
    _is_stabilised: bool
    _ranks: tuple[tuple[re.Pattern[str], int], ...]
    _alphas: tuple[tuple[re.Pattern[str], float], ...]

    def rank(self, module: str) -> int:
        """Rows of A and columns of B."""
        return next((rank for key, rank in self._ranks if key.match(module)), self._rank)

    def scale(self, module: str) -> float:
        """What B · A is multiplied by."""
        alpha = next((alpha for key, alpha in self._alphas if key.match(module)), self._alpha)
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self._is_stabilised else rank)


def read_lora(path: Path) -> Lora:
    """The LoRA that an `adapter_config.json` describes.

    Raises:
        UnsupportedAdapter: it is of another kind, or has a field that is not implemented.
        ConfigError: the file is damaged, or a field is missing or mistyped.
    """
    fields = _AdapterFields(read_json(path), str(path), "adapter")
    fields.choice("peft_type", ("LORA",))
    for name in ("fan_in_fan_out", "lora_bias"):
        fields.only(name, wanted=False)
    fields.only("bias", "none")
    fields.one_of("init_lora_weights", _BEGINNINGS)
    base = fields.value("base_model_name_or_path")
    lora = Lora(
        str(path),
        base if isinstance(base, str) else "",
        _targets(fields),
        is_decomposed=fields.flag("use_dora", default=False),
        saved=fields.names_or_none("modules_to_save") or (),
        _rank=fields.integer("r"),
        _alpha=fields.number("lora_alpha"),
        _is_stabilised=fields.flag("use_rslora", default=False),
        _ranks=fields.by_pattern("rank_pattern", "integer"),
        _alphas=fields.by_pattern("alpha_pattern", "number"),
    )
    fields.refuse_rest()
    return lora


def ends_with(module: str, name: str) -> bool:
    """Whether a module has this name, or one that ends with it behind a dot."""
    return module == name or module.endswith(f".{name}")


def _targets(fields: "_AdapterFields") -> Targets:
    given = fields.value("target_modules")
    excluded = fields.value("exclude_modules")
    layers, numbers = _layers(fields)
    is_list = not isinstance(given, str)
    if not is_list and layers is not None:
        raise fields.unsupported(
            "layers_to_transform", sorted(layers), "absent where target_modules is a pattern"
        )
    is_all = not is_list and given.lower() == _ALL_LINEAR
    return Targets(
        names=fields.required_names("target_modules") if is_list else (),
        pattern=None if is_list or is_all else fields.pattern("target_modules", given),
        all_linear=is_all,
        excluded=() if isinstance(excluded, str) else fields.names_or_none("exclude_modules") or (),
        excluded_pattern=fields.pattern("exclude_modules", excluded)
        if isinstance(excluded, str)
        else None,
        layers=layers,
        layer_numbers=numbers,
    )


def _layers(
    fields: "_AdapterFields",
) -> tuple[frozenset[int] | None, tuple[re.Pattern[str], ...]]:
    """Layers by number, and patterns that find a layer's number in a name."""
    given, name = fields.value("layers_to_transform"), "layers_pattern"
    inside = fields.value(name)
    found = [inside] if isinstance(inside, str) else fields.names_or_none(name) or ()
    patterns = [rf"(?:^|.*?\.){one}\.(?P<number>\d+)\." for one in found if one] or [_LAYER]
    numbers = tuple(fields.pattern(name, pattern) for pattern in patterns)
    if isinstance(given, int) and not isinstance(given, bool):
        return frozenset((given,)), numbers
    listed = fields.integers("layers_to_transform", None)
    return frozenset(listed) if listed else None, numbers


class _AdapterFields(Fields):
    """The fields of an adapter's configuration."""

    def refuse_rest(
        self,
        harmless: frozenset[str] = _MADE,
        neutral: Mapping[str, bool | float] = MappingProxyType({}),
    ) -> None:
        """Refuse, by name, what nobody asked for and is not empty.

        peft adds a field for each new kind of LoRA, and writes an empty one where it is not used.

        Raises:
            UnsupportedAdapter: naming the first such field.
        """
        empty = {n for n, v in self._values.items() if v is False or v in ("", [], {})}
        super().refuse_rest(harmless | empty, neutral)

    def unsupported(self, name: str, value: object, allowed: str) -> UnsupportedAdapter:
        """The error for a value that would change what is merged."""
        return UnsupportedAdapter(self.file, self.path(name), value, allowed)

    def unknown(self, name: str, value: object) -> UnsupportedAdapter:
        """The error for a field that nobody knows; none is accepted."""
        return self.unsupported(name, value, "absent or null")

    def one_of(self, name: str, allowed: tuple[object, ...]) -> None:
        """The field must be absent, null, or one of these values."""
        value = self.value(name)
        if value is not None and not any(value == v and type(value) is type(v) for v in allowed):
            raise self.unsupported(name, value, ", ".join(map(repr, allowed)))

    def names_or_none(self, name: str) -> tuple[str, ...] | None:
        """A list of names; None where it is absent, null or empty."""
        value = self.value(name)
        if not value:
            return None
        if not isinstance(value, list) or any(not isinstance(one, str) for one in value):
            raise self._wrong(name, value, "a list of names")
        return tuple(value)

    def required_names(self, name: str) -> tuple[str, ...]:
        """A list of at least one name."""
        found = self.names_or_none(name)
        if found is None:
            raise self._wrong(name, self.value(name), "a list of names, a pattern or 'all-linear'")
        return found

    def pattern(self, name: str, given: str) -> re.Pattern[str]:
        """A regular expression out of a field.

        Raises:
            WrongType: it is none, or one that may take long.
        """
        try:
            return compile_bounded(given)
        except ValueError as error:
            told = f"a regular expression ({error})"
            raise WrongType(self.file, self.path(name), given, told) from error

    def by_pattern(self, name: str, kind: str) -> tuple[tuple[re.Pattern[str], Any], ...]:
        """Numbers of modules whose names end with a pattern; the first that matches counts.

        Args:
            name: of the field.
            kind: 'integer' or 'number', a method that reads the values.
        """
        inner = self.group(name)
        if inner is None:
            return ()
        return tuple(
            (self.pattern(name, rf"(?:.*\.)?(?:{key})$"), getattr(inner, kind)(key))
            for key in self.value(name)
        )
