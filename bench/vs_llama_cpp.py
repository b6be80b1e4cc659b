"""Runs what bench/vs_llama_cpp.sh prepared: see there."""

import argparse
import ctypes
import datetime
import hashlib
import importlib.metadata
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import provenance

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class CacheKind:
    type: int  # ggml's number of the type
    bits: int  # of a cached number, without scales
    flash_attention: bool = True  # required for quantized values


# Flash attention is faster for f16 on some machines and versions, and slower on others.
CACHES = {"f16": CacheKind(1, 16), "f16-no-flash": CacheKind(1, 16, False),
          "q8_0": CacheKind(8, 8), "q4_0": CacheKind(2, 4)}
# Our plans that have a target, with their bits.
PLAN_BITS = {"dense-bf16": 16, "dense-8bit": 8, "rotated-4bit": 4}
# The target for the ratio of our tokens/s to llama.cpp's.
TARGET = 1.2
# The number of tokens that llama.cpp computes. Copies of their rows fill the rest of the context.
PROMPT_TOKENS = 64
SPREAD, FEWEST_PAIRS = 0.15, 7


# ------------------------------------------------------------------ arithmetic

def quantile(values, q):
    ordered = sorted(values)
    return ordered[int(q * (len(ordered) - 1) + 0.5)]


