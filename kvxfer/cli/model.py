"""The model that a user names: one that is known by name, or a config of their own."""

from __future__ import annotations

from pathlib import Path

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.models import EXAMPLES, example, load_config


def find(model: str, flag: str) -> tuple[str, dict[str, object]]:
    """A model's short name and its config.

    :param model: the name of an example, or the path of a config.json or of its directory.
    :param flag: where it was named, for errors.
    :raises KvxferError: FIELD_INVALID where there is neither, or the file cannot be read.
    """
    if model in EXAMPLES:
        return model, example(model)
    path = Path(model)
    if not path.exists():
        raise KvxferError(
            Reason.FIELD_INVALID,
            f"{flag} {model} is neither a file nor a known name; allowed: a config.json, its directory (nothing is "
            f"downloaded), or one of {', '.join(EXAMPLES)}",
            field="model",
            value=model,
        )
    try:
        config = load_config(path)
    except KvxferError as error:
        raise KvxferError(error.reason, f"{flag}: {error.message}", field=error.field, **error.metadata) from error
    if path.is_file() and path.name != "config.json":
        return path.stem, config
    folder = path if path.is_dir() else path.parent
    return folder.resolve().name or "model", config
