"""Runs what bench/vs_llama_cpp.sh prepared: see there."""

import argparse
import ctypes
import hashlib
import importlib.metadata
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
    flash_attention: bool = True  # required for quantized values


# Flash attention is faster for f16 on some machines and versions, and slower on others.
CACHES = {"f16": CacheKind(1), "f16-no-flash": CacheKind(1, False),
          "q8_0": CacheKind(8), "q4_0": CacheKind(2)}
# The number of tokens that llama.cpp computes. Copies of their rows fill the rest of the context.
PROMPT_TOKENS = 64
# Targets for the ratio of our tokens/s to llama.cpp's. DENSE_TARGET is this ratio for the dense
# cache. PLAN_TARGET is for other plans, as a share of the ratio of the bytes that steps read.
DENSE_PLAN, DENSE_TARGET, PLAN_TARGET = "dense-bf16", 1.0, 0.85
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


def target_of(plan: str, cache: str, bytes_ratio: float) -> float | None:
    """Returns the target for the ratio of tokens/s, or None. The dense cache has a target only
    against f16 (with and without flash attention). The target of other plans grows with the
    ratio of bytes."""
    if plan == DENSE_PLAN:
        return DENSE_TARGET if CACHES[cache].type == CACHES["f16"].type else None
    return PLAN_TARGET * bytes_ratio


