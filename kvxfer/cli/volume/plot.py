"""Transfer volume against prompt length, as a figure: a panel for each pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvxfer.cli.plan.figures import fit_text, new_figure
from kvxfer.cli.volume.output import Series
from kvxfer.models.options import resolve_dtype

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PADDED, _WHOLE, _READ = "#d1495b", "#edae49", "#00798c"
_MB: Final = 1e6


def draw(found: Sequence[Series]) -> Figure:
    """Draw volumes: one panel for each pair, all with one scale."""
    width = 1.2 + 5.4 * len(found)
    figure = new_figure(width, 4.9)
    top = max(volume.largest.padded for series in found for volume in series.curve) / _MB * 1.06
    first = found[0]
    name = first.p.name if first.p.name == first.d.name else f"{first.p.name} and {first.d.name}"
    title = f"{name}: P TP {first.p.tp_size} to D TP {first.d.tp_size}, transfer volume"
    fit_text(figure, figure.text(0.85 / width, 0.945, title, fontsize=13, fontweight="bold", va="center"))
    for i, series in enumerate(found):
        axes = figure.add_axes(((0.85 + 5.4 * i) / width, 0.125, 4.75 / width, 0.70))
        _panel(axes, series, top)
        if i == 0:
            axes.set_ylabel("MB per rank and request (1 MB = 1,000,000 bytes)")
    return figure


def _panel(axes: Axes, series: Series, top: float) -> None:
    tokens = [volume.tokens for volume in series.curve]
    ranks = [volume.largest for volume in series.curve]
    padded = [rank.padded / _MB for rank in ranks]
    whole = [rank.whole_blocks / _MB for rank in ranks]
    read = [rank.read / _MB for rank in ranks]
    axes.plot(tokens, padded, color=_PADDED, linewidth=1.6, label="whole padded pages")
    axes.plot(tokens, whole, color=_WHOLE, linewidth=1.4, linestyle="--", label="whole blocks, no padding")
    axes.plot(tokens, read, color=_READ, linewidth=1.8, label="what kvxfer reads")
    axes.fill_between(tokens, read, padded, color=_PADDED, alpha=0.10, linewidth=0)
    axes.set_ylim(0, top)
    axes.set_xlim(0, tokens[-1])
    axes.set_xlabel("prompt length, tokens")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
    axes.grid(True, color="#e8e8e8", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8.5)
    own = series.d.options
    model = series.d.spec
    dtype = resolve_dtype("kv_dtype", series.dtype, model.dtype if model else "")[0]
    blocks = max((g.block_tokens for g in next(iter(series.d.layouts.values())).groups), default=0)
    told = f", blocks of {blocks:,} tokens" if own is not None and blocks else ""
    axes.set_title(f"KV {dtype}{told}", loc="left", fontsize=10.5)
    saved = sorted({rank.padding for rank in ranks})
    if len(saved) == 1:
        axes.text(
            0.985,
            0.045,
            f"padding not read: {saved[0]:,} bytes at every length",
            transform=axes.transAxes,
            ha="right",
            fontsize=9,
            color="#333333",
        )
    axes.legend(loc="upper left", frameon=False, fontsize=9)
