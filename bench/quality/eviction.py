#!/usr/bin/env python3
"""Measures the cost of evicting tokens on SmolLM2, by method, budget and bits, and writes
its part of docs/quality.md. Called by bench/quality/quality.sh.

Results are kept in measured/eviction.jsonl, one line for each row and text, under a key of
model, text and row. So an interrupted run continues, and a later run measures only what
is missing."""

import argparse
import datetime
import json
import pathlib
import shutil
import subprocess
import time

import eviction_overlap as overlap
import eviction_page as page
import eviction_settings as settings
import eviction_streams as streams
import quality_page
from eviction_settings import Row
from frontier import MEASURED, Passage, add_store_options, default_model, tell
from quality_store import ROOT, Pending, Store, digest, file_digest, write


def commands(rows: list[Row]) -> list[list[Row]]:
    """Groups rows into calls of `evaluate`. The rows of a call have the same options, and are
    all combinations of some caches, methods and budgets."""
    found: dict[tuple, list[Row]] = {}
    by_cache: dict[tuple, dict[tuple, list[Row]]] = {}
    for row in rows:
        by_cache.setdefault((row.options, row.cache), {}).setdefault(
            (row.method,), []).append(row)
    for (options, _), methods in by_cache.items():
        # Methods of one cache with the same budgets.
        alike: dict[tuple, list[Row]] = {}
        for (method,), own in methods.items():
            budgets = tuple(row.budget for row in own)
            alike.setdefault(budgets, []).extend(own)
        for budgets, own in alike.items():
            names = tuple(dict.fromkeys(row.method for row in own))
            found.setdefault((options, names, budgets), []).extend(own)
    return list(found.values())