def paired(numerators, denominators):
    """Returns (median, spread, undecided) of the pairs' ratios, as bench/paired.h defines them."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    median = quantile(ratios, 0.5)
    spread = (quantile(ratios, 0.75) - quantile(ratios, 0.25)) / median
    return median, spread, spread > SPREAD or len(ratios) < FEWEST_PAIRS


def target_of(plan: str, cache: str) -> float | None:
    """Returns the target for the ratio of tokens/s, or None. A plan has a target against caches
    that have at least as many bits as it has."""
    return TARGET if CACHES[cache].bits >= PLAN_BITS.get(plan, float("inf")) else None


def row_of(plan, cache, context, batch, ours, theirs):
    """Makes a row of the table. `ours` and `theirs` are lists of samples, each with the seconds
    and bytes of a step."""
    ratio, spread, undecided = paired([s["seconds_per_step"] for s in theirs],
                                      [s["seconds_per_step"] for s in ours])
    bytes_of = lambda s: s["weight_bytes_per_step"] + s["cache_bytes_per_step"]  # noqa: E731
    bytes_ratio = bytes_of(theirs[-1]) / bytes_of(ours[-1])
    target = target_of(plan, cache)
    row = {"context": context, "batch": batch, "plan": plan, "llama_cpp_cache": cache}
    for name, samples in (("kvasir", ours), ("llama_cpp", theirs)):
        seconds = statistics.median(s["seconds_per_step"] for s in samples)
        row[f"{name}_tokens_per_second"] = batch / seconds
        row[f"{name}_bytes_per_step"] = bytes_of(samples[-1])
    row |= {"bytes_ratio": bytes_ratio, "ratio": ratio, "spread": spread, "undecided": undecided}
    if target is not None:
        row |= {"target": target, "met": not undecided and ratio >= target}
    return row


# ------------------------------------------------------------------- llama.cpp

def assign(struct, **fields) -> None:
    """Sets fields of a C struct, and raises an error for a field that the library does not have.
    ctypes by itself would silently ignore such a field."""
    known = {name for name, *_ in struct._fields_}
    for name, value in fields.items():
        if name not in known:
            raise RuntimeError(f"{type(struct).__name__} has no field {name}")
        setattr(struct, name, value)


class LlamaCache:
    """llama.cpp's sequences in a cache of one type."""

    def __init__(self, llama, model, options, cache, context, batch):
        self.llama, self.batch, self.context = llama, batch, context
        params = llama.llama_context_default_params()
        # Each sequence has its own stream. In a common stream, every query would be
        # compared with the cells of all sequences.
        cells = context + 256
        kind = CACHES[cache]
        tokens = max(PROMPT_TOKENS, batch)
        assign(params, n_ctx=batch * cells, n_seq_max=batch,
               n_batch=tokens, n_ubatch=tokens,
               n_threads=options.threads, n_threads_batch=options.threads,
               flash_attn_type=(llama.LLAMA_FLASH_ATTN_TYPE_ENABLED if kind.flash_attention
                                else llama.LLAMA_FLASH_ATTN_TYPE_DISABLED),
               kv_unified=False, type_k=kind.type, type_v=kind.type, no_perf=True)
        self.ctx = llama.llama_init_from_model(model, params)
        if not self.ctx:
            raise RuntimeError(f"llama.cpp could not make a context of {batch} x {cells} "
                               f"cells of {cache}")
        self.weight_bytes = options.llama_weight_bytes
        self.cell_bytes = self._fill()

    def _decode(self, tokens, sequences, positions):
        llama = self.llama
        batch = llama.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (token, sequence, position) in enumerate(
                zip(tokens, sequences, positions, strict=True)):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = 1
        status = llama.llama_decode(self.ctx, batch)
        llama.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode failed with status {status}")

    def _fill(self):
        from llama_cpp_cache import longer
        llama = self.llama
        count = min(PROMPT_TOKENS, self.context)
        self._decode([(7 * i) % 1000 for i in range(count)], [0] * count, range(count))
        size = llama.llama_state_seq_get_size(self.ctx, 0)
        state = (ctypes.c_uint8 * size)()
        llama.llama_state_seq_get_data(self.ctx, state, size, 0)
        cell_bytes = 0
        for sequence in range(self.batch):
            filled = longer(bytes(state), self.context, seed=sequence)
            cell_bytes = filled.cell_bytes
            data = (ctypes.c_uint8 * len(filled.state)).from_buffer_copy(filled.state)
            if llama.llama_state_seq_set_data(self.ctx, data, len(filled.state), sequence) == 0:
                raise RuntimeError(f"llama.cpp refused the state of sequence {sequence}")
            memory = llama.llama_get_memory(self.ctx)
            last = llama.llama_memory_seq_pos_max(memory, sequence)
            if last != self.context - 1:
                raise RuntimeError(f"sequence {sequence} ends at position {last}, "
                                   f"want {self.context - 1}")
        return cell_bytes

    def sample(self, steps):
        """Times steps that add one token to each sequence, and then removes these tokens from
        the cache."""
        start = time.perf_counter()
        for step in range(steps):
            self._decode([11 + step] * self.batch, range(self.batch),
                         [self.context + step] * self.batch)
            self.llama.llama_synchronize(self.ctx)
        seconds = time.perf_counter() - start
        memory = self.llama.llama_get_memory(self.ctx)
        for sequence in range(self.batch):
            self.llama.llama_memory_seq_rm(memory, sequence, self.context, -1)
        tokens = self.batch * (self.context + (steps + 1) / 2)
        return {"seconds_per_step": seconds / steps, "weight_bytes_per_step": self.weight_bytes,
                "cache_bytes_per_step": tokens * self.cell_bytes}

    def close(self):
        self.llama.llama_free(self.ctx)


def load_llama(options, gguf_file):
    import llama_cpp as llama
    silent = llama.llama_log_callback(lambda level, text, user: None)
    llama.llama_log_set(silent, ctypes.c_void_p(0))
    options.keep_alive = silent
    llama.llama_backend_init()
    params = llama.llama_model_default_params()
    # Loads the weights into allocated memory before the first step, as Kvasir does.
    assign(params, load_mode=llama.LLAMA_LOAD_MODE_NONE)
    model = llama.llama_model_load_from_file(str(gguf_file).encode(), params)
    if not model:
        raise RuntimeError(f"llama.cpp did not load {gguf_file}")
    import gguf
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(gguf_file).tensors}
    # A step reads every tensor completely, except an embedding that is not also the head: it
    # reads only a few rows of the embedding.
    if "output.weight" in sizes:
        del sizes["token_embd.weight"]
    options.llama_weight_bytes = sum(sizes.values())
    return llama, model


# ---------------------------------------------------------------------- kvasir

