#!/usr/bin/env python3
"""Measures what compression costs the built-in model, and writes its part of
docs/quality.md.

It repeats those tables of the papers that one model can show. Called by
bench/quality/quality.sh.

Every table is a list of configurations. Each is a baseline of `evaluate`, or a
`kvasir-compress apply` command, which makes an artifact for each calibration seed.
They are evaluated on windows of a text that neither training nor calibration has
seen. Results stay in the work folder under a hash of command and program, so an
interrupted run continues; artifacts are removed.

quality_settings.py has the claims and settings, which are fixed before the run.
quality_notes.md explains contradictions.
"""

import argparse
import dataclasses
import datetime
import hashlib
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys

import quality_chart
import quality_engine
import quality_page
import quality_settings as settings
import quality_stats as stats

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Study:
    def __init__(self, args: argparse.Namespace):
        self.tool = args.tool.resolve()
        self.engine = args.engine.resolve()
        self.model = args.model.resolve()
        self.text = args.evaluation.resolve()
        self.calibration = args.calibration.resolve()
        self.work = args.work.resolve()
        self.windows = args.windows
        self.window_tokens = args.window_tokens
        self.seeds = [int(seed) for seed in args.seeds.split(",")]
        self.engine_only = args.engine_only
        if self.engine_only:
            self.seeds = self.seeds[-1:]
        self.results = self.work / "results"
        self.results.mkdir(parents=True, exist_ok=True)
        self.teacher: dict = {}
        self.last_measured = 0.0  # seconds since the epoch
        self.last_compared = 0.0
        self.rows: dict[tuple[str, int], dict] = {}
        identity = hashlib.sha256(self.tool.read_bytes())
        for path in (self.text, self.calibration,
                     self.model / "model.safetensors"):
            identity.update(path.read_bytes())
        self.identity = identity.hexdigest()[:16]
        self.engine_identity = hashlib.sha256(
            self.engine.read_bytes()).hexdigest()[:16]
        self.version, self.engine_version = (
            subprocess.run([str(program), "--version"], text=True,
                           capture_output=True, check=True).stdout.strip()
            for program in (self.tool, self.engine))

    def run(self, *command) -> str:
        done = subprocess.run([str(self.tool), *map(str, command)],
                              capture_output=True, text=True,
                              env={**os.environ, "XDG_CACHE_HOME":
                                   str(self.work / "calibration")})
        if done.returncode != 0:
            raise SystemExit(f"failed: {self.tool.name} "
                             f"{' '.join(map(str, command))}\n{done.stderr}")
        return done.stdout

    def key(self, config: settings.Config, seed: int) -> str:
        text = json.dumps([self.identity, config.identity(), seed, self.windows,
                           self.window_tokens, *self.oracle_options()])
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def oracle_options(self) -> list:
        """Returns the options for measurements other than the loss."""
        if self.engine_only:
            return []
        return ["--repeat-test", "--repeats", settings.REPEATS,
                "--key-error-windows", settings.KEY_ERROR_WINDOWS]

    def seeds_of(self, config: settings.Config) -> list[int]:
        return self.seeds if config.seeded else self.seeds[:1]

    def apply(self, config: settings.Config, seed: int,
              folder: pathlib.Path) -> None:
        if folder.exists():
            shutil.rmtree(folder)
        self.run("apply", "--quiet", "--model", self.model, "--text",
                 self.calibration, "--seed", seed, *config.apply, "--out",
                 folder)
        if config.recover is not None:
            plain = folder.with_name(folder.name + "-plain")
            folder.rename(plain)
            self.run("recover", "--quiet", "--model", plain, "--teacher",
                     self.model, "--text", self.calibration, "--seed", seed,
                     *config.recover, "--out", folder)
            shutil.rmtree(plain)

    def artifact(self, config: settings.Config, seed: int) -> pathlib.Path:
        """Returns an artifact that stays in the work folder, for the comparison with the engine."""
        folder = self.work / "artifacts" / self.key(config, seed)
        if not folder.exists():
            folder.parent.mkdir(exist_ok=True)
            part = folder.with_suffix(".part")
            self.apply(config, seed, part)
            part.rename(folder)
        return folder

    def measure(self, configs: list[settings.Config]) -> None:
        """Evaluates the configurations without a result in the work folder, a few at a time."""
        todo = []
        for config in configs:
            for seed in self.seeds_of(config):
                path = self.results / f"{self.key(config, seed)}.json"
                if path.exists():
                    self.keep(config, seed, path)
                else:
                    todo.append((config, seed, path))
        batch_size = 8
        for begin in range(0, len(todo), batch_size):
            batch = todo[begin:begin + batch_size]
            folders = []
            for index, (config, seed, _) in enumerate(batch):
                if config.baseline is not None:
                    folders.append(config.baseline)
                    continue
                if self.engine_only:
                    folders.append(self.artifact(config, seed))
                    continue
                folder = self.work / f"artifact-{index}"
                self.apply(config, seed, folder)
                folders.append(folder)
            out = self.work / "evaluation.json"
            self.run("evaluate", "--quiet", "--teacher", self.model, "--text",
                     self.text, "--windows", self.windows, "--window-tokens",
                     self.window_tokens, *self.oracle_options(), "--json",
                     out, *folders)
            report = json.loads(out.read_text())
            for (config, seed, path), row in zip(batch, report["rows"],
                                                 strict=True):
                path.write_text(json.dumps({"teacher": report["teacher"],
                                            "row": row}))
                self.keep(config, seed, path)
            for folder in self.work.glob("artifact-*"):
                shutil.rmtree(folder)
            print(f"  {begin + len(batch)}/{len(todo)}", file=sys.stderr)

    def compare(self, table: settings.Table
                ) -> list[quality_engine.Comparison]:
        """Compares the engine with the oracle, on every artifact of one seed."""
        found = []
        todo = quality_engine.served(table)
        for config in todo:
            seed = self.seeds_of(config)[-1]
            name = f"engine-{self.engine_identity}-{self.key(config, seed)}"
            path = self.results / f"{name}.json"
            if not path.exists():
                path.write_text(json.dumps(quality_engine.measure(
                    self.engine, self.artifact(config, seed), self.text,
                    self.windows, self.window_tokens)))
            self.last_compared = max(self.last_compared, path.stat().st_mtime)
            found.append(quality_engine.compare(
                config.name, json.loads(path.read_text()),
                self.rows[config.name, seed]))
            print(f"  engine {len(found)}/{len(todo)}", file=sys.stderr)
        return found

    def engine_lines(self, compared: dict[str, list[quality_engine.Comparison]]
                     ) -> list[str]:
        return quality_engine.lines(
            compared, seed=self.seeds[-1], windows=self.windows,
            window_tokens=self.window_tokens, version=self.engine_version,
            date=datetime.date.fromtimestamp(self.last_compared).isoformat())

    def keep(self, config: settings.Config, seed: int,
             path: pathlib.Path) -> None:
        found = json.loads(path.read_text())
        self.last_measured = max(self.last_measured, path.stat().st_mtime)
        self.teacher = found["teacher"]
        self.rows[config.name, seed] = found["row"]

    def row(self, config: settings.Config, field: str) -> float:
        """Returns a field, averaged over seeds."""
        values = [self.rows[config.name, seed][field]
                  for seed in self.seeds_of(config)]
        return sum(values) / len(values)

    def losses(self, config: settings.Config,
               seeds: list[int] | None = None) -> list[float]:
        return stats.mean_of_seeds([
            self.rows[config.name, seed]["window_nats"]
            for seed in seeds or self.seeds_of(config)])

    def added(self, config: settings.Config) -> stats.Interval:
        """Returns how many nats per token the loss exceeds the teacher's."""
        return stats.combine([(1, self.losses(config)),
                              (-1, self.teacher["window_nats"])])

    def spread(self, config: settings.Config) -> str:
        """Returns the largest minus the smallest mean loss of the calibration seeds."""
        values = [self.rows[config.name, seed]["nats_per_token"]
                  for seed in self.seeds_of(config)]
        return f"{max(values) - min(values):.4f}" if len(values) > 1 else "–"


