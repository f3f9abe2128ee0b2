"""Strict, typed reading of config.json: every field is read, known to be harmless, or refused.

A family asks for its fields one by one; `refuse_rest` then names whatever nobody asked for.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from soloist.errors import (
    ConfigError,
    MissingField,
    NotAcceptable,
    UnknownField,
    UnsupportedField,
    WrongType,
)
from soloist.files import parsed_object

REQUIRED: Final = object()

# No model is that large; beyond it arithmetic on sizes and frequencies overflows.
LARGEST_INTEGER: Final = 2**31 - 1
LARGEST_NUMBER: Final = 1e15
# Published models have up to 200 layers. More than these would take seconds to describe.
MOST_LAYERS: Final = 10_000

# Fields that say who made a file or steer training, generation defaults or a framework. None of
# them changes the function that maps tokens to logits.
HARMLESS: Final = frozenset(
    """
    architectures attention_dropout _attn_implementation attn_implementation
    _attn_implementation_autoset _attn_implementation_internal auto_map bad_words_ids
    begin_suppress_tokens bos_token bos_token_id cache_implementation chunk_size_feed_forward
    cls_token_id _commit_hash decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping encoder_no_repeat_ngram_size eos_token eos_token_id
    exponential_decay_length_penalty finetuning_task _flash_attn_2_enabled forced_bos_token_id
    forced_eos_token_id gradient_checkpointing id2label initializer_range is_decoder
    is_llama_config keys_to_ignore_at_inference label2id length_penalty mask_token_id max_length
    max_sequence_length max_window_layers min_length model_max_length model_type _name_or_path
    neftune_noise_alpha no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_scores padding_side pad_token pad_token_id
    prefix pretraining_tp problem_type remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class tokenizer_model_max_length
    tokenizer_padding_side top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version trl_version typical_p unk_token_id unsloth_fixed unsloth_version
    use_bfloat16 use_cache use_flash_attention use_flash_attention_2 use_flash_attn
    """.split()  # noqa: SIM905 - one name a line would be four times as long
)

# Fields that change nothing as long as they have this value; with any other they are refused.
NEUTRAL: Final[Mapping[str, bool | float]] = {
    **dict.fromkeys(
        """
        activation_dropout attn_dropout attn_pdrop classifier_dropout dropout embd_pdrop
        embedding_dropout hidden_dropout hidden_dropout_prob mlp_dropout resid_dropout resid_pdrop
        residual_dropout
        """.split(),  # noqa: SIM905
        0.0,
    ),
    **dict.fromkeys(("embedding_multiplier", "logit_scale", "logits_scaling"), 1.0),
    "residual_multiplier": 1.0,
    "num_nextn_predict_layers": 0,
    "is_causal": True,
    **dict.fromkeys(("alibi", "lm_head_bias", "mlp_bias", "use_parallel_residual"), False),
}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        NotAFile: there is a folder, a pipe or a device in its place.
        ConfigError: not readable, not JSON, or not an object.
    """
    try:
        return parsed_object(path)
    except ValueError as error:
        raise ConfigError(
            f"{path} cannot be read as a JSON object: {error}", "download the file again"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror or error}",
            "check the path, and that you may read the file",
        ) from error


