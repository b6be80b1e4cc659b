#!/usr/bin/env python3
"""Measures divergence against bytes per token on SmolLM2, and writes its part of
docs/quality.md with its charts. Called by bench/quality/quality.sh.

Every row of frontier_settings.py is evaluated on the same windows. Results are kept in
measured/smollm2.jsonl, one line for each row and text, under a key of model, texts and
row. So an interrupted run continues, and a later run measures only what is missing.
"""

import argparse
import datetime
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass

import frontier_page as page
import frontier_settings as settings
import quality_engine
import quality_page
from frontier_settings import LONG, SHORT, Artifact, Row
from quality_store import ROOT, Pending, Store, digest, file_digest, write

MEASURED = ROOT / "bench" / "quality" / "measured"


@dataclass(frozen=True)
class Passage:
    """A text, and the windows and repeats that are taken from it."""
    name: str
    path: pathlib.Path
    tokens: int  # tokens of a window
    windows: int
    repeats: int

    def work(self) -> int:
        """Returns how many tokens a row reads, as a measure of time. Long windows count double,
        because their attention takes longer."""
        read = self.windows * self.tokens * (2 if self.tokens > SHORT else 1)
        return read + 768 * self.repeats


def exact_tokens(plan: dict) -> tuple[int, int]:
    """Returns the most sinks and the longest window of any layer of a kv_plan.json."""
    sinks = window = 0
    stack = [plan.get("layers", [])]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            sinks = max(sinks, value.get("exact_sinks", 0))
            window = max(window, value.get("exact_window", 0))
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)
    return sinks, window


def asked_tokens(exact: str, own: tuple[int, int]) -> tuple[int, int]:
    """Returns (sinks, window): the numbers in a text such as "sinks=4,window=128", or those of
    the plan (`own`) if they are absent."""
    asked = dict(word.split("=") for word in exact.split(",") if word)
    return (int(asked.get("sinks", own[0])), int(asked.get("window", own[1])))


