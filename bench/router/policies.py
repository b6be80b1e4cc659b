#!/usr/bin/env python3
"""Simulates the router's policies with `kvasir bench router` and writes docs/routing-policies.md.

  bench/router/policies.py --kvasir FILE   runs this program, with kvasir-bench beside it; a minute
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import performance_page as page  # noqa: E402
import provenance  # noqa: E402

PAGE = """# The router's policies

<!-- bench/router/policies.py writes this page -->

`kvasir bench router` simulates replicas event by event: their caches, prompts, batches and load reports. The routers choose with the product's own code.
`--help` describes the traces and the format of recorded ones. *Of best* is the hit rate relative to one cache of unlimited size for all. *Imbalance* is the
largest number of requests at a replica over the mean, averaged over arrivals; *work* is the same for the time spent on prompts. A load of 1 is as many prompt
tokens as all replicas can run without hits. `two_choices`: the less loaded of two random replicas.

{runs}

`prefix_affinity` is the default. On `chat` it needs at least 0.9 of the best hit rate with an imbalance of at most 1.25 and no longer waits than
`least_loaded`: {verdict}.

It loses if prompts share little or everything: without hits it chooses like `least_loaded`, and a choice costs more; prompts that every cache holds anyway
(`few_shot`, `hot`) gain nothing. Routers that share no state know only the prompts that they sent; with session ids they agree.

A choice among 1,000 replicas takes {choice_us} us here, the memory is `--prefix-bytes` (16 MiB), 16 bytes for a page of a replica. Keys of a prompt are hashed once,
at most 1,024 pages.

{run}
"""
RUNS = [
    ("8 replicas, load 0.7", ["--load", "0.7"]),
    ("8 replicas, load 2", ["--load", "2", "--trace", "chat"]),
    ("64 replicas with a quarter of the cache, load 1", ["--replicas", "64", "--cache-pages", "4096", "--trace", "chat,few_shot"]),
    ("8 replicas and 4 routers", ["--routers", "4", "--trace", "chat"]),
    ("the same with session ids", ["--routers", "4", "--trace", "chat", "--sessions"]),
    ("1,000 replicas, load 1", ["--replicas", "1000", "--load", "1", "--requests", "1000000", "--trace", "chat"]),
]


def row_of(row) -> list:
    number = page.number
    return [row["trace"], row["policy"], *(f"{row[name]:.3f}" for name in ("hit_rate", "of_best")),
            *(f"{row[name]:.2f}" for name in ("imbalance", "work_imbalance")),
            *(f"{number(row[name]['p50'])} / {number(row[name]['p99'])}" for name in ("queue_ms", "first_token_ms"))]


def verdict(report) -> str:
    """Says whether each target of `chat` is met."""
    sentences = []
    for name, target in report["targets"].items():
        (kind, limit), = target.items()
        value = report["figures"][name]
        met = value >= limit if kind == "at_least" else value <= limit
        sentences.append(f"{name} {page.number(value)} ({'met' if met else 'missed'}: {page.number(limit)})")
    return "; ".join(sentences)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/router/policies.py")
    parser.add_argument("--kvasir", type=Path, default=ROOT / "build/release/kvasir")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/routing-policies.md")
    options = parser.parse_args()
    head = ["trace", "policy", "hit rate", "of best", "imbalance", "work", "wait ms p50 / p99", "first token ms p50 / p99"]
    texts, reports = [], []
    for title, flags in RUNS:
        command = ["bench", "router", "--json", *flags]
        done = subprocess.run([options.kvasir, *command], stdout=subprocess.PIPE, text=True, check=True)
        reports.append(json.loads(done.stdout))
        texts.append(f"{title} (`{' '.join(flags)}`):\n\n" + page.table(head, map(row_of, reports[-1]["rows"])))
    run = provenance.of(options.kvasir, [])
    options.out.write_text(PAGE.format(
        runs="\n\n".join(texts), verdict=verdict(reports[0]), choice_us=page.number(reports[-1]["rows"][0]["choice_us"]),
        run=f"{reports[0]['machine']['cpu']}; preset `{options.kvasir.resolve().parent.name}`, binary (SHA-256) `{run['binary'][:12]}`."))


if __name__ == "__main__":
    main()
