#!/usr/bin/env python3
"""Serves SmolLM2 with several caches. All pools have the same size, in which the 8-bit
cache holds four sequences, and each server is loaded with far more. Measures how many
run, how fast, and how far the outputs diverge, and writes docs/kv-limited.md. Called
by bench/kv_limited/kv_limited.sh.

All servers run the whole time and take turns; a burst is one closed loop of
`kvasir bench serve`. Divergences come from the study of eviction, which measures
missing rows (bench/quality/eviction.py)."""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench/quality")]
import eviction  # noqa: E402
import eviction_settings as settings  # noqa: E402
import provenance  # noqa: E402
from performance_page import number, size, table  # noqa: E402

START_SECONDS = 120
BURST_SECONDS = 1800
POLL_SECONDS = 0.05
SEQUENCES = 4  # sequences of the 8-bit cache that the pool holds
SPREAD_LIMIT = 0.15
MIN_ROUNDS = 7


@dataclass(frozen=True)
class Cache:
    """A server's cache: its plan, its flags for eviction, and its row in the study of eviction."""
    plan: str
    quality: settings.Row | None  # None: the dense cache, from which divergences are measured
    flags: tuple = ()
    targets: bool = False  # true if the page compares it with targets

    @property
    def name(self) -> str:
        if not self.flags:
            return f"`{self.plan}`"
        return f"`{self.plan}`, {self.quality.shown} {100 * self.quality.budget:g} %"


def evicting(plan: str, cache: settings.Cache, share: float, targets: bool = False) -> Cache:
    """Returns a cache that evicts by H2O, which is Q-Hitter with λ = 1."""
    return Cache(plan, settings.Row(cache, "h2o", share),
                 ("--eviction", "h2o", "--eviction-budget", f"{share:g}"), targets)


EIGHT = Cache("dense-8bit", settings.Row(settings.CODES[8], "none"))
SERVED_3 = settings.Cache(3, 3, "sinks=4,window=60")  # of `--kv-plan rotated-3bit`
CACHES = [
    EIGHT,
    Cache("dense-bf16", None),
    Cache("rotated-4bit", settings.Row(settings.SERVED, "none")),
    evicting("rotated-4bit", settings.SERVED, 0.5, targets=True),
    evicting("rotated-4bit", settings.SERVED, 0.2),
    evicting("rotated-3bit", SERVED_3, 0.5, targets=True),
]
# The KL target refers to this row: rotated 4 bits without exact tokens.
ANCHOR = settings.Row(settings.CODES[4], "none")


@dataclass
class Bursts:
    """The measurements of a server. Each list has one entry for each burst."""
    tokens_per_second: list = field(default_factory=list)
    # the mean number of running requests while others waited
    running: list = field(default_factory=list)
    peak: list = field(default_factory=list)
    preemptions: list = field(default_factory=list)
    itl_ms_p95: list = field(default_factory=list)
    ttft_ms_p50: list = field(default_factory=list)


def metrics(url: str) -> dict[str, float]:
    """Returns the values of series without labels."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in
            (line.split() for line in lines if line.startswith("kvasir_") and "{" not in line)}


class Watch(threading.Thread):
    """Reads a server's gauges while it is loaded."""

    def __init__(self, url: str):
        super().__init__(daemon=True)
        self.url = url
        self.samples: list[tuple[float, float]] = []
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(POLL_SECONDS):
            gauges = metrics(self.url)
            self.samples.append((gauges["kvasir_num_requests_running"],
                                 gauges["kvasir_num_requests_waiting"]))

    def limited(self) -> list[float]:
        """Returns the numbers of running requests while others waited. The pool holds no more."""
        return [running for running, waiting in self.samples if waiting > 0 and running > 0]