class Study:
    def __init__(self, args: argparse.Namespace):
        self.tool = args.tool.resolve()
        self.engine = args.engine.resolve()
        self.model = args.model.resolve()
        self.domains = args.domains.resolve()
        self.novels = args.novels.resolve()
        self.work = args.work.resolve()
        self.budget = settings.BUDGETS[args.budget]
        self.work.mkdir(parents=True, exist_ok=True)
        self.store = Store(args.measured, datetime.date.today().isoformat(), args.again)
        self.pending = Pending(self.work, self.store)
        self.pending.keep()
        texts = [self.calibration_text(name) for name in settings.DOMAINS]
        self.identity = digest(*map(file_digest, (
            self.model / "model.safetensors", *texts)))
        self.tool_digest = file_digest(self.tool)
        self.recheck = args.recheck
        self.used: list[str] = []  # keys of the rows on the page

    # ------------------------------------------------------------------ texts

    def calibration_text(self, name: str) -> pathlib.Path:
        return self.domains / f"{name}.txt"

    def held_out(self, name: str) -> pathlib.Path:
        return self.domains / "evaluation" / f"{name}.txt"

    def short_passages(self) -> list[Passage]:
        texts = [(name, self.held_out(name)) for name in settings.DOMAINS]
        texts.append(("novels", self.novels))
        return [Passage(name, path, SHORT, self.budget.windows_per_text,
                        self.budget.repeats_per_text) for name, path in texts]

    def all_calibration_texts(self) -> pathlib.Path:
        """Joins the calibration texts."""
        path = self.work / "calibration.txt"
        write(path, "\n\n".join(self.calibration_text(name).read_text(encoding="utf-8")
                                for name in settings.DOMAINS))
        return path

    def long_passages(self) -> list[Passage]:
        """Joins the beginnings of the held-out texts."""
        path = self.work / "held-out.txt"
        pieces = [self.held_out(name).read_bytes()[:settings.LONG_BYTES_PER_TEXT]
                  for name in settings.DOMAINS]
        text = "\n\n".join(piece.decode("utf-8", "ignore") for piece in pieces)
        write(path, text)
        return [Passage("all", path, LONG, self.budget.long_windows, 0)]

    # -------------------------------------------------------------- artifacts

    def run(self, *command) -> None:
        """Shows the tool's progress and errors, but not its tables."""
        done = subprocess.run(
            [str(self.tool), *map(str, command)], stdout=subprocess.DEVNULL,
            env={**os.environ, "XDG_CACHE_HOME": str(self.work / "calibration")})
        if done.returncode != 0:
            raise SystemExit(f"failed: {self.tool.name} "
                             f"{' '.join(map(str, command))}")

    def artifact_key(self, artifact: Artifact) -> str:
        return digest(self.identity, artifact.method, settings.SEED,
                      not artifact.built_in_texts and settings.CALIBRATION_TOKENS)

    def artifact(self, artifact: Artifact) -> pathlib.Path:
        """Makes the artifact once for each build of the tool. The store keeps what the page needs."""
        calibration = ["--seed", settings.SEED]
        if not artifact.built_in_texts:
            calibration += ["--calibration-tokens", settings.CALIBRATION_TOKENS]
            for name in settings.DOMAINS:
                calibration += ["--text", f"{name}={self.calibration_text(name)}"]
        folder = self.work / "artifacts" / digest(
            self.tool_digest, self.artifact_key(artifact))
        if not folder.exists():
            folder.parent.mkdir(exist_ok=True)
            plan = folder.with_suffix(".json")
            if not plan.exists():
                self.run("plan", "--model", self.model, *calibration,
                         "--method", *artifact.method, "--out", plan)
            part = folder.with_suffix(".part")
            if part.exists():
                shutil.rmtree(part)
            self.run("apply", "--link-base", "--model", self.model,
                     *calibration, "--plan", plan, "--out", part)
            part.rename(folder)
        key = self.artifact_key(artifact)
        if key not in self.store:
            path = folder.with_name(folder.name + ".json.prediction.json")
            predicted = json.loads(path.read_text()) if path.exists() else None
            self.store.put(key, f"artifact: {' '.join(map(str, artifact.method))}", {
                "exact": exact_tokens(json.loads((folder / "kv_plan.json").read_text())),
                "predicted": predicted and {
                    name: predicted[name] for name in ("kl", "kl_low", "kl_high")}})
        return folder

    def remembered(self, artifact: Artifact) -> dict:
        key = self.artifact_key(artifact)
        if key not in self.store:
            self.artifact(artifact)
        return self.store.get(key)

    def prediction(self, row: Row) -> dict | None:
        return self.remembered(row.artifact)["predicted"]

    # ----------------------------------------------------------- measurements

    def exact(self, row: Row) -> str:
        """Returns the row's exact tokens, or an empty text if its plan already has them."""
        if row.artifact is None:
            return row.exact
        own = tuple(self.remembered(row.artifact)["exact"])
        return "" if asked_tokens(row.exact, own) == own else row.exact

    def candidate(self, row: Row) -> str:
        """Returns the row as an argument of `evaluate`."""
        if row.artifact is None:
            return row.candidate(None)
        folder, exact = self.artifact(row.artifact), self.exact(row)
        return f"{folder}:{exact}" if exact else str(folder)

    def key(self, row: Row, passage: Passage) -> str:
        cache = (
            [row.baseline, settings.SEED, settings.CALIBRATION_TOKENS] if row.calibrates
            else row.baseline if row.artifact is None
            else [self.artifact_key(row.artifact), self.exact(row)])
        return digest(self.identity, cache, passage.name, file_digest(passage.path),
                      passage.tokens, passage.windows, passage.repeats)

    def is_known(self, row: Row, passages: list[Passage]) -> bool:
        planned = row.artifact is None or self.artifact_key(row.artifact) in self.store
        return planned and all(self.key(row, passage) in self.store
                               for passage in passages)

    def evaluate(self, rows: list[Row], passage: Passage) -> None:
        # If two rows have the same codes and exact tokens, only one of them is measured.
        todo: dict[str, Row] = {}
        for row in rows:
            todo.setdefault(self.key(row, passage), row)
        candidates = [self.candidate(row) for row in todo.values()]
        self.pending.begin([
            (key, f"{row.name} / {passage.name}, {passage.windows} x {passage.tokens}")
            for key, row in todo.items()])
        command = ["evaluate", "--teacher", self.model, "--text",
                   passage.path, "--windows", passage.windows, "--window-tokens",
                   passage.tokens, "--json", self.pending.report]
        if passage.repeats > 0:
            command += ["--repeat-test", "--repeats", passage.repeats]
        if any(row.calibrates for row in todo.values()):
            command += ["--calibration-text", self.all_calibration_texts(),
                        "--calibration-tokens", settings.CALIBRATION_TOKENS,
                        "--seed", settings.SEED]
        try:
            self.run(*command, *candidates)
        finally:
            self.pending.keep()

    def measure(self, rows: list[Row], passages: list[Passage], only_known: bool
                ) -> dict[str, page.Measured]:
        """Measures what the store lacks, text by text."""
        if only_known:
            rows = [row for row in rows if self.is_known(row, passages)]
        for index, row in enumerate(rows):
            if row.artifact is not None:
                self.remembered(row.artifact)
                tell(f"planned {index + 1}/{len(rows)}: {row.name}")
        self.store.set_aside(self.recheck, [
            self.key(row, passage) for row in rows for passage in passages])
        jobs = []
        for passage in passages:
            todo = [row for row in rows if self.key(row, passage) not in self.store]
            if todo:
                jobs.append((passage, todo))
        left = sum(len(todo) * passage.work() for passage, todo in jobs)
        begin, all_work = time.monotonic(), left
        for passage, todo in jobs:
            self.evaluate(todo, passage)
            left -= len(todo) * passage.work()
            speed = (time.monotonic() - begin) / max(all_work - left, 1)
            tell(f"{passage.name}, windows of {passage.tokens}: {len(todo)} rows; "
                 f"about {left * speed / 60:.0f} minutes to go")
        found = {}
        for row in rows:
            keys = {passage.name: self.key(row, passage) for passage in passages}
            self.used += keys.values()
            found[row.name] = page.Measured.merge(
                {name: self.store.get(key) for name, key in keys.items()},
                passages[0].tokens)
        return found

    # ----------------------------------------------------------- decode steps

    def times(self, rows: list[Row], passages: list[Passage], measure: bool
              ) -> dict[str, dict]:
        """Returns the time of a decode step of each timed row, divided by that of the bf16
        cache. Measures what the store lacks if `measure` is true."""
        keys = {row: digest("decode step", self.key(row, passages[0]), settings.TIME_SHAPE,
                            settings.TIME_BATCH, LONG) for row in settings.TIMED if row in rows}
        todo = [row for row, key in keys.items() if key not in self.store] if measure else []
        if todo:
            report = json.loads(subprocess.run(
                [self.engine, "bench", "decode", "--shape", settings.TIME_SHAPE,
                 "--random-weights", "--batch", str(settings.TIME_BATCH), "--context",
                 str(LONG), "--plan", ",".join(settings.TIMED[row] for row in todo),
                 "--pairs", "15", "--json"],
                stdout=subprocess.PIPE, text=True, check=True).stdout)
            machine = report["machine"]
            timed = [one for one in report["rows"] if "speedup_spread" in one][-len(todo):]
            for row, one in zip(todo, timed, strict=True):
                self.store.put(keys[row], f"decode step: {row.name}", {
                    "time": 1 / one["speedup_over_dense"], "spread": one["speedup_spread"],
                    "attention_time": 1 / one["attention_speedup"],
                    "cpu": machine["cpu"], "simd": machine["simd"],
                    "threads": machine["threads"]})
        self.used += [key for key in keys.values() if key in self.store]
        return {row.name: self.store.get(key) for row, key in keys.items()
                if key in self.store}

    # ----------------------------------------------------------------- engine

    def compare(self, rows: list[Row], only_known: bool) -> list[quality_engine.Comparison]:
        """Compares the server's loss with the oracle's, on the first held-out text."""
        passage = self.short_passages()[0]
        found = []
        for row in rows:
            if row.artifact is None or row.exact:
                continue
            if only_known and not self.is_known(row, [passage]):
                continue
            oracle = self.key(row, passage)
            key = digest("engine", oracle)
            if key not in self.store and only_known:
                continue
            if key not in self.store:
                self.store.put(key, f"engine: {row.name}", quality_engine.measure(
                    self.engine, self.artifact(row.artifact), passage.path,
                    passage.windows, passage.tokens))
                tell(f"engine: {row.name}")
            self.used.append(key)
            found.append(quality_engine.compare(
                row.name, self.store.get(key), self.store.get(oracle)["row"]))
        return found


