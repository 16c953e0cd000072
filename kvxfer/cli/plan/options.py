"""The options that describe an engine, three of each: for both sides, for P, for D.

One table says them all, so that ``--tp``, ``--p-tp`` and ``--d-tp`` cannot drift apart.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.models import EXAMPLES, EngineOptions

#: The status of a command that was given something that cannot be.
BAD_INPUT: Final = 2


@dataclass(frozen=True, slots=True)
class Knob:
    """An option of an engine.

    :param flag: without dashes: ``tp`` makes ``--tp``, ``--p-tp`` and ``--d-tp``.
    :param field: of :class:`~kvxfer.models.EngineOptions`, or ``model``.
    """

    flag: str
    field: str
    kind: type
    help: str
    default: str = ""

    @property
    def parameter(self) -> str:
        """The name of its parameter, without a side."""
        return self.flag.replace("-", "_")


KNOBS: Final = (
    Knob("model", "model", str, f"A config.json (or its directory), or one of {', '.join(EXAMPLES)}."),
    Knob("tp", "tp_size", int, "Tensor-parallel ranks.", "1"),
    Knob("pp", "pp_size", int, "Pipeline stages.", "1"),
    Knob("block-tokens", "block_tokens", int, "Tokens in a kernel block.", "16"),
    Knob(
        "logical-block-tokens",
        "logical_block_tokens",
        int,
        "Block size given to the engine; logical blocks are a multiple of it.",
        "as small as possible",
    ),
    Knob(
        "state-align-tokens",
        "state_align_tokens",
        int,
        "Scan chunk, where snapshots are kept at block boundaries (128 for Nemotron 3).",
        "none are",
    ),
    Knob("kv-dtype", "kv_dtype", str, "Type of K and V: auto, bf16, fp8, ...", "auto: the model's"),
    Knob("conv-dtype", "conv_dtype", str, "Type of conv states.", "auto: the model's"),
    Knob("state-dtype", "ssm_dtype", str, "Type of recurrent states.", "auto: the config's, else float32"),
    Knob("conv-layout", "conv_layout", str, "DS (channels, rows) or SD (rows, channels).", "DS"),
    Knob("kv-layout", "kv_layout", str, "HND (heads, tokens, content) or NHD (tokens, heads, content).", "HND"),
    Knob("kv-packing", "kv_packing", str, "How K and V lie: packed, block, halves or regions.", "packed"),
    Knob("pooled", "pooled", bool, "Whether groups share tensors, as hybrid allocators do.", "pooled"),
    Knob("spec-tokens", "spec_tokens", int, "Speculative tokens; each adds a row to conv states.", "0"),
)
#: What to do about a model of which nothing is known.
_OTHER_FAMILIES: Final = (
    "; of any model kvxfer plan takes the layouts that its engine registers (--p-layout, --d-layout)"
)
_PANELS: Final = {"": "Both engines", "p": "The prefill engine (P) only", "d": "The decode engine (D) only"}


@dataclass(frozen=True)
class Chosen:
    """What the user said of one side.

    :param model: name or path; empty where none was given.
    :param options: fields of :class:`~kvxfer.models.EngineOptions`.
    :param flags: for each field the flag that it came from, or the one to give.
    :param own: flags that were given for this side alone.
    """

    side: str
    model: str
    options: Mapping[str, Any]
    flags: Mapping[str, str]
    own: tuple[str, ...]

    def engine_options(self) -> EngineOptions:
        """The preset's options.

        :raises KvxferError: FIELD_INVALID, naming the flag.
        """
        with self.naming_flags():
            return EngineOptions(**self.options)

    def naming_flags(self) -> _Naming:
        """A context in which errors about a field say which flag it came from."""
        return _Naming(self)


class _Naming:
    def __init__(self, chosen: Chosen) -> None:
        self._chosen = chosen

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        if isinstance(error, KvxferError):
            # What is no option is a key of the model's config.
            flag = self._chosen.flags.get(error.field, self._chosen.flags["model"])
            values = {**error.metadata, "side": self._chosen.side}
            other = _OTHER_FAMILIES if error.field == "model_type" else ""
            raise KvxferError(error.reason, f"{flag}: {error.message}{other}", field=error.field, **values) from error


def engine_options(*, without: Sequence[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of :data:`KNOBS` for both sides; it takes them as ``**values``.

    :param without: flags that the command has in a way of its own, or not at all.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        added = list(_parameters(without))
        setattr(command, "__signature__", signature.replace(parameters=[*own, *added]))  # noqa: B010 - mypy knows no such attribute
        command.__annotations__ = {p.name: p.annotation for p in (*own, *added)}
        return command

    return decorate


def _parameters(without: Sequence[str]) -> Iterator[inspect.Parameter]:
    for side, panel in _PANELS.items():
        for knob in KNOBS:
            if knob.flag in without:
                continue
            flag = f"--{side}-{knob.flag}" if side else f"--{knob.flag}"
            declared = f"{flag}/{flag.replace(knob.flag, f'no-{knob.flag}')}" if knob.kind is bool else flag
            told = knob.help if not side else f"As --{knob.flag}, of this side."
            default = knob.default if knob.default and not side else False
            option = typer.Option(declared, help=told, show_default=default, rich_help_panel=panel)
            yield inspect.Parameter(
                f"{side}_{knob.parameter}" if side else knob.parameter,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[knob.kind | None, option],
            )


def chosen(side: str, values: Mapping[str, Any], **fixed: Any) -> Chosen:
    """What was said of side ``P`` or ``D``: its own options, then those of both.

    :param fixed: fields that the command sets itself.
    """
    letter = side.lower()
    options: dict[str, Any] = dict(fixed)
    flags: dict[str, str] = {}
    own = []
    for knob in KNOBS:
        mine, both = values.get(f"{letter}_{knob.parameter}"), values.get(knob.parameter)
        flags[knob.field] = f"--{letter}-{knob.flag}" if mine is not None else f"--{knob.flag}"
        if mine is not None:
            own.append(f"--{letter}-{knob.flag}")
        if mine is not None or both is not None:
            options[knob.field] = both if mine is None else mine
    return Chosen(side, options.pop("model", ""), options, flags, tuple(own))


def bad(field: str, message: str, **values: object) -> KvxferError:
    """A FIELD_INVALID error about a flag."""
    return KvxferError(Reason.FIELD_INVALID, message, field=field, **values)
