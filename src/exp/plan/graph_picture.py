"""The network's graph as a picture of its own: boxes for layers, lines for what goes from one to another.

Layers stand in the order in which they ran, one below the other. A line that passes others runs beside them. Of
repeated blocks the first is drawn, and how many there are. The darker a box, the more of the FLOPs it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from exp.models.forward_trace import ForwardTrace
from exp.nested import tensors_in
from exp.plan.layer_table import LayerRow, layer_rows, repeated, starred
from exp.plan.printout import count, plain_layers, shortened, size

if TYPE_CHECKING:
    from exp.check.plan import Plan
    from exp.plan.estimate import Estimate

WIDTH, HEIGHT, GAP, LANE, MARGIN = 460, 44, 22, 14, 24
INPUT, OUTPUT = "(input)", "(output)"
FONT = "font-family='DejaVu Sans, Verdana, sans-serif'"
STYLE = (
    "body{font-family:'DejaVu Sans',Verdana,sans-serif;font-size:13px;margin:24px;color:#222}"
    "table{border-collapse:collapse;margin:12px 0 28px}"
    "th,td{white-space:nowrap;padding:3px 10px;border-bottom:1px solid #ddd}"
    "th{text-align:left}td.n,th.n{text-align:right}h1{font-size:18px}h2{font-size:15px}"
)


@dataclass(kw_only=True)
class Node:
    """A box. name: path of a layer, its places in lists as stars where it stands for several. times: how many."""

    name: str
    times: int = 1
    sources: dict[str, None] = field(default_factory=dict)


def graph(trace: ForwardTrace) -> list[Node]:
    """The layers that a forward called, innermost ones, in order, each with where its inputs come from.

    What functions do between layers belongs to the line. Layers of the same place in repeated blocks are one node.
    """
    paths = {module: path for path, module in reversed(list(trace.network.named_modules()))}
    called = [call for call in trace.calls if call.module in paths and not any(True for _ in call.module.children())]
    made = {id(tensor): starred(paths[call.module]) for call in called for tensor in tensors_in(call.output)}
    origins: dict[int, dict[str, None]] = {key: {name: None} for key, name in made.items()}
    for tensor in trace.inputs.values():
        origins.setdefault(id(tensor), {INPUT: None})
    for operation in trace.operations:
        sources = _origins(operation.sources, origins)
        for tensor in operation.results:
            if id(tensor) not in made:
                origins[id(tensor)] = {**origins.get(id(tensor), {}), **sources}
    nodes = {INPUT: Node(name=INPUT)}
    members: dict[str, set[str]] = {}
    for call in called:
        name = starred(paths[call.module])
        members.setdefault(name, set()).add(paths[call.module])
        node = nodes.setdefault(name, Node(name=name))
        given = _origins(tensors_in(call.inputs), origins)
        node.sources |= {source: None for source in given if source != name}
    for name, found in members.items():
        nodes[name].times = len(found)
    nodes[OUTPUT] = Node(name=OUTPUT, sources=_origins(tensors_in(trace.output), origins))
    return list(nodes.values())


def _origins(tensors: Iterable[object], known: Mapping[int, Mapping[str, None]]) -> dict[str, None]:
    return {name: None for tensor in tensors for name in known.get(id(tensor), {})}


def svg(plan: Plan, estimate: Estimate) -> str:
    """A picture that needs nothing else."""
    trace = plan.shapes.traces.get(None) if plan.own is None else None
    rows = {starred(row.path): row for row in repeated(layer_rows(estimate))}
    nodes = graph(trace) if trace is not None else [Node(name=name) for name in rows]
    places = {node.name: number for number, node in enumerate(nodes)}
    lanes = _lanes(nodes, places)
    width = 2 * MARGIN + WIDTH + LANE * (1 + max(lanes.values(), default=0))
    height = 2 * MARGIN + len(nodes) * (HEIGHT + GAP) - GAP
    most = max((row.share for row in rows.values()), default=0.0)
    parts = [_line(source, node.name, places, lanes) for node in nodes for source in node.sources]
    parts += [_box(node, places[node.name], rows.get(node.name), most) for node in nodes]
    head = f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' viewBox='0 0 {width} {height}'>"
    ground = f"<rect width='{width}' height='{height}' fill='white'/>"
    return "\n".join([head, ground, *(part for part in parts if part), "</svg>", ""])


def _lanes(nodes: Sequence[Node], places: Mapping[str, int]) -> dict[tuple[str, str], int]:
    """For each line that passes other boxes, how far to the right it runs, so that no two lie upon each other."""
    spans = sorted(
        ((places[source], places[node.name], source, node.name) for node in nodes for source in node.sources),
        key=lambda span: abs(span[1] - span[0]),
    )
    taken: list[list[tuple[int, int]]] = []
    lanes: dict[tuple[str, str], int] = {}
    for start, end, source, name in spans:
        low, high = min(start, end), max(start, end)
        if high - low == 1 and start < end:
            continue
        for number, others in enumerate(taken):  # noqa: B007
            if all(high <= other[0] or low >= other[1] for other in others):
                break
        else:
            taken.append([])
            number = len(taken) - 1
        taken[number].append((low, high))
        lanes[source, name] = number + 1
    return lanes


def _top(place: int) -> int:
    return MARGIN + place * (HEIGHT + GAP)


def _line(source: str, name: str, places: Mapping[str, int], lanes: Mapping[tuple[str, str], int]) -> str:
    start, end = places[source], places[name]
    style = "fill='none' stroke='#777' stroke-width='1.2'"
    x, y = MARGIN + WIDTH / 2, _top(end)
    if (source, name) not in lanes:
        arrow = _arrow(x, y)
        return f"<path d='M{x} {_top(start) + HEIGHT}V{y - 6}' {style}/>{arrow}"
    right = MARGIN + WIDTH
    far = right + LANE * lanes[source, name]
    begin, into = _top(start) + HEIGHT * 0.75, y + HEIGHT * 0.25
    arrow = f"<path d='M{right + 7} {into - 3.5}L{right} {into}L{right + 7} {into + 3.5}Z' fill='#777'/>"
    return f"<path d='M{right} {begin}H{far}V{into}H{right + 6}' {style}/>{arrow}"


def _arrow(x: float, y: float) -> str:
    return f"<path d='M{x - 3.5} {y - 7}L{x} {y}L{x + 3.5} {y - 7}Z' fill='#777'/>"


def _box(node: Node, place: int, row: LayerRow | None, most: float) -> str:
    y = _top(place)
    shade = 0.0 if row is None or not most else row.share / most
    # From white to blue; text stays readable on it.
    fill = f"rgb({round(255 - 110 * shade)},{round(255 - 70 * shade)},{round(255 - 10 * shade)})"
    times = f" x{node.times}" if node.times > 1 else ""
    kind = "" if row is None else row.kind
    first = f"{shortened(node.name, 40)}{times}"
    second = "" if row is None else shortened(row.output, 30)
    told = [] if row is None else _figures(row)
    text = [
        f"<text x='{MARGIN + 10}' y='{y + 18}' {FONT} font-size='12' font-weight='bold'>{escape(first)}</text>",
        f"<text x='{MARGIN + WIDTH - 10}' y='{y + 18}' {FONT} font-size='11' text-anchor='end' fill='#444'>"
        f"{escape(kind)}</text>",
        f"<text x='{MARGIN + 10}' y='{y + 35}' {FONT} font-size='10' fill='#444'>{escape(second)}</text>",
        f"<text x='{MARGIN + WIDTH - 10}' y='{y + 35}' {FONT} font-size='10' text-anchor='end' fill='#444'>"
        f"{escape(', '.join(told))}</text>",
    ]
    shape = f"<rect x='{MARGIN}' y='{y}' width='{WIDTH}' height='{HEIGHT}' rx='5' fill='{fill}' stroke='#888'/>"
    return "".join([shape, *text])


def _figures(row: LayerRow) -> list[str]:
    told = [f"{row.parameters:,} par."] if row.parameters else []
    told += [f"{count(row.flops)} FLOPs"] if row.flops else []
    return [*told, *([size(row.activations)] if row.activations else [])]


def html(plan: Plan, estimate: Estimate) -> str:
    """A page with the picture, the layers and the memory of each rank."""
    layers, memory = plain_layers(estimate)
    name = escape(str(plan.plain["name"]))
    return "\n".join([
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>{name}</title><style>{STYLE}</style></head>",
        f"<body><h1>{name}</h1><h2>Memory of each rank</h2>{_table(memory, left=1)}",
        f"<h2>Layers</h2>{_table(layers, left=3)}<h2>Graph</h2>{svg(plan, estimate)}</body></html>",
        "",
    ])  # fmt: skip


def _table(rows: Sequence[Sequence[str]], *, left: int) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{'' if place < left else ' class=n'}>{escape(cell)}</{tag}>" for place, cell in enumerate(row)
        )

    head, *rest = rows
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rest)
    return f"<table><tr>{cells(head, 'th')}</tr>{body}</table>"
