"""What a pair of engines would do, before any of them runs: verdict, cost, volume, and a map of the pages.

Pure: two engines' layouts in, numbers out.  Every number of a read comes from the plan that a sidecar would compile
(:func:`kvxfer.core.pairing.compile_plan`) and from the read that it would post (:func:`kvxfer.core.resolve.resolve`).

    >>> from kvxfer.models import EngineOptions, example
    >>> from kvxfer.planning import Engine, report
    >>> nano = example("nemotron-3-nano-30b-a3b")
    >>> p, d = (Engine.preset("nano", nano, EngineOptions(tp_size=tp, kv_dtype="fp8")) for tp in (2, 4))
    >>> found = report(p, d, tokens=2096)
    >>> found.verdict.value, found.ranks[0].sources[0].rank, found.ranks[0].read.bytes
    ('works_with_cost', 'tp0', 15490048)
"""

from kvxfer.planning.engine import Engine
from kvxfer.planning.pagemap import Lane, PageMap, PageView, Span, page_map
from kvxfer.planning.pair import Pair, Refused
from kvxfer.planning.report import Cost, CostKind, GroupPages, RankReport, Report, Verdict, report
from kvxfer.planning.volume import RankVolume, Volume, volumes

__all__ = [
    "Cost",
    "CostKind",
    "Engine",
    "GroupPages",
    "Lane",
    "PageMap",
    "PageView",
    "Pair",
    "RankReport",
    "RankVolume",
    "Refused",
    "Report",
    "Span",
    "Verdict",
    "Volume",
    "page_map",
    "report",
    "volumes",
]
