"""Quality against bytes as an SVG that follows the reader's colour scheme."""

import math
from xml.sax.saxutils import escape

QUOTE = {'"': "&quot;"}
WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 44, 50
COLOURS = ["#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2",
           "#be185d", "#65a30d", "#64748b"]


def decades(low: float, high: float) -> list[float]:
    ticks, power = [], 1e-6
    while power <= high * 1.001:
        ticks += [power * k for k in (1, 2, 5) if low <= power * k <= high]
        power *= 10
    return ticks


def curves(series: dict[str, list[tuple[float, float, float]]], title: str,
           x_title: str, y_title: str, reference: tuple[str, float],
           floor: float = 1e-3) -> str:
    """series: name -> points (x, y, half width); y on a logarithmic scale, less
    of both is better; points below `floor` are drawn on it, hollow.
    reference: name and x of what has a y of 0."""
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
        "<style>text{fill:#334155}.g{stroke:#cbd5e1}.bg{fill:#fff}"
        "@media(prefers-color-scheme:dark){text{fill:#cbd5e1}"
        ".g{stroke:#334155}.bg{fill:#0f172a}}</style>",
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