def row_of(plan, cache, batch, ours, theirs):
    """Makes a row of the table. `ours` and `theirs` are lists of samples, each with the seconds
    and bytes of a step."""
    ratio, spread, undecided = paired([s["seconds_per_step"] for s in theirs],
                                      [s["seconds_per_step"] for s in ours])
    bytes_of = lambda s: s["weight_bytes_per_step"] + s["cache_bytes_per_step"]  # noqa: E731
    bytes_ratio = bytes_of(theirs[-1]) / bytes_of(ours[-1])
    target = target_of(plan, cache, bytes_ratio)
    row = {"plan": plan, "llama_cpp_cache": cache, "batch": batch}
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
    """llama.cpp's sequences in a cache of one type. All caches share the weights."""

    def __init__(self, llama, model, options, cache):
        self.llama, self.batch, self.context = llama, options.batch, options.context
        params = llama.llama_context_default_params()
        # Each sequence has its own stream. In a common stream, every query would be
        # compared with the cells of all sequences.
        cells = options.context + 256
        kind = CACHES[cache]
        tokens = max(PROMPT_TOKENS, options.batch)
        assign(params, n_ctx=options.batch * cells, n_seq_max=options.batch,
               n_batch=tokens, n_ubatch=tokens,
               n_threads=options.threads, n_threads_batch=options.threads,
               flash_attn_type=(llama.LLAMA_FLASH_ATTN_TYPE_ENABLED if kind.flash_attention
                                else llama.LLAMA_FLASH_ATTN_TYPE_DISABLED),
               kv_unified=False, type_k=kind.type, type_v=kind.type, no_perf=True)
        self.ctx = llama.llama_init_from_model(model, params)
        if not self.ctx:
            raise RuntimeError(f"llama.cpp could not make a context of {options.batch} x {cells} "
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

    def __init__(self, options, plan, samples):
        self.plan = plan
        command = [options.kvasir, "bench", "decode", "--json", "--paced", "--random-weights",
                   "--shape", options.shape, "--weights-seed", str(options.seed),
                   "--plan", plan, "--batch", str(options.batch),
                   "--context", str(options.context), "--steps", str(options.steps),
                   "--threads", str(options.threads), "--pairs", str(samples)]
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


def make_weights(options) -> Files:
    import llama_cpp_gguf
    base = ROOT / "build" / "vs_llama_cpp" / f"{options.shape}-{options.seed}"
    # The name contains a hash of the converter, so that a changed converter makes a new file.
    converter = hashlib.sha256(Path(llama_cpp_gguf.__file__).read_bytes()).hexdigest()[:8]
    files = Files(base / "checkpoint", base / f"model-{converter}.gguf")
    if not (files.folder / "config.json").exists():
        base.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(files.folder, ignore_errors=True)
        part = files.folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        subprocess.run([options.compress, "init", "--like", options.shape, "--seed",
                        str(options.seed), "--dtype", "bf16", "--out", part], check=True)
        part.rename(files.folder)
    if not files.gguf.exists():
        for old in base.glob("model*.gguf"):
            old.unlink()
        part = files.gguf.with_suffix(".part")
        llama_cpp_gguf.convert(files.folder, part)
        part.rename(files.gguf)
    return files


def table(rows) -> str:
    head = ("plan", "llama.cpp cache", "ours, tok/s", "theirs, tok/s", "ours, MB/step",
            "theirs, MB/step", "ratio", "target", "")
    lines = [head]
    for row in rows:
        verdict = "undecided" if row["undecided"] else {True: "met", False: "missed", None: ""}[
            row.get("met")]
        lines.append((row["plan"], row["llama_cpp_cache"],
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
            for name in ("time", "cpu", "threads", "simd", "llc_bytes", "memory_bytes")}


def measure(options) -> list[dict]:
    print(f"{options.threads} threads each", file=sys.stderr)
    files = make_weights(options)
    llama, model = load_llama(options, files.gguf)
    caches = {name: LlamaCache(llama, model, options, name) for name in options.caches}
    rows = []
    for plan in options.plans:
        kvasir = Kvasir(options, plan, (options.pairs + 1) * len(caches))
        ours = {name: [] for name in caches}
        theirs = {name: [] for name in caches}
        for pair in range(-1, options.pairs):  # the first pair warms up
            for name, cache in caches.items():
                samples = [None, None]
                # The order alternates, so that neither of the two always runs first.
                for turn in ((0, 1) if pair % 2 else (1, 0)):
                    samples[turn] = kvasir.sample() if turn == 0 else cache.sample(options.steps)
                if pair < 0:
                    continue
                ours[name].append(samples[0])
                theirs[name].append(samples[1])
            print(f"{plan}: pair {pair + 1} of {options.pairs}", file=sys.stderr)
        kvasir.close()
        rows += [row_of(plan, name, options.batch, ours[name], theirs[name]) for name in caches]
    return rows


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="bench/vs_llama_cpp.sh", description="decode steps of kvasir and of llama.cpp, in turn")
    parser.add_argument("--shape", default="tinyllama-1.1b", help="model (random weights)")
    parser.add_argument("--seed", type=int, default=1, help="of the weights")
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--context", type=int, default=16384, help="tokens of each, before a step")
    parser.add_argument("--steps", type=int, default=2, help="steps of a sample")
    parser.add_argument("--pairs", type=int, default=9, help="samples of each; below 7: undecided")
    parser.add_argument("--threads", type=int, default=0,
                        help="of both; 0: as many as the cgroup allows")
    parser.add_argument("--plans", default="dense-bf16,palu-50-g4-4bit,palu-50-g1-4bit,rap-50-4bit",
                        type=lambda text: text.split(","), help="kvasir bench decode --plan")
    parser.add_argument("--caches", default=",".join(CACHES), type=lambda text: text.split(","),
                        help=f"llama.cpp's, of {', '.join(CACHES)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here, too")
    parser.add_argument("--kvasir", type=Path, default=ROOT / "build/release/kvasir")
    parser.add_argument("--compress", type=Path, default=ROOT / "build/release/kvasir-compress")
    options = parser.parse_args(arguments)
    for name in options.caches:
        if name not in CACHES:
            parser.error(f"--caches: {name} is none of {', '.join(CACHES)}")
    options.kvasir = options.kvasir.resolve()
    return options


def source_of(options) -> dict:
    """Everything that a result depends on, except for the machine."""
    names = ("shape", "seed", "batch", "context", "steps", "pairs", "threads", "plans", "caches")
    return provenance.of(options.kvasir, [f"{name}={getattr(options, name)}" for name in names])


def main() -> None:
    options = parse(sys.argv[1:])
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    try:
        source = source_of(options)
        machine = machine_of(options)
        options.threads = options.threads or machine["threads"]
        rows = measure(options)
    except (RuntimeError, ValueError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"vs_llama_cpp: {error}")
    print(table(rows))
    if options.json:
        report = {"shape": options.shape, "batch": options.batch, "context": options.context,
                  "threads": options.threads, "pairs": options.pairs, "machine": machine,
                  "llama_cpp_python": importlib.metadata.version("llama-cpp-python"),
                  "rows": rows, "run": source}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