def number(value: float) -> str:
    return f"{value:+.4f}"


def table_lines(study: Study, table: settings.Table) -> list[str]:
    lines = ["| configuration | bytes/token | payload | added nats/token | "
             "over seeds | top-1 | KL | repeat |",
             "|---|--:|--:|--:|--:|--:|--:|--:|"]
    for config in table.configs:
        added = study.added(config)
        size = f"{study.row(config, 'kv_bytes_per_token'):.1f}"
        fixed = study.row(config, "fixed_bytes_per_sequence")
        if fixed > 0:
            size += f" (+ {fixed / study.window_tokens:.1f})"
        lines.append(
            f"| {config.name} | {size}"
            f" | {study.row(config, 'kv_payload_bytes_per_token'):.1f}"
            f" | {number(added.mean)} ± {added.half:.4f}"
            f" | {study.spread(config)}"
            f" | {study.row(config, 'top1_agreement'):.3f}"
            f" | {study.row(config, 'kl_nats'):.4f}"
            f" | {study.row(config, 'repeat_nats_per_token'):.3f} |")
    for extra in table.extra:
        lines += ["", extra(study)]
    return lines


def check_bytes(study: Study, table: settings.Table) -> None:
    """Checks that the rows of a group have equal bytes within 1 %, both without and with the
    padding of pages."""
    for group in table.equal_bytes:
        for what in ("kv_payload_bytes_per_token", "kv_bytes_per_token"):
            sizes = [study.row(config, what) for config in group]
            if max(sizes) > 1.01 * min(sizes):
                raise SystemExit(
                    f"{table.name}: {what} must be equal within 1 %: " + ", ".join(
                        f"{config.name} {size:.1f}"
                        for config, size in zip(group, sizes)))