class Study:
    def __init__(self, args: argparse.Namespace):
        self.tool = args.tool.resolve()
        self.engine = args.engine.resolve()
        self.model = args.model.resolve()
        self.domains = args.domains.resolve()
        self.novels = args.novels.resolve()
        self.work = args.work.resolve()
        self.threads = args.threads
        self.budget = settings.BUDGETS[args.budget]
        self.work.mkdir(parents=True, exist_ok=True)
        self.store = Store(args.measured, datetime.date.today().isoformat(), args.again)
        self.pending = Pending(self.work, self.store)
        self.pending.keep()
        self.identity = file_digest(self.model / "model.safetensors")
        self.tool_digest = file_digest(self.tool)
        self.recheck = args.recheck
        self.used: list[str] = []  # keys of the rows on the page

    def passage(self, name: str, windows: int, tokens: int, repeats: int = 0
                ) -> Passage:
        """Joins the beginnings of the held-out texts. They are long enough that each text gives
        the same number of windows."""
        texts = len(settings.DOMAINS)
        per_text = (settings.BYTES_PER_WINDOW * max(windows, texts) * tokens //
                    settings.TOKENS // texts)
        if repeats:
            per_text = 1 << 30  # passages and fillers come from the whole text
        pieces = [(self.domains / "evaluation" / f"{domain}.txt").read_bytes()
                  [:per_text] for domain in settings.DOMAINS]
        path = self.work / f"{name}.txt"
        write(path, "\n\n".join(piece.decode("utf-8", "ignore")
                                for piece in pieces))
        return Passage(name, path, tokens, windows, repeats)

    def novel(self) -> pathlib.Path:
        path = self.work / "novel.txt"
        text = self.novels.read_bytes()[:self.budget.stream_bytes]
        write(path, text.decode("utf-8", "ignore"))
        return path

    def beginnings(self) -> list[pathlib.Path]:
        """Writes the beginning of each held-out text to a file."""
        paths = []
        for domain in settings.DOMAINS:
            text = (self.domains / "evaluation" / f"{domain}.txt").read_bytes()
            paths.append(self.work / f"{domain}.txt")
            write(paths[-1], text[:settings.OVERLAP_BYTES].decode("utf-8", "ignore"))
        return paths

    def run(self, *command) -> None:
        done = subprocess.run([str(self.tool), *map(str, command)],
                              stdout=subprocess.DEVNULL)
        if done.returncode != 0:
            raise SystemExit(f"failed: {self.tool.name} "
                             f"{' '.join(map(str, command))}")

    def artifact(self, cache: settings.Cache) -> pathlib.Path:
        """Returns the folder of the cache's artifact, and makes it if it does not exist."""
        plan = json.dumps(cache.plan())
        folder = self.work / "artifacts" / digest(self.identity, self.tool_digest,
                                                 plan)
        if not folder.exists():
            folder.parent.mkdir(exist_ok=True)
            path, part = folder.with_suffix(".json"), folder.with_suffix(".part")
            write(path, plan)
            if part.exists():
                shutil.rmtree(part)
            self.run("apply", "--link-base", "--model", self.model, "--plan", path,
                     "--out", part)
            part.rename(folder)
        return folder

    def candidate(self, cache: settings.Cache) -> str:
        if cache.dense:
            return str(self.model)
        folder = self.artifact(cache)
        return f"{folder}:{cache.exact}" if cache.exact else str(folder)

    def key(self, row: Row, passage: Passage) -> str:
        return digest(self.identity, row.cache.plan(), row.cache.exact, row.method,
                      row.budget, row.options, settings.SEED, passage.name,
                      file_digest(passage.path), passage.tokens, passage.windows,
                      passage.repeats, settings.PASSAGE_TOKENS,
                      settings.FILLER_TOKENS)

    def evaluate(self, rows: list[Row], passage: Passage) -> None:
        names = list(dict.fromkeys(row.method for row in rows))
        budgets = list(dict.fromkeys(row.budget for row in rows))
        caches = list(dict.fromkeys(row.cache for row in rows))
        in_order = [Row(cache, name, budget, rows[0].weight, rows[0].recent)
                    for cache in caches for name in names for budget in budgets]
        command = ["evaluate", "--teacher", self.model, "--eviction", ",".join(names)]
        if names != ["none"]:
            command += [*rows[0].options, "--eviction-budget",
                        ",".join(f"{budget:g}" for budget in budgets)]
        command += ["--text", passage.path, "--windows", passage.windows, "--window-tokens",
                    passage.tokens, "--seed", settings.SEED, "--json", self.pending.report]
        if self.threads:
            command += ["--threads", self.threads]
        if passage.repeats:
            command += ["--repeat-test", "--repeats", passage.repeats,
                        "--repeat-tokens", settings.PASSAGE_TOKENS,
                        "--filler-tokens", settings.FILLER_TOKENS]
        candidates = [self.candidate(cache) for cache in caches]
        self.pending.begin([
            (self.key(row, passage), f"{row.name} / {passage.name}, "
             f"{passage.windows} x {passage.tokens}, {passage.repeats} copies")
            for row in in_order])
        try:
            self.run(*command, *candidates)
        finally:
            self.pending.keep()

    def measure(self, rows: list[Row], passage: Passage, only_known: bool
                ) -> page.Found:
        keys = {row: self.key(row, passage) for row in rows}
        self.store.set_aside(self.recheck, list(keys.values()))
        todo = [row for row in rows if keys[row] not in self.store]
        begin, all_rows = time.monotonic(), len(todo)
        for command in [] if only_known else commands(todo):
            self.evaluate(command, passage)
            todo = [row for row in todo if row not in command]
            speed = (time.monotonic() - begin) / (all_rows - len(todo))
            tell(f"{passage.name}: {len(todo)} of {all_rows} rows left; about "
                 f"{len(todo) * speed / 60:.0f} minutes")
        found: page.Found = {}
        for row in rows:
            stored = self.store.get(keys[row])
            if stored is None:
                continue
            self.used.append(keys[row])
            found[row] = page.Measured(
                stored["row"]["window_kl"], stored["row"]["window_nats"],
                stored["teacher"]["window_nats"], stored["row"]["repeat_nats"],
                stored["row"]["kv_bytes_per_token"], stored["row"]["top1_agreement"])
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", type=pathlib.Path,
                        default=ROOT / "build" / "release" / "kvasir-compress")
    parser.add_argument("--engine", type=pathlib.Path,
                        default=ROOT / "build" / "release" / "kvasir",
                        help="the server, for streams")
    parser.add_argument("--model", type=pathlib.Path, default=default_model())
    parser.add_argument("--domains", type=pathlib.Path,
                        default=ROOT / "compress" / "calibrate" / "domains",
                        help="the folder with the held-out texts in evaluation/")
    parser.add_argument("--novels", type=pathlib.Path,
                        default=ROOT / "models" / "tiny" / "evaluation.txt",
                        help="the held-out text that is read as a stream")
    parser.add_argument("--work", type=pathlib.Path,
                        default=ROOT / "build" / "eviction")
    parser.add_argument("--budget", choices=settings.BUDGETS, default="full",
                        help="full: every row, some hours on 2 cores; quick: fewer "
                        "rows and windows, about 40 minutes")
    add_store_options(parser, MEASURED / "eviction.jsonl")
    parser.add_argument("--threads", type=int, help="threads of evaluate (default: all)")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs")
    args = parser.parse_args()
    for path in (args.tool, args.engine, args.novels, args.domains,
                 args.model / "model.safetensors"):
        if not path.exists():
            parser.error(f"no {path}" + ("; models/fetch smollm2 gets it"
                                         if args.model in path.parents else ""))
    study = Study(args)
    budget = study.budget
    passage = study.passage("windows", budget.windows, settings.TOKENS)
    copies = study.passage("copies", settings.SHORT_WINDOWS, settings.SHORT_TOKENS,
                           budget.copies)
    windows = study.measure(budget.of(settings.MATRIX), passage, args.known)
    far = study.measure(budget.of(settings.FAR), copies, args.known)
    windows |= study.measure(budget.of(settings.OTHERS), passage, args.known)
    long = study.measure(
        budget.of(settings.LONG_ROWS),
        study.passage("long", budget.long_windows, settings.LONG), args.known)
    streamed = streams.measure(
        study.engine, study.model, study.novel(), study.store, study.used,
        budget.of(settings.STREAMS), args.known, study.threads)
    overlaps, by_lot = overlap.measure(
        study.engine, study.model, study.beginnings(), study.work, study.store,
        study.used, args.known)
    run = page.Run(
        budget=budget, windows=windows, far=far, long=long, streams=streamed,
        overlaps=overlaps, by_lot=by_lot,
        version=subprocess.run([str(study.tool), "--version"], text=True, check=True,
                               capture_output=True).stdout.strip(),
        date=study.store.span(study.used))
    for line in study.store.compare():
        tell(line)
    quality_page.write_part(args.out / "quality.md", "eviction", page.part(run))
    if overlaps:
        (args.out / "heavy-overlap.svg").write_text(
            overlap.chart(overlaps, by_lot), encoding="utf-8")


if __name__ == "__main__":
    main()