def tell(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def default_model() -> pathlib.Path:
    """Returns the folder to which models/fetch writes the model."""
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "kvasir" / "models" / settings.MODEL


def add_store_options(parser: argparse.ArgumentParser, path: pathlib.Path) -> None:
    parser.add_argument("--measured", type=pathlib.Path, default=path,
                        help="where rows are kept: those that are there are not "
                        "measured again")
    parser.add_argument("--again", action="store_true",
                        help="measure all rows that another commit has measured")
    parser.add_argument("--known", action="store_true",
                        help="measure nothing: the page of what is there")
    parser.add_argument("--recheck", type=int, default=0, metavar="N",
                        help="measure N known rows of a table again, chosen at "
                        "random, and compare")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    release = ROOT / "build" / "release"
    parser.add_argument("--tool", type=pathlib.Path,
                        default=release / "kvasir-compress")
    parser.add_argument("--engine", type=pathlib.Path, default=release / "kvasir")
    parser.add_argument("--model", type=pathlib.Path, default=default_model())
    parser.add_argument("--domains", type=pathlib.Path,
                        default=ROOT / "compress" / "calibrate" / "domains",
                        help="texts to calibrate on; evaluation/ has the held-out "
                        "ones")
    parser.add_argument("--novels", type=pathlib.Path,
                        default=ROOT / "models" / "tiny" / "evaluation.txt")
    parser.add_argument("--work", type=pathlib.Path,
                        default=ROOT / "build" / "frontier")
    parser.add_argument("--budget", choices=settings.BUDGETS, default="full",
                        help="full: every row, up to three hours on 2 cores; quick: "
                        "fewer rows and windows, about 40 minutes, "
                        "calibration included")
    parser.add_argument("--times", action="store_true",
                        help="measure the decode steps that the store lacks; needs a quiet "
                        "machine")
    add_store_options(parser, MEASURED / "smollm2.jsonl")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs")
    args = parser.parse_args()
    for path in (args.tool, args.model / "model.safetensors", args.domains,
                 args.novels):
        if not path.exists():
            parser.error(f"no {path}" + ("; models/fetch smollm2 gets it"
                                         if args.model in path.parents else ""))
    study = Study(args)
    budget = study.budget
    short = study.measure(budget.rows(), study.short_passages(), args.known)
    if not short:
        parser.error("--known: no row has all its measurements; measure first")
    long = study.measure(budget.long_rows(), study.long_passages(), args.known)
    times = study.times([row for row in budget.long_rows() if row.name in long],
                        study.long_passages(), args.times)
    compared = study.compare(budget.rows(), args.known) if budget.engine else []
    run = page.Run(
        budget=budget, short=short, long=long, times=times, compared=compared,
        predictions={row.name: found for row in budget.rows() + budget.long_rows()
                     if row.artifact is not None and not row.exact
                     and row.name in short | long
                     and (found := study.prediction(row)) is not None},
        version=subprocess.run([str(study.tool), "--version"], text=True, check=True,
                               capture_output=True).stdout.strip(),
        date=study.store.span(study.used))
    for line in study.store.compare():
        tell(line)
    quality_page.write_part(args.out / "quality.md", "smollm2", page.part(run))
    for name, text in page.charts(run).items():
        (args.out / name).write_text(text, encoding="utf-8")
    print(f"wrote {args.out / 'quality.md'}", file=sys.stderr)
    wrong = [row.name for row in compared if not row.sound]
    if wrong:
        raise SystemExit("the engine's loss differs too much from the oracle's: " +
                         ", ".join(wrong))


if __name__ == "__main__":
    main()
