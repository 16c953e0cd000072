"""The page map as a figure.

From top to bottom: a closer look at the first view, the first view, the other views (of the same bytes, where groups
share memory), and closer looks at those.  Each has a bar of components and one bar for every D rank and source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvxfer.cli.plan.figures import fit_text, new_figure
from kvxfer.core.layout import GroupKind
from kvxfer.planning import Lane, PageMap, PageView, Pair, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Most D ranks whose bars are drawn, and most bars of a view.
MAX_LANES: Final = 8
#: Most kernel blocks whose borders are drawn, and most spans of a bar.
_MAX_EDGES: Final = 80
_MAX_BARS: Final = 600

_COLOURS: Final = {
    "k": "#3b6fb6",
    "v": "#8cc1e9",
    "kv": "#6399d0",
    "mla": "#3b6fb6",
    "conv.x": "#2a7f4f",
    "conv.B": "#7bb661",
    "conv.C": "#c3d86b",
    "conv.q": "#2a7f4f",
    "conv.k": "#7bb661",
    "conv.v": "#c3d86b",
    "ssm": "#8e5aa8",
    "padding": "#e4e4e4",
    "others": "#f4f0e6",
}
_OTHERS: Final = ("#b5651d", "#d9a066", "#8d6e63", "#546e7a", "#90a4ae")
_NAMES: Final = {
    "k": "K",
    "v": "V",
    "kv": "K and V, alternating",
    "mla": "MLA latent",
    "conv.x": "conv x",
    "conv.B": "conv B",
    "conv.C": "conv C",
    "conv.q": "conv q",
    "conv.k": "conv k",
    "conv.v": "conv v",
    "ssm": "SSM state",
    "others": "of other layers",
}
_RANKS: Final = ("#d1495b", "#edae49", "#00798c", "#30638e", "#9c6644", "#6a994e", "#b56576", "#495057")

_GROUND: Final = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}

_WIDTH: Final = 13.0
_LEFT, _RIGHT = 1.75, 0.35  # margins in inches
_BAR, _LANE, _GAP = 0.42, 0.21, 0.05
_ABOVE, _BELOW = 0.34, 0.62  # for a panel's title, and for its ticks and scale bar
_CLEAR_OF_TICKS, _CLEAR_OF_SCALE = 0.22, 0.50  # from an axis downwards
_HEAD, _LEGEND = 0.95, 0.75


@dataclass(frozen=True)
class _Panel:
    """A stretch of a page, drawn over the whole width."""

    view: PageView
    begin: int
    end: int
    spans: tuple[Span, ...]
    lanes: tuple[Lane, ...]
    title: str
    closer: bool

    @property
    def inside(self) -> float:
        """Height of its bars, inches."""
        return _BAR + len(self.lanes) * (_LANE + _GAP) + _GAP

    @property
    def height(self) -> float:
        return _ABOVE + self.inside + _BELOW


def draw(page: PageMap, pair: Pair) -> Figure:
    """Draw the map of a pair's page."""
    panels = _panels(page)
    height = _HEAD + sum(panel.height for panel in panels) + _LEGEND
    figure = new_figure(_WIDTH, height)
    axes: list[Axes] = []
    top = height - _HEAD
    for panel in panels:
        box = (_LEFT, top - _ABOVE - panel.inside, _WIDTH - _LEFT - _RIGHT, panel.inside)
        axes.append(_panel(figure, panel, [b / s for b, s in zip(box, (_WIDTH, height) * 2, strict=True)]))
        top -= panel.height
    _join(figure, panels, axes)
    _head(figure, page, pair, height)
    _legend(figure, panels, height)
    return figure


# -- what is drawn ---------------------------------------------------------------------------------------------------


def _panels(page: PageMap) -> list[_Panel]:
    """The first view's closer look stands above it where there are others, so that views stand under one another."""
    above: list[_Panel] = []
    views: list[_Panel] = []
    below: list[_Panel] = []
    for i, view in enumerate(page.views):
        lanes = view.lanes[:MAX_LANES]
        views.append(_Panel(view, 0, view.size, view.spans, lanes, _title(view, page.shared), closer=False))
        if view.zoom is not None:
            begin, end = view.zoom
            closer = _Panel(
                view,
                begin,
                end,
                view.fine,
                view.lanes_in(begin, end)[:MAX_LANES],
                f"closer: bytes {begin:,} to {end:,} of the {_kind(view)} view{_what(view)}",
                closer=True,
            )
            (above if i == 0 and len(page.views) > 1 else below).append(closer)
    return [*above, *views, *below]


def _kind(view: PageView) -> str:
    return "attention" if view.kind is GroupKind.ATTENTION else "state"


