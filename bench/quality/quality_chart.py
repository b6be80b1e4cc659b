"""Draws charts as SVGs that follow the reader's colour scheme."""

import math
from typing import NamedTuple
from xml.sax.saxutils import escape

QUOTE = {'"': "&quot;"}
WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 44, 50
COLOURS = ["#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2",
           "#be185d", "#65a30d", "#64748b"]
STYLE = ("<style>text{fill:#334155}.g{stroke:#cbd5e1}.bg{fill:#fff}"
         "@media(prefers-color-scheme:dark){text{fill:#cbd5e1}"
         ".g{stroke:#334155}.bg{fill:#0f172a}}</style>")


def decades(low: float, high: float, steps=(1, 2, 5)) -> list[float]:
    """Returns round numbers from low to high, ends included."""
    first, last = (math.floor(math.log10(end)) for end in (low, high))
    ticks = [float(f"{step}e{power}") for power in range(first - 1, last + 1)
             for step in steps]
    return [tick for tick in ticks if 0.999 * low <= tick <= 1.001 * high]


def curves(series: dict[str, list[tuple[float, float, float]]], title: str,
           x_title: str, y_title: str, reference: tuple[str, float],
           floor: float = 1e-3) -> str:
    """Draws curves. Less is better on both axes, and y has a logarithmic scale.
    series: name -> points (x, y, half width of the interval). Points with a y below `floor`
    are drawn hollow at `floor`. reference: the name and the x of the cache whose y is 0."""
    points = [p for line in series.values() for p in line]
    x_low = 0.0
    x_high = max(reference[1], *(p[0] for p in points)) * 1.05
    y_low, y_high = floor, max(p[1] + p[2] for p in points) * 1.3

    def x(value):
        return LEFT + (value - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def y(value):
        share = math.log(max(value, y_low) / y_low) / math.log(y_high / y_low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="system-ui, sans-serif" font-size="12" role="img" '
        f'aria-label="{escape(title, QUOTE)}">',
        STYLE,
        f'<rect class="bg" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        f'<text x="{LEFT}" y="26" font-size="15" font-weight="bold">'
        f'{escape(title)}</text>',
    ]
    step = 10 ** math.floor(math.log10(x_high)) / 2
    value = 0.0
    while value <= x_high:
        out.append(f'<line class="g" x1="{x(value):.1f}" x2="{x(value):.1f}" '
                   f'y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
                   f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 16}" '
                   f'text-anchor="middle">{value:g}</text>')
        value += step
    for tick in decades(y_low, y_high):
        label = f"≤ {tick:g}" if tick == y_low else f"{tick:g}"
        out.append(f'<line class="g" x1="{LEFT}" x2="{WIDTH - RIGHT}" '
                   f'y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
                   f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" '
                   f'text-anchor="end">{label}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" '
               f'text-anchor="middle">{escape(x_title)}</text>')
    out.append(f'<text transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2}) '
               f'rotate(-90)" text-anchor="middle">{escape(y_title)}</text>')
    out.append(f'<text x="{LEFT + 8}" y="{HEIGHT - BOTTOM - 10}">↙ better'
               '</text>')
    at, on_floor = x(reference[1]), y(0)
    out.append(f'<path d="M{at:.1f} {on_floor - 7:.1f}l7 7l-7 7l-7 -7z" '
               'fill="none" stroke="#64748b" stroke-width="2">'
               f'<title>{escape(reference[0])}: {reference[1]:.0f}, 0</title>'
               f'</path><text x="{at + 12:.1f}" y="{on_floor + 4:.1f}">'
               f'{escape(reference[0])}</text>')
    for index, (name, line) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        line = sorted(line)
        path = " ".join(f"{x(p[0]):.1f},{y(p[1]):.1f}" for p in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" '
                   'stroke-width="2"/>')
        for px, py, half in line:
            out.append(f'<line x1="{x(px):.1f}" x2="{x(px):.1f}" '
                       f'y1="{y(py - half):.1f}" y2="{y(py + half):.1f}" '
                       f'stroke="{colour}"/>'
                       f'<circle cx="{x(px):.1f}" cy="{y(py):.1f}" r="3.5" '
                       f'stroke="{colour}" '
                       + ('class="bg"' if py < floor else f'fill="{colour}"') +
                       f'><title>{escape(name)}: {px:.0f}, '
                       f'{py:.4f} ± {half:.4f}</title></circle>')
        row = TOP + 12 + 20 * index
        out.append(f'<rect x="{WIDTH - RIGHT + 14}" y="{row - 9}" width="12" '
                   f'height="12" rx="2" fill="{colour}"/>'
                   f'<text x="{WIDTH - RIGHT + 32}" y="{row + 1}">'
                   f'{escape(name)}</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"


class Point(NamedTuple):
    x: float
    y: float
    half: float
    name: str


# For each group of a frontier: a colour that is visible on white and on dark ground, and
# the shape of a point around (0, 0).
FRONTIER_COLOURS = (
    ("#2563eb", "#8b5cf6", "#0891b2", "#3b82f6"),
    ("#dc2626", "#d97706", "#db2777", "#ea580c", "#b45309"),
    ("#059669", "#65a30d", "#0d9488", "#64748b", "#a16207", "#4d7c0f", "#16a34a",
     "#78716c", "#9d6381", "#0284c7"),
)
MARKERS = ("M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",  # disc
           "M-4 -4h8v8h-8z", "M0 -5l5 9h-10z")
FRONTIER_HEIGHT, FRONTIER_LEFT, FRONTIER_RIGHT = 500, 82, 216
LEGEND_STEP = 18


def frontier(groups: dict[str, dict[str, list[Point]]], title: str, x_title: str,
             y_title: str, reference: tuple[str, float], floor: float = 1e-4,
             unit: str = "bytes", x_steps=(1, 2, 3, 5, 7)) -> str:
    """Draws groups of curves with logarithmic scales. Less is better on both axes.
    groups: group -> series -> points. All points of a group have one shape, all points of a
    series one colour. Points with a y below `floor` are drawn hollow at `floor`.
    reference: the name and the x of the cache whose y is 0. unit: of x. x_steps: where each
    decade of x has marks."""
    points = [point for series in groups.values() for line in series.values()
              for point in line]
    x_low = min([reference[1]] + [p.x for p in points]) / 1.25
    x_high = max([reference[1]] + [p.x for p in points]) * 1.25
    y_low = floor
    y_high = max([10 * floor] + [p.y + max(p.half, 0.0) for p in points
                                 if math.isfinite(p.half)] +
                 [p.y for p in points]) * 1.3
    left, right = FRONTIER_LEFT, WIDTH - FRONTIER_RIGHT
    bottom = FRONTIER_HEIGHT - BOTTOM

    def share(value, low, high):
        return math.log(min(max(value, low), high) / low) / math.log(high / low)

    def x(value):
        return left + share(value, x_low, x_high) * (right - left)

    def y(value):
        return bottom - share(value, y_low, y_high) * (bottom - TOP)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} '
        f'{FRONTIER_HEIGHT}" font-family="system-ui, sans-serif" font-size="12" '
        f'role="img" aria-label="{escape(title, QUOTE)}">', STYLE,
        f'<rect class="bg" width="{WIDTH}" height="{FRONTIER_HEIGHT}" rx="8"/>',
        f'<text x="{left}" y="26" font-size="15" font-weight="bold">'
        f'{escape(title)}</text>',
    ]
    for tick in decades(x_low, x_high, x_steps):
        out.append(f'<line class="g" x1="{x(tick):.1f}" x2="{x(tick):.1f}" '
                   f'y1="{TOP}" y2="{bottom}"/><text x="{x(tick):.1f}" '
                   f'y="{bottom + 16}" text-anchor="middle">{tick:,g}</text>')
    for tick in decades(y_low, y_high):
        label = f"≤ {tick:g}" if tick == floor else f"{tick:g}"
        out.append(f'<line class="g" x1="{left}" x2="{right}" y1="{y(tick):.1f}" '
                   f'y2="{y(tick):.1f}"/><text x="{left - 6}" '
                   f'y="{y(tick) + 4:.1f}" text-anchor="end">{label}</text>')
    out += [
        f'<text x="{(left + right) / 2}" y="{FRONTIER_HEIGHT - 12}" '
        f'text-anchor="middle">{escape(x_title)}</text>',
        f'<text transform="translate(14 {(TOP + bottom) / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_title)}</text>',
        f'<text x="{left + 8}" y="{bottom - 10}">↙ better</text>',
        f'<path d="M{x(reference[1]):.1f} {bottom - 7}l7 7l-7 7l-7 -7z" '
        'fill="none" stroke="#64748b" stroke-width="2"><title>'
        f'{escape(reference[0])}: {reference[1]:g}, 0</title></path>'
        f'<text x="{x(reference[1]) - 12:.1f}" y="{bottom - 10}" '
        f'text-anchor="end">{escape(reference[0])}</text>',
    ]
    row = TOP + 8
    for index, (group, series) in enumerate(groups.items()):
        colours, marker = FRONTIER_COLOURS[index], MARKERS[index]
        if not series:
            continue
        out.append(f'<text x="{right + 14}" y="{row + 4}" font-weight="bold">'
                   f'{escape(group)}</text>')
        row += LEGEND_STEP
        for number, (name, line) in enumerate(series.items()):
            colour = colours[number % len(colours)]
            out += drawn(sorted(line), colour, marker, x, y, floor, unit)
            out.append(f'<path transform="translate({right + 20} {row})" '
                       f'd="{marker}" fill="{colour}"/><text x="{right + 32}" '
                       f'y="{row + 4}">{escape(name)}</text>')
            row += LEGEND_STEP
        row += LEGEND_STEP // 2
    out.append("</svg>")
    return "\n".join(out) + "\n"