class Fields:
    """The fields of one configuration file and which of them have been asked for.

    Args:
        values: the parsed JSON object.
        file: its path, for messages.
        family: who reads, for messages.
        prefix: path of an enclosing field, for messages ('rope_scaling.').
        accepted: paths of fields that may be there although nobody knows them.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        file: str,
        family: str,
        prefix: str = "",
        accepted: Collection[str] = (),
    ) -> None:
        self._accepted = accepted
        self._passed: set[str] = set()
        self._values = values
        self._asked: set[str] = set()
        self.file = file
        self.family = family
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def names(self, name: str) -> bool:
        """Whether the field is there at all, be it as null."""
        return name in self._values

    def fill(self, defaults: Mapping[str, Any]) -> None:
        """Take these values of fields that are not there at all."""
        self._values = {**defaults, **self._values}

    def path(self, name: str) -> str:
        """The field with those around it, for messages."""
        return self._prefix + name

    def value(self, name: str) -> Any:  # noqa: ANN401
        """Whatever the field holds; None where it is absent."""
        return self._take(name, None, "")

    def integer(self, name: str, default: Any = REQUIRED, *, minimum: int = 1) -> Any:  # noqa: ANN401
        """A whole number of at least `minimum`; `default` where the field is absent or null."""
        expected = f"a whole number of at least {minimum}"
        value = self._take(name, default, expected)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self._wrong(name, value, expected)
        if value > LARGEST_INTEGER:
            raise self._wrong(name, value, f"{expected} and at most {LARGEST_INTEGER}")
        return value

    def num_layers(self) -> int:
        """How many layers the model has: 1 … `MOST_LAYERS`."""
        name = "num_hidden_layers"
        value = self.integer(name)
        if value > MOST_LAYERS:
            raise self._wrong(
                name, value, f"a whole number of at least 1 and at most {MOST_LAYERS}"
            )
        return int(value)

    def number(self, name: str, default: Any = REQUIRED, *, above: float = 0.0) -> Any:  # noqa: ANN401
        """A finite number greater than `above`."""
        expected = f"a number greater than {above:g}"
        value = self._take(name, default, expected)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, expected)
        if not above < value <= LARGEST_NUMBER:  # NaN is neither
            raise self._wrong(name, value, f"{expected} and at most {LARGEST_NUMBER:g}")
        return float(value)

    def flag(self, name: str, default: Any = REQUIRED) -> Any:  # noqa: ANN401
        """True or false."""
        value = self._take(name, default, "true or false")
        if value is not default and not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def choice(self, name: str, allowed: Sequence[str], default: Any = REQUIRED) -> Any:  # noqa: ANN401
        """One of `allowed`; any other text is refused as unsupported."""
        value = self._take(name, default, f"one of {', '.join(allowed)}")
        if value is default:
            return value
        if not isinstance(value, str):
            raise self._wrong(name, value, f"one of {', '.join(allowed)}")
        if value not in allowed:
            raise self.unsupported(name, value, ", ".join(allowed))
        return value

    def integers(self, name: str, default: Any = REQUIRED) -> Any:  # noqa: ANN401
        """A list of whole numbers of at least 0."""
        value = self._take(name, default, "a list of whole numbers")
        if value is default:
            return value
        if not isinstance(value, list) or any(
            isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in value
        ):
            raise self._wrong(name, value, "a list of whole numbers of at least 0")
        return value

    def numbers(self, name: str, length: int, meaning: str) -> tuple[float, ...]:
        """A list of `length` finite numbers greater than 0, which stand for what `meaning` says."""
        expected = f"a list of {length} numbers greater than 0, {meaning}"
        values = self._take(name, REQUIRED, expected)
        if not isinstance(values, list):
            raise self._wrong(name, values, expected)
        if len(values) != length:
            raise self._wrong(name, f"a list of {len(values)}", expected)
        for i, value in enumerate(values):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value <= LARGEST_NUMBER:  # NaN is neither
                raise self._wrong(f"{name}[{i}]", value, "a number greater than 0")
        return tuple(float(value) for value in values)

    def texts(self, name: str, length: int, allowed: Sequence[str]) -> list[str] | None:
        """A list of `length` words out of `allowed`, or None where the field is absent."""
        value = self._take(name, None, "a list")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length:
            raise self._wrong(name, value, f"a list of {length} entries")
        for entry in value:
            if entry not in allowed:
                raise self.unsupported(name, entry, ", ".join(allowed))
        return value

    def group(self, name: str) -> "Fields | None":
        """The fields of a nested object, or None where it is absent or null."""
        value = self._take(name, None, "an object")
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        inner = Fields(value, self.file, self.family, f"{self._prefix}{name}.", self._accepted)
        inner._passed = self._passed
        return inner

    def only(self, name: str, wanted: object) -> None:
        """The field must be absent, null or equal to `wanted`: nothing else is implemented."""
        value = self._take(name, None, repr(wanted))
        if value is not None and value != wanted:
            raise self.unsupported(name, value, repr(wanted))

    def ignore(self, *names: str) -> None:
        """Fields of this family that do not change its function."""
        self._asked.update(names)

    def refuse_rest(
        self,
        harmless: frozenset[str] = HARMLESS,
        neutral: Mapping[str, bool | float] = NEUTRAL,
    ) -> None:
        """Refuse, by name, a field with a value that nobody asked for.

        Args:
            harmless: fields that change nothing.
            neutral: fields that change nothing with this value.

        Raises:
            UnknownField: naming the first such field, if it is not accepted.
            UnsupportedField: naming one that is known and has another value than the neutral one.
        """
        for name, value in self._values.items():
            if name in self._asked or name in harmless or value is None:
                continue
            if name not in neutral:
                if self.path(name) not in self._accepted:
                    raise self.unknown(name, value)
                self._passed.add(self.path(name))
                continue
            wanted = neutral[name]
            if value != wanted or isinstance(value, bool) != isinstance(wanted, bool):
                raise self.unsupported(name, value, f"absent or {wanted!r}")

    def require_passed(self) -> None:
        """After everything was read: each accepted field was there and unknown.

        Raises:
            NotAcceptable: naming the first that was not.
        """
        for name in self._accepted:
            if name not in self._passed:
                raise NotAcceptable(self.file, name)

    def unknown(self, name: str, value: object) -> UnsupportedField:
        """The error for a field that nobody knows."""
        return UnknownField(self.file, self.path(name), value, self.family)

    def unsupported(self, name: str, value: object, allowed: str) -> UnsupportedField:
        """The error for a value that would change the model's function."""
        return UnsupportedField(self.file, self._prefix + name, value, allowed, self.family)

    def _take(self, name: str, default: object, expected: str) -> Any:  # noqa: ANN401
        self._asked.add(name)
        value = self._values.get(name)
        if value is None:
            if default is REQUIRED:
                raise MissingField(self.file, self._prefix + name, expected)
            return default
        return value

    def _wrong(self, name: str, value: object, expected: str) -> WrongType:
        return WrongType(self.file, self._prefix + name, value, expected)