def _what(view: PageView) -> str:
    if view.kind is GroupKind.STATE:
        return ", the conv state"
    if view.kernel_blocks > 1:
        return f", one kernel block of {view.block_tokens // view.kernel_blocks} tokens"
    return ", some of its tokens"


def _title(view: PageView, shared: bool) -> str:
    names = ", ".join(view.groups) if len(view.groups) <= 3 else f"{view.groups[0]} ... {view.groups[-1]}"
    plural = "s" if len(view.groups) > 1 else ""
    if view.kind is GroupKind.STATE:
        told = "one snapshot"
    else:
        tokens = view.block_tokens // view.kernel_blocks
        told = f"{view.block_tokens:,} tokens"
        told += f" = {view.kernel_blocks} kernel blocks of {tokens}" if view.kernel_blocks > 1 else ""
    where = "the page" if shared else f"a page of {view.size:,} bytes in a region of its own,"
    told = f"{where} as group{plural} {names} see{'' if plural else 's'} it: {told}"
    more = len(view.lanes) - MAX_LANES
    return f"{told} ({more} more D bars are not shown)" if more > 0 else told


def _head(figure: Figure, page: PageMap, pair: Pair, height: float) -> None:
    p, d = pair.p, pair.d
    name = p.name if p.name == d.name else f"{p.name} and {d.name}"
    sizes = sorted({view.size for view in page.views})
    told = " and ".join(f"{size:,}" for size in sizes)
    title = figure.text(
        _LEFT / _WIDTH,
        1 - 0.30 / height,
        f"{name}: P TP {p.tp_size} to D TP {d.tp_size}, page{'s' if len(sizes) > 1 else ''} of {told} bytes",
        fontsize=15,
        fontweight="bold",
        va="center",
    )
    what = "one page of one layer on a P rank, and what each D rank takes of it"
    fit_text(figure, title)
    figure.text(_LEFT / _WIDTH, 1 - 0.60 / height, what, fontsize=10.5, color="#555555", va="center")


# -- drawing ---------------------------------------------------------------------------------------------------------