def drawn(line: list[Point], colour: str, marker: str, x, y, floor: float,
          unit: str) -> list[str]:
    """Returns the SVG of a series: its line, the points' intervals and the points."""
    path = " ".join(f"{x(p.x):.1f},{y(p.y):.1f}" for p in line)
    out = [f'<polyline points="{path}" fill="none" stroke="{colour}" '
           'stroke-width="1.5"/>']
    for p in line:
        half = p.half if math.isfinite(p.half) else 0.0
        fill = 'class="bg"' if p.y < floor else f'fill="{colour}"'
        out.append(f'<line x1="{x(p.x):.1f}" x2="{x(p.x):.1f}" '
                   f'y1="{y(p.y - half):.1f}" y2="{y(p.y + half):.1f}" '
                   f'stroke="{colour}"/><path transform="translate({x(p.x):.1f} '
                   f'{y(p.y):.1f})" d="{marker}" stroke="{colour}" {fill}>'
                   f'<title>{escape(p.name)}: {p.x:,.6g} {unit}, {p.y:.4f} ± '
                   f'{half:.4f}</title></path>')
    return out


def by_layer(series: dict[str, list[float]], title: str, x_title: str, y_title: str,
             reference: tuple[str, float]) -> str:
    """Draws a share from 0 to 1 for each layer; more is better. series: name -> the shares.
    reference: the name and the share of a random choice, drawn as a dashed line."""
    layers = max(map(len, series.values()))

    def x(layer):
        return LEFT + (layer + 0.5) / layers * (WIDTH - LEFT - RIGHT)

    def y(share):
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="system-ui, sans-serif" font-size="12" role="img" '
        f'aria-label="{escape(title, QUOTE)}">', STYLE,
        f'<rect class="bg" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        f'<text x="{LEFT}" y="26" font-size="15" font-weight="bold">'
        f'{escape(title)}</text>',
    ]
    for tick in range(0, 11, 2):
        out.append(f'<line class="g" x1="{LEFT}" x2="{WIDTH - RIGHT}" '
                   f'y1="{y(tick / 10):.1f}" y2="{y(tick / 10):.1f}"/>'
                   f'<text x="{LEFT - 6}" y="{y(tick / 10) + 4:.1f}" '
                   f'text-anchor="end">{tick / 10:g}</text>')
    for layer in range(0, layers, max(1, layers // 6)):
        out.append(f'<text x="{x(layer):.1f}" y="{HEIGHT - BOTTOM + 16}" '
                   f'text-anchor="middle">{layer}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" '
               f'text-anchor="middle">{escape(x_title)}</text>')
    out.append(f'<text transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2}) '
               f'rotate(-90)" text-anchor="middle">{escape(y_title)}</text>')
    name, share = reference
    out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(share):.1f}" '
               f'y2="{y(share):.1f}" stroke="#64748b" stroke-dasharray="5 4"/>'
               f'<text x="{WIDTH - RIGHT + 14}" y="{y(share) + 4:.1f}">'
               f'{escape(name)}: {share:.2f}</text>')
    for index, (name, line) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{x(layer):.1f},{y(share):.1f}"
                        for layer, share in enumerate(line))
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" '
                   'stroke-width="2"/>')
        out += [f'<circle cx="{x(layer):.1f}" cy="{y(share):.1f}" r="3" '
                f'fill="{colour}"><title>{escape(name)}, layer {layer}: {share:.3f}'
                '</title></circle>' for layer, share in enumerate(line)]
        row = TOP + 12 + 20 * index
        out.append(f'<rect x="{WIDTH - RIGHT + 14}" y="{row - 9}" width="12" '
                   f'height="12" rx="2" fill="{colour}"/>'
                   f'<text x="{WIDTH - RIGHT + 32}" y="{row + 1}">'
                   f'{escape(name)}</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"
