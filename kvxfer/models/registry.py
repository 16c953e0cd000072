"""The families that are known, and which one a config belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvxfer.models.fields import Fields, field_error
from kvxfer.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Family:
    """A model family.

    :param name: for people.
    :param model_types: values of ``model_type`` that it covers.
    :param architectures: values of ``architectures`` that it covers, for configs without a known ``model_type``.
    :param read: turns a config into the model's caches.
    :param widths: keys that :func:`~kvxfer.models.scale_down` may divide without changing how anything is sharded.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    read: Callable[[Fields], ModelSpec]
    widths: tuple[str, ...] = ()


_FAMILIES: list[Family] = []


def register(family: Family) -> Family:
    """Make a family known.

    :raises ValueError: if one of its model types or architectures is taken.
    """
    for other in _FAMILIES:
        for mine, theirs in ((family.model_types, other.model_types), (family.architectures, other.architectures)):
            if taken := set(mine) & set(theirs):
                raise ValueError(f"{sorted(taken)} belong to {other.name} already")
    _FAMILIES.append(family)
    return family


def families() -> Iterator[Family]:
    """Every family, in the order of registration."""
    return iter(tuple(_FAMILIES))


def family_of(fields: Fields) -> tuple[Family, Fields]:
    """The family of a config, and the part of the config that it reads.

    The language model's part of a multi-modal config is used where the whole has no family.

    :raises KvxferError: FIELD_INVALID, listing what is known.
    """
    for part in (fields, fields.nested()):
        if part is None:
            continue
        model_type = part.text("model_type", default="")
        architectures = part.texts("architectures")
        for family in _FAMILIES:
            if model_type in family.model_types:
                return family, part
        for family in _FAMILIES:
            if set(architectures) & set(family.architectures):
                return family, part
    known = ", ".join(sorted(name for family in _FAMILIES for name in family.model_types))
    inner = fields.nested()
    shown = [part.get("model_type") or part.get("architectures") for part in (fields, inner) if part is not None]
    raise field_error(
        "model_type",
        shown[0] if inner is None else f"{shown[0]} (inside: {shown[1]})",
        f"{known}; a family can be added (docs/how-to/add-a-model.md)",
    )