class Kvasir:
    """A process of `kvasir bench decode --paced`, which takes a sample at each request."""

    def __init__(self, options, plan, context, batch):
        self.plan = plan
        command = [options.kvasir, "bench", "decode", "--json", "--paced", "--random-weights",
                   "--shape", options.shape, "--weights-seed", str(options.seed),
                   "--plan", plan, "--batch", batch, "--context", context,
                   "--steps", options.steps, "--threads", options.threads,
                   "--pairs", options.pairs]
        self.process = subprocess.Popen([str(part) for part in command], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._read()

    def _read(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"kvasir bench decode --plan {self.plan} ended; its error is above")
        return json.loads(line)

    def sample(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self._read()

    def close(self):
        self.process.stdin.close()
        self.process.stdout.read()
        if self.process.wait() != 0:
            raise RuntimeError(f"kvasir bench decode --plan {self.plan}: exit code "
                               f"{self.process.returncode}; its error is above")


# ------------------------------------------------------------------------ main

@dataclass
class Files:
    folder: Path
    gguf: Path


def make_weights(options) -> Path:
    """Returns a GGUF file with random weights."""
    import llama_cpp_gguf
    base = ROOT / "build" / "vs_llama_cpp" / f"{options.shape}-{options.seed}"
    folder = base / "checkpoint"
    # The name contains a hash of the converter, so that a changed converter makes a new file.
    converter = hashlib.sha256(Path(llama_cpp_gguf.__file__).read_bytes()).hexdigest()[:8]
    gguf = base / f"{options.weights}-{converter}.gguf"
    if not (folder / "config.json").exists():
        base.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        subprocess.run([options.compress, "init", "--like", options.shape, "--seed",
                        str(options.seed), "--dtype", "bf16", "--out", part], check=True)
        part.rename(folder)
    if not gguf.exists():
        for old in base.glob(f"{options.weights}-*.gguf"):
            old.unlink()
        part = gguf.with_suffix(".part")
        llama_cpp_gguf.convert(folder, part, options.weights)
        part.rename(gguf)
    return gguf


def table(rows) -> str:
    head = ("context", "batch", "plan", "llama.cpp cache", "ours, tok/s", "theirs, tok/s", "ours, MB/step",
            "theirs, MB/step", "ratio", "target", "")
    lines = [head]
    for row in rows:
        verdict = "undecided" if row["undecided"] else {True: "met", False: "missed", None: ""}[
            row.get("met")]
        lines.append((str(row["context"]), str(row["batch"]), row["plan"], row["llama_cpp_cache"],
                      f"{row['kvasir_tokens_per_second']:.1f}",
                      f"{row['llama_cpp_tokens_per_second']:.1f}",
                      f"{row['kvasir_bytes_per_step'] / 1e6:.0f}",
                      f"{row['llama_cpp_bytes_per_step'] / 1e6:.0f}", f"{row['ratio']:.2f}",
                      f"{row['target']:.2f}" if "target" in row else "", verdict))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
                     .rstrip() for line in lines)


def machine_of(options) -> dict:
    """Returns the machine as Kvasir reports it. The number of threads is the cgroup's limit."""
    done = subprocess.run([options.kvasir, "bench", "scheduler", "--quick", "--json"],
                          stdout=subprocess.PIPE, text=True, check=True)
    machine = json.loads(done.stdout)["machine"]
    return {name: machine[name]
            for name in ("cpu", "threads", "simd", "llc_bytes", "memory_bytes")}


def measure_pairs(options, kvasir, cache):
    """Returns the samples of both. They take turns, and the order alternates, so that neither
    always runs first."""
    ours, theirs = [], []
    for pair in range(-1, options.pairs):  # the first pair warms up
        samples = [None, None]
        for turn in ((0, 1) if pair % 2 else (1, 0)):
            samples[turn] = kvasir.sample() if turn == 0 else cache.sample(options.steps)
        if pair >= 0:
            ours.append(samples[0])
            theirs.append(samples[1])
    return ours, theirs


def measure(options):
    """Yields the rows. At most one cache of either side is in memory."""
    print(f"{options.threads} threads each", file=sys.stderr)
    llama, model = load_llama(options, make_weights(options))
    for context, batch, name in itertools.product(options.context, options.batch, options.caches):
        cache = LlamaCache(llama, model, options, name, context, batch)
        for plan in options.plans:
            print(f"{batch} x {context}: {plan} against {name}", file=sys.stderr)
            kvasir = Kvasir(options, plan, context, batch)
            ours, theirs = measure_pairs(options, kvasir, cache)
            kvasir.close()
            yield row_of(plan, name, context, batch, ours, theirs)
        cache.close()


KEYS = ("context", "batch", "plan", "llama_cpp_cache")


def merged(old: dict, new: dict) -> dict:
    """Returns the report `new` with the rows of `old` that it does not have. Raises ValueError if
    they differ in anything except their rows and dates."""
    for name in new:
        if name not in ("rows", "date") and old.get(name) != new[name]:
            raise ValueError(f"{name} of the file's rows is {json.dumps(old.get(name))}, and of this "
                             f"run {json.dumps(new[name])}: give another file")
    rows = {tuple(row[key] for key in KEYS): row for row in old["rows"] + new["rows"]}
    return new | {"rows": sorted(rows.values(), key=lambda row: (row["context"], row["batch"]))}


def write_rows(file: Path, report: dict) -> None:
    if file.exists():
        report = merged(json.loads(file.read_text()), report)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.rename(file)


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="bench/vs_llama_cpp.sh", description="decode steps of kvasir and of llama.cpp, in turn")
    parser.add_argument("--shape", default="tinyllama-1.1b", help="model (random weights)")
    parser.add_argument("--seed", type=int, default=1, help="of the weights")
    numbers = lambda text: [int(number) for number in text.split(",")]  # noqa: E731
    parser.add_argument("--batch", type=numbers, default=[1, 8], help="numbers of sequences: 1,8")
    parser.add_argument("--context", type=numbers, default=[8192, 32768],
                        help="tokens of each sequence before a step: 8192,32768")
    parser.add_argument("--steps", type=int, default=2, help="steps of a sample")
    parser.add_argument("--pairs", type=int, default=9, help="samples of each; below 7: undecided")
    parser.add_argument("--threads", type=int, default=0,
                        help="of both; 0: as many as the cgroup allows")
    parser.add_argument("--plans", default=",".join(PLAN_BITS), type=lambda text: text.split(","),
                        help="kvasir bench decode --plan")
    parser.add_argument("--caches", default=",".join(CACHES), type=lambda text: text.split(","),
                        help=f"llama.cpp's, of {', '.join(CACHES)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here, and keep its other rows")
    parser.add_argument("--weights", choices=("f16", "bf16"), default="bf16",
                        help="type of llama.cpp's weights; ours are always bf16")
    parser.add_argument("--kvasir", type=Path, default=ROOT / "build/release/kvasir")
    parser.add_argument("--compress", type=Path, default=ROOT / "build/release/kvasir-compress")
    options = parser.parse_args(arguments)
    for name in options.caches:
        if name not in CACHES:
            parser.error(f"--caches: {name} is none of {', '.join(CACHES)}")
    options.kvasir = options.kvasir.resolve()
    return options


def report_of(options, machine, rows) -> dict:
    report = {name: getattr(options, name)
              for name in ("shape", "seed", "weights", "steps", "pairs", "threads")}
    return report | {"llama_cpp_python": importlib.metadata.version("llama-cpp-python"),
                     "binary": provenance.binary_hash(options.kvasir), "machine": machine,
                     "date": datetime.date.today().isoformat(), "rows": rows}


def main() -> None:
    options = parse(sys.argv[1:])
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    rows = []
    try:
        machine = machine_of(options)
        options.threads = options.threads or machine["threads"]
        for row in measure(options):
            rows.append(row)
            if options.json:
                write_rows(options.json, report_of(options, machine, [row]))
    except (RuntimeError, ValueError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"vs_llama_cpp: {error}")
    print(table(rows))


if __name__ == "__main__":
    main()