def _panel(figure: Figure, panel: _Panel, box: Sequence[float]) -> Axes:
    axes = figure.add_axes((box[0], box[1], box[2], box[3]))
    axes.set_xlim(panel.begin, panel.end)
    axes.set_ylim(0, panel.inside)
    # Text has a ground of its own: lines from a closer look pass behind it.
    axes.set_title(
        panel.title, loc="left", fontsize=10, color="#555555" if panel.closer else "black", pad=5, bbox=_GROUND
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    low = panel.inside - _BAR
    _components(axes, panel, low)
    ticks, labels = [low + _BAR / 2], ["holds"]
    for lane in panel.lanes:
        low -= _LANE + _GAP
        spans = _drawable(lane.spans)
        axes.axhspan(low, low + _LANE, color="#f6f6f6", linewidth=0, zorder=0)
        axes.broken_barh(spans, (low, _LANE), color=_RANKS[lane.d_number % len(_RANKS)], linewidth=0)
        ticks.append(low + _LANE / 2)
        labels.append(f"D {lane.d_rank}  from P {lane.p_rank}")
    axes.set_yticks(ticks, labels, fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    marks = _marks(panel.begin, panel.end)
    axes.set_xticks(marks, [f"{mark:,}" for mark in marks], fontsize=8, bbox=_GROUND)
    _scale_bar(axes, panel)
    return axes


def _components(axes: Axes, panel: _Panel, low: float) -> None:
    """The bar of components, with their names and sizes where there is room."""
    by_name: dict[str, list[tuple[int, int]]] = {}
    for span in panel.spans:
        by_name.setdefault(span.name, []).append((span.begin, span.end))
    few = len(panel.spans) <= _MAX_EDGES
    for name, spans in by_name.items():
        hatch = "////" if name == "padding" else None
        axes.broken_barh(
            _drawable(spans),
            (low, _BAR),
            facecolor=_colour(name),
            edgecolor="white" if few and name != "padding" else "#bbbbbb" if hatch else "none",
            linewidth=0.6 if few and not hatch else 0,
            hatch=hatch,
        )
    edges = [edge for edge in panel.view.edges if panel.begin < edge < panel.end]
    if len(edges) <= _MAX_EDGES:
        axes.vlines(edges, low, low + _BAR, color="white", linewidth=0.8)
    points = (_WIDTH - _LEFT - _RIGHT) * 72 / (panel.end - panel.begin)
    for span in panel.spans if few else ():
        room = (span.end - span.begin) * points
        size = f"{span.end - span.begin:,}"
        for text in (f"{_NAMES.get(span.name, span.name)}, {size} B", _NAMES.get(span.name, span.name)):
            if len(text) * 5.4 + 6 < room:
                axes.text(
                    (span.begin + span.end) / 2,
                    low + _BAR / 2,
                    text,
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    color=_ink(span.name),
                    zorder=6,
                    bbox={"facecolor": _colour(span.name), "edgecolor": "none", "pad": 1.5},
                )
                break
    last = panel.spans[-1]
    if last.name == "padding" and (last.end - last.begin) * points < 120:
        axes.text(
            1.0,
            1.0,
            f"padding, {last.end - last.begin:,} B",
            transform=axes.transAxes,
            ha="right",
            va="bottom",
            fontsize=8.5,
        )


def _drawable(spans: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
    """Spans as (begin, width); those beyond what an eye can tell apart are joined with their neighbours."""
    step = max(1, -(-len(spans) // _MAX_BARS))
    kept = [(spans[i][0], spans[min(i + step, len(spans)) - 1][1]) for i in range(0, len(spans), step)]
    return [(begin, end - begin) for begin, end in kept]


def _scale_bar(axes: Axes, panel: _Panel) -> None:
    """A length of a round number of bytes, under the right end of the ticks."""
    width = panel.end - panel.begin
    length = 1 << max(0, (width // 8).bit_length() - 1)
    y = -0.40 / panel.inside
    transform = axes.get_xaxis_transform()
    x = panel.end - length
    style: dict[str, Any] = {"color": "black", "transform": transform, "clip_on": False, "linewidth": 1.2}
    axes.plot([x, x + length], [y, y], **style)
    for end in (x, x + length):
        axes.plot([end, end], [y - 0.03 / panel.inside, y + 0.03 / panel.inside], **style)
    axes.text(x - width * 0.006, y, _size(length), transform=transform, ha="right", va="center", fontsize=8.5)


def _size(length: int) -> str:
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if length >= unit:
            return f"{length // unit} {name} ({length:,} bytes)"
    return f"{length} bytes"


def _marks(begin: int, end: int) -> list[int]:
    """Where ticks go: both ends, and round numbers between them that keep clear of the ends."""
    width = end - begin
    step = 1 << max(0, (width // 6).bit_length() - 1)
    first = -(-begin // step) * step
    clear = width * 0.07
    between = [mark for mark in range(first, end, step) if mark - begin > clear and end - mark > clear]
    return [begin, *between, end]


def _join(figure: Figure, panels: Sequence[_Panel], axes: Sequence[Axes]) -> None:
    """Lines from a closer look to the bytes that it shows."""
    from matplotlib.patches import ConnectionPatch

    for i, panel in enumerate(panels):
        if not panel.closer:
            continue
        j = next(k for k, other in enumerate(panels) if not other.closer and other.view is panel.view)
        above = i < j
        # From the edge of the closer look that faces the view, to the bar of components in the view.
        # What stands below an axis stays clear: ticks and scale bar of the closer look, ticks of the view.
        near = -_CLEAR_OF_SCALE if above else panel.inside
        far = panels[j].inside if above else -_CLEAR_OF_TICKS
        axes[j].axvspan(panel.begin, panel.end, facecolor="none", edgecolor="#333333", linewidth=0.9, zorder=5)
        for x in (panel.begin, panel.end):
            figure.add_artist(
                ConnectionPatch(
                    (x, near),
                    (x, far),
                    axes[i].transData,
                    axes[j].transData,
                    color="#999999",
                    linewidth=0.8,
                    linestyle=":",
                    zorder=-1,
                )
            )


def _legend(figure: Figure, panels: Sequence[_Panel], height: float) -> None:
    from matplotlib.patches import Patch

    names = list(dict.fromkeys(span.name for panel in panels for span in panel.spans))
    parts = [
        Patch(
            facecolor=_colour(n),
            label=_NAMES.get(n, n),
            edgecolor="#bbbbbb" if n == "padding" else None,
            hatch="////" if n == "padding" else None,
            linewidth=0,
        )
        for n in names
    ]
    numbers = {lane.d_number: lane.d_rank for panel in panels for lane in panel.lanes}
    ranks = [Patch(facecolor=_RANKS[n % len(_RANKS)], label=f"D {rank}") for n, rank in sorted(numbers.items())]
    left = _LEFT / _WIDTH
    for handles, y in ((parts, 0.50), (ranks, 0.20)):
        figure.legend(
            handles=handles,
            loc="center left",
            bbox_to_anchor=(left, y / height),
            ncols=len(handles) or 1,
            frameon=False,
            fontsize=8.5,
            borderpad=0,
            borderaxespad=0,
            handlelength=1.4,
            columnspacing=1.4,
        )


def _colour(name: str) -> str:
    return _COLOURS.get(name) or _OTHERS[sum(name.encode()) % len(_OTHERS)]


def _ink(name: str) -> str:
    """Black or white, whichever can be read on the component's colour."""
    red, green, blue = (int(_colour(name)[i : i + 2], 16) for i in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"
