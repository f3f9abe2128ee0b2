"""Reads the JSON files of a model folder and the special tokens they name.

Special tokens are written in up to four places that overrule each other; this file knows the order.
It knows nothing of how text becomes tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from soloist.errors import TokenizerError, WrongType, quoted, shortened
from soloist.files import is_there, parsed_object, require_file
from soloist.gguf.names import is_gguf

_STANDARD_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_MATCHING_RULES = ("single_word", "lstrip", "rstrip", "normalized", "special")
_EXTRA_LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens of one model folder.

    Attributes:
        named: token by name: `bos_token`, `eos_token`, ….
        extra: further special tokens, without a name.
        added: tokens listed with their id outside of tokenizer.json, special or not.
    """

    named: Mapping[str, AddedToken]
    extra: tuple[AddedToken, ...]
    added: Mapping[int, AddedToken]

    @property
    def texts(self) -> dict[str, str]:
        """The text of each named token, as chat templates see it."""
        return {name: token.content for name, token in self.named.items()}


def require_readable(path: Path) -> None:
    """Refuse what is no file, or one that cannot be opened."""
    try:
        require_file(path)
        with path.open("rb"):
            return
    except OSError as error:
        raise _unreadable(path, error) from error


def read_text(path: Path) -> str:
    """The text of a file that exists; refuses one that is not UTF-8, and what is no file."""
    require_readable(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _damaged(path, f"byte {error.start} is not UTF-8") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no such file; refuses anything else."""
    if not is_there(path):
        return {}
    try:
        return parsed_object(path)
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Special tokens from tokenizer_config.json and the older files beside it.

    A config with `added_tokens_decoder` stands alone. Older checkpoints lack it; there
    special_tokens_map.json overrules the config, and added_tokens.json gives further ids.
    """
    config_path = folder / "tokenizer_config.json"
    fields = read_json(config_path)
    listed = fields.get("added_tokens_decoder")
    if listed is not None:
        return _special_tokens(fields, _added_tokens(listed, config_path), config_path)
    map_path = folder / "special_tokens_map.json"
    fields = fields | read_json(map_path)
    special = _special_tokens(fields, {}, config_path)
    texts = {token.content for token in (*special.named.values(), *special.extra)}
    added = {
        token_id: AddedToken(content, special=content in texts, normalized=content not in texts)
        for content, token_id in read_json(folder / "added_tokens.json").items()
    }
    return SpecialTokens(special.named, special.extra, added)


def read_eos_ids(folder: Path, vocab_size: int | None = None) -> frozenset[int]:
    """Ids that end generation: generation_config.json, else config.json, else none.

    Where config.json has the language model in `text_config`, they may be there.

    Args:
        folder: of the model, or its GGUF file.
        vocab_size: V; None where it is not known.

    Raises:
        WrongType: they are no token ids, or none of this vocabulary.
    """
    if is_gguf(folder):
        from soloist.text.gguf.vocabulary import read_vocabulary

        return read_vocabulary(folder).ending_ids
    expected = "a token id or a list of them"
    if vocab_size is not None:
        expected += f", each below the vocabulary's size of {vocab_size}"
    fields = {name: read_json(folder / name) for name in ("generation_config.json", "config.json")}
    text = fields["config.json"].get("text_config")
    places = [(name, "", values) for name, values in fields.items()]
    if isinstance(text, dict):
        places.append(("config.json", "text_config.", text))
    for name, prefix, values in places:
        value = values.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(
            type(token_id) is int
            and token_id >= 0
            and (vocab_size is None or token_id < vocab_size)
            for token_id in ids
        ):
            raise WrongType(str(folder / name), f"{prefix}eos_token_id", value, expected)
        return frozenset(ids)
    return frozenset()


def read_default_tokens(folder: Path) -> int | None:
    """Most new tokens where nobody asks for a number, by generation_config.json; None without.

    Raises:
        WrongType: the file has something else than a positive whole number.
    """
    file = folder / "generation_config.json"
    value = read_json(file).get("max_new_tokens")
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise WrongType(str(file), "max_new_tokens", value, "a whole number from 1 on")
    return value


def _special_tokens(
    fields: Mapping[str, Any], added: Mapping[int, AddedToken], path: Path
) -> SpecialTokens:
    named = {
        key: _special_token(value, key, path)
        for key, value in fields.items()
        if (key in _STANDARD_NAMES and value is not None)
        or (key.endswith("_token") and isinstance(value, str | dict))
    }
    extra: list[AddedToken] = []
    for key in _EXTRA_LISTS:
        value = fields.get(key) or ()
        if isinstance(value, dict):
            named |= {
                name: _special_token(token, f"{key}.{name}", path) for name, token in value.items()
            }
        elif isinstance(value, list | tuple):
            extra += [_special_token(token, key, path) for token in value]
        else:
            raise _damaged(
                path, f"field {quoted(key)} is {shortened(value)}, expected a list of tokens"
            )
    return SpecialTokens(named, tuple(extra), added)


def _added_tokens(listed: Mapping[str, Any], path: Path) -> dict[int, AddedToken]:
    try:
        return {int(token_id): _added_token(rules) for token_id, rules in dict(listed).items()}
    except (TypeError, ValueError, LookupError) as error:
        raise _damaged(path, f"field 'added_tokens_decoder' cannot be read: {error}") from error


def _added_token(rules: Mapping[str, Any]) -> AddedToken:
    known = {name: rules[name] for name in _MATCHING_RULES if name in rules}
    return AddedToken(rules["content"], **known)


def _special_token(token: object, key: str, path: Path) -> AddedToken:
    rules = token if isinstance(token, dict) else {"content": token}
    if not isinstance(rules.get("content"), str):
        raise _damaged(
            path,
            f"field {quoted(key)} is {shortened(token)}, expected a token's text or its rules",
        )
    return _added_token(rules | {"special": True})


def _unreadable(path: Path, error: OSError) -> TokenizerError:
    return TokenizerError(
        f"{path} cannot be read: {error.strerror or error}", "check that you may read the file"
    )


def _damaged(path: Path, detail: str) -> TokenizerError:
    return TokenizerError(f"{path} is damaged: {detail}", "download the file again")
