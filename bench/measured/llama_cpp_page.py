"""Writes the section on llama.cpp of docs/performance.md from the results of
bench/vs_llama_cpp.sh, which are committed in bench/measured/llama_cpp.json.
bench/performance.sh writes it with the rest of the page. This writes only the section:

  python3 bench/measured/llama_cpp_page.py docs/performance.md docs/performance-avx2.md
"""

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import vs_llama_cpp as versus  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "llama_cpp.json"
BEGIN, END = "<!-- bench/measured/llama_cpp_page.py writes this -->", "<!-- to here -->"


def table(head, rows) -> str:
    return "\n".join("| " + " | ".join(cells) + " |"
                     for cells in [head, ["---"] * len(head), *rows])


def ratio(row) -> str:
    text = f"{row['ratio']:.2f}"
    if row["undecided"]:
        return text + " (undecided)"
    return f"**{text}**" if row.get("met") is False else text


def section(report) -> str:
    machine = report["machine"]
    rows = report["rows"]
    asked = [row for row in rows if "target" in row]
    met = sum(row["met"] for row in asked)
    undecided = sum(row["undecided"] for row in asked)
    by_ours, theirs = {}, {}
    for row in rows:
        size = (row["context"], row["batch"])
        by_ours.setdefault((*size, row["plan"]), {})[row["llama_cpp_cache"]] = row
        theirs.setdefault(size, {})[row["llama_cpp_cache"]] = row["llama_cpp_tokens_per_second"]
    caches = list(versus.CACHES)
    lines = []
    for (context, batch, plan), found in by_ours.items():
        ours = statistics.median(row["kvasir_tokens_per_second"] for row in found.values())
        lines.append([str(context), str(batch), plan, f"{ours:.1f}",
                      *(ratio(found[name]) if name in found else "" for name in caches)])
    for (context, batch), found in theirs.items():
        lines.append([str(context), str(batch), "llama.cpp, tokens/s", "",
                      *(f"{found[name]:.1f}" if name in found else "" for name in caches)])
    return "\n".join([
        f"{report['shape']}, threads each: {report['threads']}, {report['pairs']} pairs, "
        f"{report['date']}, {machine['cpu']} ({machine['simd']}), llama-cpp-python "
        f"{report['llama_cpp_python']} with {report['weights']} weights.", "",
        f"{met} of {len(asked)} ratios with a target meet it, {undecided} are undecided; those "
        "that miss it are **bold**.", "",
        table(["context", "batch", "our cache", "ours, tokens/s",
               *(f"ours / {name}" for name in caches)], lines)])


def marked(report) -> str:
    return f"{BEGIN}\n\n{section(report)}\n\n{END}"


def rewritten(page: str, report) -> str:
    """Returns the page with a new section between its marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return before + marked(report) + after


def main() -> None:
    report = json.loads(RESULTS.read_text())
    for path in map(Path, sys.argv[1:]):
        path.write_text(rewritten(path.read_text(), report))


if __name__ == "__main__":
    main()
