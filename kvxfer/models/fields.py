"""Reading a Hugging Face ``config.json``: every value is checked, every error names its key.

A :class:`Fields` wraps the parsed JSON.  Families ask it for the few keys that they need and get plain, bounded values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvxfer.core.errors import KvxferError, Reason

#: Largest width, head count or channel count that is believed.
MAX_WIDTH: Final = 2**24
#: Most layers that a model may have.
MAX_LAYERS: Final = 16_384
#: Most bytes of a config file that are read.
MAX_CONFIG_BYTES: Final = 16 * 2**20
#: Where multi-modal configs keep the language model's own.
_NESTED: Final = ("text_config", "llm_config", "language_config")

#: Both spellings of the model's data type.
_DTYPE: Final = {"torch_dtype", "dtype"}

Config = Mapping[str, object]


def field_error(key: str, value: object, allowed: str) -> KvxferError:
    """A FIELD_INVALID error: which key, what it was, what is allowed."""
    shown = repr(value)[:120]
    return KvxferError(
        Reason.FIELD_INVALID, f"{key} is {shown}; allowed: {allowed}", field=key, key=key, value=shown, allowed=allowed
    )


def check_int(key: str, value: object, low: int, high: int) -> int:
    """``value`` if it is an integer of ``[low, high]``.

    :raises KvxferError: FIELD_INVALID.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise field_error(key, value, f"an integer from {low} to {high}")
    return value


def load_config(source: Config | str | Path) -> dict[str, object]:
    """The config as a dictionary: a copy of a mapping, or a ``config.json`` (or the directory that holds it).

    :raises KvxferError: FIELD_INVALID if it cannot be read, is no JSON object or is larger than 16 MiB.
    """
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    try:
        if path.is_dir():
            path = path / "config.json"
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise field_error("config", str(path), f"a file of at most {MAX_CONFIG_BYTES} bytes")
        parsed: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise field_error("config", str(path), f"a readable JSON file ({type(error).__name__}: {error})") from error
    if not isinstance(parsed, dict):
        raise field_error("config", str(path), "a JSON object")
    return parsed


class Fields:
    """Typed access to a config's keys."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def get(self, key: str) -> object:
        """The raw value; ``None`` where the key is absent or null."""
        return self._config.get(key)

    def copy(self) -> dict[str, object]:
        """All keys, as a new dictionary."""
        return dict(self._config)

    def nested(self) -> Fields | None:
        """The language model's part of a multi-modal config, if there is one; its data type may stand outside."""
        for key in _NESTED:
            inner = self._config.get(key)
            if isinstance(inner, Mapping):
                outside = {} if _DTYPE & inner.keys() else {key: self._config.get(key) for key in _DTYPE}
                return Fields({**outside, **inner})
        return None

    def integer(self, *keys: str, default: int | None = None, low: int = 1, high: int = MAX_WIDTH) -> int:
        """The first of ``keys`` that is present, else ``default``.

        :raises KvxferError: FIELD_INVALID if the key is missing without a default, no integer, or out of bounds.
        """
        for key in keys:
            value = self.get(key)
            if value is not None:
                return check_int(key, value, low, high)
        if default is None:
            also = f" (or {', '.join(keys[1:])})" if len(keys) > 1 else ""
            raise field_error(keys[0], None, f"a required integer from {low} to {high}{also}")
        return default

    def text(self, *keys: str, default: str | None = None) -> str:
        """The first of ``keys`` that is present, else ``default``.

        :raises KvxferError: FIELD_INVALID if missing without a default, or no string.
        """
        for key in keys:
            value = self.get(key)
            if value is not None:
                if not isinstance(value, str):
                    raise field_error(key, value, "a string")
                return value
        if default is None:
            raise field_error(keys[0], None, "a required string")
        return default

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty where the key is absent.

        :raises KvxferError: FIELD_INVALID if it is anything else, or longer than any model is deep.
        """
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, (list, tuple)) or len(value) > MAX_LAYERS:
            raise field_error(key, value, f"a list of at most {MAX_LAYERS} strings")
        for item in value:
            if not isinstance(item, str):
                raise field_error(key, item, "a list of strings")
        return tuple(value)

    def integers(self, key: str, low: int = 0, high: int = MAX_LAYERS) -> tuple[int, ...]:
        """A list of integers; empty where the key is absent.

        :raises KvxferError: FIELD_INVALID if it is anything else, or longer than any model is deep.
        """
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, (list, tuple)) or len(value) > MAX_LAYERS:
            raise field_error(key, value, f"a list of at most {MAX_LAYERS} integers")
        return tuple(check_int(key, item, low, high) for item in value)

    def kinds(self, key: str, known: Mapping[str, str]) -> tuple[str, ...]:
        """What each layer is, from a list with one entry a layer; empty where the key is absent.

        :param known: the words that the list may have, and what they mean.  Configs that Transformers 5 has written say
            ``linear_attention`` and ``full_attention`` where older ones say ``mamba`` and ``attention``.
        :raises KvxferError: FIELD_INVALID for another word, or a length that is not ``num_hidden_layers``.
        """
        listed = self.texts(key)
        for item in listed:
            if item not in known:
                raise field_error(key, item, ", ".join(known))
        depth = self.integer("num_hidden_layers", default=max(1, len(listed)), high=MAX_LAYERS)
        if listed and len(listed) != depth:
            raise field_error("num_hidden_layers", depth, f"the length of {key}, {len(listed)}")
        return tuple(known[item] for item in listed)

    def part(self, key: str) -> Fields | None:
        """A config inside this one, if it is there.

        :raises KvxferError: FIELD_INVALID if it is no JSON object.
        """
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise field_error(key, value, "a JSON object")
        return Fields(value)

    def layers(self) -> int:
        """``num_hidden_layers``."""
        return self.integer("num_hidden_layers", high=MAX_LAYERS)

    def head_dim(self) -> int:
        """``head_dim``, else ``hidden_size / num_attention_heads``.

        :raises KvxferError: FIELD_INVALID if it cannot be told.
        """
        if self.get("head_dim") is not None or self.get("attention_head_dim") is not None:
            return self.integer("head_dim", "attention_head_dim")
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        if hidden % heads:
            raise field_error("hidden_size", hidden, f"a multiple of num_attention_heads ({heads}), or set head_dim")
        return hidden // heads

    def kv_heads(self) -> int:
        """``num_key_value_heads``, else ``num_attention_heads``."""
        return self.integer("num_key_value_heads", "num_attention_heads")

    def attention_heads(self) -> int:
        """``num_attention_heads``, 0 if not said."""
        return self.integer("num_attention_heads", default=0)

    def dtype(self) -> str:
        """The model's own data type (``torch_dtype`` or ``dtype``), bfloat16 if not said."""
        return self.text("torch_dtype", "dtype", default="bfloat16")