def difference(study: Study, claim: settings.Claim,
               seeds: list[int] | None) -> stats.Interval:
    terms = [(factor, study.losses(config, seeds if config.seeded else None))
             for factor, config in claim.terms]
    if claim.teacher:
        terms.append((claim.teacher, study.teacher["window_nats"]))
    return stats.combine(terms, claim.constant)


@dataclasses.dataclass(frozen=True)
class Judgement:
    mean: stats.Interval           # the difference, averaged over seeds
    by_seed: list[stats.Interval]  # empty if no configuration depends on the seed
    verdict: str


def judge(study: Study, claim: settings.Claim) -> Judgement:
    mean = difference(study, claim, study.seeds)
    by_seed = []
    if any(config.seeded for _, config in claim.terms):
        by_seed = [difference(study, claim, [seed]) for seed in study.seeds]
    return Judgement(mean, by_seed, stats.verdict(mean, by_seed))


def claim_lines(study: Study, claims: list[settings.Claim]) -> list[str]:
    if not claims:
        return []
    lines = ["| claim | from | difference (≤ 0 claimed) | by seed | |",
             "|---|---|--:|--:|---|"]
    paragraphs = []
    texts = quality_page.notes()
    for claim in claims:
        found = judge(study, claim)
        mark = {"confirmed": "holds", "undecided": "undecided",
                "seeds disagree": "undecided: seeds disagree",
                "contradicted": "**does not hold here**"}[found.verdict]
        seeds = ", ".join(number(one.mean) for one in found.by_seed) or "–"
        lines.append(f"| {claim.text} | {claim.source} | "
                     f"{number(found.mean.mean)} ± {found.mean.half:.4f} | "
                     f"{seeds} | {mark} |")
        if claim.name in texts:
            paragraphs += ["", f"*{claim.text}:* {texts[claim.name]}"]
        elif found.verdict == "contradicted":
            print(f"quality_notes.md has no paragraph about {claim.name}, which is "
                  "contradicted", file=sys.stderr)
    return lines + paragraphs


def chart(study: Study) -> str:
    series = {}
    for name, configs in settings.CURVES.items():
        series[name] = [
            (study.row(config, "kv_bytes_per_token"),
             study.added(config).mean, study.added(config).half)
            for config in configs]
    return quality_chart.curves(
        series, "What compression of the KV cache costs models/tiny",
        "KV bytes per token", "added nats per token",
        ("uncompressed, bf16", study.teacher["kv_bytes_per_token"]))