class Server:
    def __init__(self, cache: Cache, options, pool_bytes: int, folder: Path):
        self.cache = cache
        self.bursts = Bursts()
        self.options = options
        ready = folder / "ready.json"
        folder.mkdir()
        command = [options.kvasir, "serve", "--model", options.model, "--kv-plan", cache.plan,
                   "--kv-cache-bytes", str(pool_bytes), "--max-model-len",
                   str(options.prompt_tokens + options.output_tokens),
                   "--page-tokens", str(options.page_tokens),
                   "--max-num-seqs", str(options.concurrency), "--grpc-port", "0",
                   "--admin-port", "0", "--health-port", "0", "--metrics-port", "0",
                   "--ready-file", ready, *cache.flags]
        with open(folder / "log", "wb") as log:
            self.process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log,
                                            stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while not (ready.exists() and ready.stat().st_size > 0):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                sys.exit(f"kv_limited: {cache.name} does not start:\n"
                         f"{(folder / 'log').read_text(errors='replace')}")
            time.sleep(0.05)
        addresses = json.loads(ready.read_text())
        self.grpc, self.metrics = addresses["grpc"], f"http://{addresses['metrics']}/metrics"

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def burst(self, seed: int, keep: bool) -> None:
        options = self.options
        before = metrics(self.metrics)
        watch = Watch(self.metrics)
        watch.start()
        done = subprocess.run(
            [options.kvasir, "bench", "serve", "--endpoint", self.grpc, "--mode", "closed",
             "--requests", str(options.requests), "--concurrency", str(options.concurrency),
             "--prompt-tokens", f"fixed:{options.prompt_tokens}",
             "--output-tokens", f"fixed:{options.output_tokens}",
             "--max-model-len", str(options.prompt_tokens + options.output_tokens),
             "--vocab-size", str(options.vocab_size), "--seed", str(seed), "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=BURST_SECONDS)
        watch.over.set()
        watch.join()
        if done.returncode != 0:
            sys.exit(f"kv_limited: {self.cache.name}: {done.stderr.strip()}")
        row = next(row for row in json.loads(done.stdout)["rows"] if row.get("mode") == "closed")
        if row["failed"]:
            sys.exit(f"kv_limited: {self.cache.name}: {row['failed']} requests failed: "
                     f"{row.get('first_error')}")
        if not keep:
            return
        limited = watch.limited()
        if not limited:
            sys.exit(f"kv_limited: {self.cache.name}: no request waited; give more --concurrency")
        after = metrics(self.metrics)
        self.bursts.tokens_per_second.append(row["output_tokens_per_second"])
        self.bursts.running.append(statistics.fmean(limited))
        self.bursts.peak.append(max(limited))
        self.bursts.preemptions.append(after["kvasir_num_preemptions_total"] -
                                     before["kvasir_num_preemptions_total"])
        self.bursts.itl_ms_p95.append(row["itl_ms"]["p95"])
        self.bursts.ttft_ms_p50.append(row["ttft_ms"]["p50"])


def inspected(options, cache: Cache) -> dict:
    done = subprocess.run([options.kvasir, "inspect", "--model", options.model, "--kv-plan",
                           cache.plan, *cache.flags, "--json"],
                          stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def measure(options) -> dict[str, dict]:
    tokens = options.prompt_tokens + options.output_tokens
    # Each sequence takes whole pages.
    pages = -(-tokens // options.page_tokens)
    pool = int(SEQUENCES * pages * options.page_tokens *
               inspected(options, EIGHT)["kv_bytes_per_token"])
    with tempfile.TemporaryDirectory(prefix="kvasir-kv-limited-") as folder:
        servers: list[Server] = []
        try:
            for i, cache in enumerate(CACHES):
                servers.append(Server(cache, options, pool, Path(folder) / str(i)))
            for turn in range(options.rounds + 1):
                begin = time.monotonic()
                for server in servers[turn % len(servers):] + servers[:turn % len(servers)]:
                    server.burst(1000 + turn, turn > 0)  # the first round warms up
                print(f"round {turn} of {options.rounds}: {time.monotonic() - begin:.0f} s",
                      file=sys.stderr)
            held = {server.cache.name: metrics(server.metrics) for server in servers}
        finally:
            for server in servers:
                server.stop()
    return {"pool_bytes": pool, "caches": {
        server.cache.name: vars(server.bursts) | {
            "leaked_pages": held[server.cache.name]["kvasir_cache_leaked_pages"]}
        for server in servers}}


def divergences(options) -> dict[settings.Row, float]:
    """Returns the KL of each cache's row in the study of eviction."""
    study = eviction.Study(argparse.Namespace(
        tool=options.tool, engine=options.kvasir, model=options.model_folder,
        domains=ROOT / "compress/calibrate/domains", novels=ROOT / "models/tiny/evaluation.txt",
        work=options.work, threads=None, budget=options.budget, again=False, recheck=0,
        measured=eviction.MEASURED / "eviction.jsonl"))
    passage = study.passage("windows", study.budget.windows, settings.TOKENS)
    rows = list(dict.fromkeys([cache.quality for cache in CACHES if cache.quality] + [ANCHOR]))
    return {row: one.kl.mean for row, one in study.measure(rows, passage, False).items()}


# -------------------------------------------------------------------------- page

# This text explains the committed table. Check it again when the figures change.
NOTE = """More sequences at once give no more tokens a second here, because from four on the arithmetic of
a step limits two cores, and not the reading of weights. Between their tokens, running sequences wait
for the prompts of others, so ITL grows. With 4 bits, half of the slots cannot give four times the
sequences (8.5 bits over 4.5, twice, is 3.8). At this length a sequence's exact tokens and the slots
between two evictions take a large part of the rest."""

def ratio(values: list[float], base: list[float]) -> tuple[float, float]:
    """Returns the median of the rounds' ratios, and their middle half relative to it."""
    pairs = sorted(a / b for a, b in zip(values, base))
    low, middle, high = statistics.quantiles(pairs, n=4)
    return middle, (high - low) / middle


def shown_ratio(values, base) -> str:
    middle, spread = ratio(values, base)
    undecided = spread > SPREAD_LIMIT or len(values) < MIN_ROUNDS
    return f"{middle:.2f}" + (" (undecided)" if undecided else "")


def verdict(met: bool, undecided: bool = False) -> str:
    return "undecided" if undecided else "met" if met else "**missed**"


def page(report: dict, kl: dict[settings.Row, float], options) -> str:
    caches, eight = report["caches"], report["caches"][EIGHT.name]
    rows, judged = [], []
    for cache in CACHES:
        one = caches[cache.name]
        own = kl[cache.quality] if cache.quality else None
        costs = inspected(options, cache)
        rows.append([
            cache.name, "0" if own is None else f"{own:.4f}",
            number(costs["kv_bytes_per_token"]), size(costs["kv_fixed_bytes_per_sequence"]),
            number(statistics.fmean(one["running"])), number(max(one["peak"])),
            shown_ratio(one["running"], eight["running"]),
            number(statistics.median(one["tokens_per_second"])),
            shown_ratio(one["tokens_per_second"], eight["tokens_per_second"]),
            number(statistics.fmean(one["preemptions"])),
            number(statistics.median(one["ttft_ms_p50"])),
            number(statistics.median(one["itl_ms_p95"]))])
        if cache.targets:
            running, speed = (ratio(one[key], eight[key]) for key in
                              ("running", "tokens_per_second"))
            few = options.rounds < MIN_ROUNDS
            judged.append([
                cache.name,
                f"{running[0]:.2f} {verdict(running[0] >= 4, few or running[1] > SPREAD_LIMIT)}",
                f"{speed[0]:.2f} {verdict(speed[0] >= 1.5, few or speed[1] > SPREAD_LIMIT)}",
                f"{own / kl[ANCHOR]:.2f} {verdict(own <= 2 * kl[ANCHOR])}"])
    head = ["cache", "KL", "bytes/slot", "fixed", "running", "peak", "× 8-bit", "tokens/s", "× 8-bit", "preemptions",
            "TTFT p50, ms", "ITL p95, ms"]
    leaked = sum(one["leaked_pages"] for one in caches.values())
    return "\n".join([
        "# A pool that is too small", "",
        "<!-- bench/kv_limited/kv_limited.sh writes this page -->", "",
        "This page shows the gain of compression and eviction if the KV cache limits a server: "
        f"SmolLM2-135M with a pool of {size(report['pool_bytes'])}, in which the 8-bit cache holds "
        f"{SEQUENCES} sequences of {options.prompt_tokens} + {options.output_tokens} tokens, and "
        f"{options.concurrency} clients that each send the next request at once.", "",
        f"- {options.rounds} rounds. In each, one server after the other gets {options.requests} "
        "requests, while all others are idle. Ratios are medians of the rounds' ratios; above a "
        "spread of 15 % they are *undecided*.",
        "- *Running*: the mean of `kvasir_num_requests_running` while others waited. *Peak*: the "
        "most that was seen. *Preemptions*: in a round.",
        "- *Bytes/slot* include scores and padding. *Fixed*: the exact tokens of a sequence. Pages "
        f"hold {options.page_tokens} slots. After an eviction up to 128 slots come before the next.",
        "- *KL*: the divergence from the dense bf16 cache for prompts of "
        f"{settings.TOKENS} tokens, from the rows of [quality.md](quality.md#eviction-on-smollm2-"
        "135m-instruct); the prompts of this load are random.",
        f"- {report['date']}: {report['machine']}, {os.cpu_count()} CPUs; binary "
        f"`{report['run']['binary'][:12]}`. Pages leaked over all servers: {leaked:g}.", "",
        table(head, rows), "", NOTE, "",
        "Targets of a plan that evicts half of each prompt, against the 8-bit cache: 4 × as many "
        "running, 1.5 × the tokens/s, and at most twice the KL of rotated 4 bits without exact tokens "
        f"({kl[ANCHOR]:.4f}).", "",
        table(["cache", "running (≥ 4)", "tokens/s (≥ 1.5)", "KL over rotated 4 bits' (≤ 2)"],
              judged), ""])


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/kv_limited/kv_limited.sh",
                                     description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS)
    parser.add_argument("--requests", type=int, default=24, help="requests of a burst")
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--page-tokens", type=int, default=64, help="page size of the servers")
    parser.add_argument("--vocab-size", type=int, default=49000, help="prompts have ids below this")
    parser.add_argument("--budget", choices=settings.BUDGETS, default="quick",
                        help="budget of the study that the divergences come from")
    parser.add_argument("--kvasir", type=Path, default=ROOT / "build/release/kvasir")
    parser.add_argument("--tool", type=Path, default=ROOT / "build/release/kvasir-compress")
    parser.add_argument("--work", type=Path, default=ROOT / "build/eviction")
    parser.add_argument("--results", type=Path, default=ROOT / "build/performance-kv-limited.json")
    parser.add_argument("--write", action="store_true", help="only write the page")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/kv-limited.md")
    options = parser.parse_args()
    if options.rounds < 2 or min(options.requests, options.concurrency) < 1:
        parser.error("--rounds: at least 2; --requests and --concurrency: at least 1")
    options.kvasir = options.kvasir.resolve()
    options.model = settings.MODEL
    options.model_folder = eviction.default_model()
    if not options.write:
        report = measure(options) | {
            "run": provenance.of(options.kvasir, sys.argv[1:]), "machine": platform.processor() or
            platform.machine(), "date": datetime.date.today().isoformat()}
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(report, indent=1) + "\n")
    elif not options.results.exists():
        parser.error(f"--write: no results in {options.results}; measure first")
    report = json.loads(options.results.read_text())
    options.out.write_text(page(report, divergences(options), options))


if __name__ == "__main__":
    main()
