"""Runs the benchmarks of docs/performance.md and writes the page: see
bench/performance.sh."""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import performance_page as page
import provenance

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Run:
    name: str
    command: tuple
    pairs: int = 9
    quick: tuple = ()  # used instead of `command` with --quick, if not empty


PLANS = ("dense-8bit,rap-50,rap-50-4bit,"
         "palu-50-g4,palu-50-g1-4bit,palu-50-g4-4bit,palu-50-g4-2bit")
RUNS = [
    Run("decode", ("decode", "--breakdown"), 15),
    Run("prefill", ("prefill",), 15),
    Run("scheduler", ("scheduler",)),
    Run("serve", ("serve",)),
    Run("load", ("load",)),
    Run("capacity", ("capacity", "--shape",
        "tinyllama-1.1b,llama-2-7b,llama-3-8b", "--plan", PLANS)),
    Run("attention", ("attention",), 7),
    Run("attention_prefill", ("attention", "--prefill"), 7),
    # In these plans no heads share a latent, so attention is fast without lifting latents.
    Run("attention_prefill_deterministic",
        ("attention", "--prefill", "--deterministic", "--method",
         "dense-bf16,rap-50,rap-50-4bit,palu-50-g1"), 7),
    Run("decode_plans",
        ("decode", "--breakdown", "--batch", "8", "--context", "16384", "--plan", PLANS), 9,
        ("decode", "--breakdown", "--batch", "2", "--plan", "rap-50-4bit,palu-50-g4-4bit")),
]


def arguments_of(run: Run, quick: bool) -> list[str]:
    if quick:
        return ["bench", *(run.quick or run.command), "--json", "--quick"]
    return ["bench", *run.command, "--json", "--pairs", str(run.pairs)]


def measured(binary: Path, run: Run, arguments) -> dict:
    done = subprocess.run([binary, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def is_there(file: Path, source: dict) -> bool:
    """Returns True if the file has a result of exactly this binary, host and arguments."""
    return file.exists() and json.loads(file.read_text()).get("run") == source


def measure(options) -> None:
    options.results.mkdir(parents=True, exist_ok=True)
    for run in RUNS:
        if options.only and run.name not in options.only:
            continue
        file = options.results / f"{run.name}.json"
        arguments = arguments_of(run, options.quick)
        source = provenance.of(options.kvasir, arguments)
        again = options.fresh or run.name in options.only
        if not again and is_there(file, source):
            continue
        print(f"bench {' '.join(run.command) or run.name}", file=sys.stderr)
        part = file.with_suffix(".part")
        report = measured(options.kvasir, run, arguments) | {"run": source}
        part.write_text(json.dumps(report, indent=1) + "\n")
        part.rename(file)


def main() -> None:
    names = [run.name for run in RUNS]
    parser = argparse.ArgumentParser(prog="bench/performance.sh")
    parser.add_argument("--only", default=[], type=lambda text: text.split(","),
                        help=f"measure these again: {', '.join(names)}")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    parser.add_argument("--write", action="store_true", help="only write the page")
    parser.add_argument("--quick", action="store_true", help="a smoke test: figures mean nothing")
    parser.add_argument("--results", type=Path, default=ROOT / "build/performance")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/performance.md")
    parser.add_argument("--kvasir", type=Path, default=ROOT / "build/release/kvasir")
    options = parser.parse_args()
    options.kvasir = options.kvasir.resolve()
    if options.quick:
        for name in ("results", "out"):
            if getattr(options, name).resolve() == parser.get_default(name).resolve():
                parser.error(f"--quick: its figures mean nothing and may not be in "
                             f"{getattr(options, name)}; give --{name}")
    for name in options.only:
        if name not in names:
            parser.error(f"--only {name}: want one of {', '.join(names)}")
    try:
        if not options.write:
            measure(options)
        results = {file.stem: json.loads(file.read_text())
                   for file in sorted(options.results.glob("*.json"))}
        page.check_sources(results, options.quick)
        text = page.fill((ROOT / "bench/performance_page.md").read_text(), results)
        options.out.write_text(text)
    except subprocess.CalledProcessError as error:
        sys.exit(f"performance: {' '.join(map(str, error.cmd))}: exit code {error.returncode}")
    except (OSError, ValueError, page.PageError) as error:
        sys.exit(f"performance: {error}")


if __name__ == "__main__":
    main()