def document(study: Study, tables: list[settings.Table],
             compared: dict[str, list[quality_engine.Comparison]]) -> str:
    teacher = study.teacher
    exact = settings.BASELINES[0]
    lines = [
        "## The built-in model",
        "",
        "This part shows the value of each part of a method, by the tables of the papers. "
        "Every row and claim is in `bench/quality/quality_settings.py`, which was "
        "committed before the run. " + quality_page.notes()["run"],
        "",
        f"- Model `models/{study.model.name}`: "
        f"{teacher['nats_per_token']:.4f} nats per token, "
        f"{teacher['nats_per_byte']:.4f} per byte; a dense bf16 cache takes "
        f"{teacher['kv_bytes_per_token']:.0f} bytes per token.",
        f"- Text `models/tiny/{study.text.name}`, which was used neither for training nor "
        f"for calibration: {study.windows} windows of {study.window_tokens} "
        "tokens, the same for every row.",
        f"- Calibration: {settings.CALIBRATION_TOKENS} tokens of "
        f"`models/tiny/{study.calibration.name}`, seeds "
        f"{', '.join(map(str, study.seeds))}; rows are means over "
        "seeds. LoRC and pure quantization have none. Seeds choose windows of this "
        "one text, so their spread may be less than that over other texts.",
        "- Intervals have 95 %, are paired over windows, and hold for these calibrations. "
        "*By seed* has the differences of the single ones; a claim that one of them "
        "contradicts is undecided. *Over seeds* is the largest loss minus the "
        "smallest.",
        "- *Bytes/token* is for pages of the default size. The number in parentheses is "
        "the fixed size of a sequence, divided by the "
        f"{study.window_tokens} tokens of a window. *Payload* includes scales, minima "
        "and the padding of codes to whole bytes, but not the padding of a page's "
        "regions to 128 bytes.",
        "- *Repeat* is the loss on the second copy of a passage, over "
        f"{settings.REPEATS} of them. With {exact.name}, which loses almost "
        f"nothing, it is {study.row(exact, 'repeat_nats_per_token'):.3f}. This is "
        "not below the loss on new text, so the model does not copy, and the column "
        "only shows what a cache destroys.",
        "- Tests check the identities that these methods rely on "
        "(`compress/*/*_test.cc`).",
        "- Measured until "
        f"{datetime.date.fromtimestamp(study.last_measured).isoformat()} by "
        f"kvasir-compress {study.version}, {platform.machine()}, "
        f"{os.cpu_count()} CPUs, libtorch on the CPU in float32.",
        "",
    ]
    if settings.CURVES:
        lines += ["![Quality against bytes](quality.svg)", ""]
    for table in tables:
        lines += [f"### {table.title}", "", table.text, ""]
        lines += table_lines(study, table) + [""]
        judged = claim_lines(study, table.claims)
        if judged:
            lines += judged + [""]
    lines += study.engine_lines(compared)
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tiny = ROOT / "models" / "tiny"
    parser.add_argument("--tool", type=pathlib.Path, default=ROOT / "build" /
                        "release" / "kvasir-compress")
    parser.add_argument("--engine", type=pathlib.Path, default=ROOT / "build" /
                        "release" / "kvasir")
    parser.add_argument("--model", type=pathlib.Path, default=tiny)
    parser.add_argument("--evaluation", type=pathlib.Path,
                        default=tiny / "evaluation.txt")
    parser.add_argument("--calibration", type=pathlib.Path,
                        default=tiny / "calibration.txt")
    parser.add_argument("--work", type=pathlib.Path,
                        default=ROOT / "build" / "quality")
    parser.add_argument("--windows", type=int, default=settings.WINDOWS)
    parser.add_argument("--window-tokens", type=int,
                        default=settings.WINDOW_TOKENS)
    parser.add_argument("--seeds", default=settings.SEEDS)
    parser.add_argument("--only", nargs="*", default=[],
                        help="tables by name; the page is not written then")
    parser.add_argument("--engine-only", action="store_true",
                        help="makes the artifacts of the last seed, compares only the "
                        "engine's loss with the oracle's, and writes only that "
                        "section of the page")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs")
    args = parser.parse_args()
    study = Study(args)
    tables = [table for table in settings.TABLES
              if not args.only or table.name in args.only]
    if not tables:
        parser.error("no such table; there are " +
                     ", ".join(table.name for table in settings.TABLES))
    compared = {}
    for table in tables:
        print(table.title, file=sys.stderr)
        if args.engine_only:
            study.measure(quality_engine.served(table))
            compared[table.title] = study.compare(table)
            continue
        study.measure(table.configs)
        check_bytes(study, table)
        compared[table.title] = study.compare(table)
        if args.only:
            print("\n".join(table_lines(study, table) + [""] +
                            claim_lines(study, table.claims) + [""] +
                            study.engine_lines(compared)))
    if args.engine_only and not any(compared.values()):
        raise SystemExit("none of these tables has an artifact")
    if args.engine_only:
        section = "\n".join(study.engine_lines(compared)) + "\n"
        if args.only:
            print(section, end="")
        else:
            quality_engine.replace(args.out / "quality.md", section)
    elif not args.only:
        quality_page.write_part(args.out / "quality.md", "tiny",
                                document(study, tables, compared))
        (args.out / "quality.svg").write_text(chart(study), encoding="utf-8")
        print(f"wrote {args.out / 'quality.md'}", file=sys.stderr)
    wrong = [row.name for rows in compared.values() for row in rows
             if not row.sound]
    if wrong:
        raise SystemExit("the engine's loss differs too much from the oracle's: " +
                         ", ".join(wrong))


if __name__ == "__main__":
    main()
