"""Typed reading of `quantization_config`, with refusals that say what loads instead."""

from typing import Any

from soloist.errors import UnsupportedQuantization, WrongType
from soloist.model.reading import Fields


class QuantizationFields(Fields):
    """The fields of a quantisation; `family` is its method."""

    def unsupported(self, name: str, value: object, allowed: str) -> UnsupportedQuantization:
        """The error for a value that would change what weights mean."""
        return UnsupportedQuantization(self.file, self.path(name), value, allowed)

    def strings(self, name: str) -> list[str]:
        """A list of texts; empty where it is absent or null."""
        value = self.value(name)
        if value is None:
            return []
        if not isinstance(value, list) or any(not isinstance(entry, str) for entry in value):
            raise WrongType(self.file, self.path(name), value, "a list of names")
        return value

    def pair(self, name: str) -> tuple[int, int]:
        """Two whole numbers above 0."""
        value = self.value(name)
        if (
            not isinstance(value, list)
            or len(value) != 2
            or any(isinstance(v, bool) or not isinstance(v, int) or v < 1 for v in value)
        ):
            raise WrongType(self.file, self.path(name), value, "two whole numbers above 0")
        return value[0], value[1]

    def groups(self, name: str) -> "dict[str, QuantizationFields]":
        """Objects by name; none where the field is absent or null."""
        value = self.value(name)
        if value is None:
            return {}
        if not isinstance(value, dict) or any(not isinstance(v, dict) for v in value.values()):
            raise WrongType(self.file, self.path(name), value, "an object of objects")
        return {
            key: QuantizationFields(inner, self.file, self.family, f"{self.path(name)}.{key}.")
            for key, inner in value.items()
        }

    def inner(self, name: str) -> "QuantizationFields | None":
        """A nested object."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise WrongType(self.file, self.path(name), value, "an object")
        return QuantizationFields(value, self.file, self.family, f"{self.path(name)}.")

    def one_of(self, name: str, allowed: tuple[Any, ...], default: Any) -> Any:  # noqa: ANN401
        """A value out of `allowed`; `default` where the field is absent or null."""
        value = self.value(name)
        if value is None:
            return default
        if not any(value == one and type(value) is type(one) for one in allowed):
            raise self.unsupported(name, value, ", ".join(map(str, allowed)))
        return value
