"""Stage `bench` of gpu_check. It measures attention with models' shapes, for decoding and for a
prompt, and decode steps on a GPU. It compares them with the device's own copy or products, and
with PyTorch and FlashInfer, if installed, over a dense bf16 cache. All are measured in turn,
row by row, in one run. bench/gpu/gpu_page.py writes a section of docs/performance.md from the
figures, which are JSON.

Every figure is a median over pairs. It is undecided if it spreads over 15 %, or has fewer
than seven pairs.
"""

import argparse
import gc
import json
import math
import os
import pathlib
import select
import statistics
import subprocess
import sys
import time
import warnings

BEGIN = time.monotonic()  # before PyTorch is imported, because this time counts, too
# The part of --seconds that is reserved for a proper end, before the caller kills this process.
RESERVE_SECONDS = 5.0
PLANS = ["dense-bf16", "dense-8bit", "dense-4bit", "rotated-4bit", "rap-50", "rap-50-4bit"]
SHAPES = {  # query heads, KV heads, dims of a head
    "llama-3-8b": (32, 8, 128), "llama-2-7b": (32, 32, 128), "kvasir-tiny": (16, 8, 32),
}
# The most important rows come first, because time may be up before the last.
ROWS = [(16, 32768), (1, 32768), (64, 4096), (1, 4096), (16, 4096), (64, 32768), (1, 131072), (16, 131072), (64, 131072)]
# Targets, as a share of the copy's bandwidth, for rows that read at least this many tokens.
FEWEST_TOKENS = 32768
SHARES = {"dense-bf16": 0.85, "dense-8bit": 0.75, "dense-4bit": 0.65, "rotated-4bit": 0.65}
# Targets, as a speedup over the fastest dense bf16 attention.
SPEEDUPS = {"dense-4bit": 2.6, "rotated-4bit": 2.6, "rap-50": 1.7, "rap-50-4bit": 4.5}
# Attention of a whole prompt, with targets as a share of the rate of mma.sync.
PREFILL_SHAPE, PREFILL_TOKENS = "llama-3-8b", 8192
PREFILL_SHARES = {"dense-bf16": 0.6, "dense-8bit": 0.6, "rotated-4bit": 0.6}
MULTIPLY_STEPS = 40000  # these products take milliseconds
# Decode steps of models with random weights: the plans, and (batch, context, target). The target is
# the least possible time, given the bytes that are read, as a share of the measured time. With the
# weights, a dense cache of 32 x 16K tokens does not fit into 80 GiB, but half of it does.
DECODE_SHAPE, DECODE_LAYERS, DECODE_WEIGHTS = "llama-3-8b", 32, 16.1e9
DECODE_PLANS = ["dense-bf16", "rotated-4bit", "rap-50-4bit"]
DECODE_ROWS = [(1, 4096, 0.75), (16, 16384, None), (32, 16384, 0.6)]
# Sizes that Hugging Face's decoder of a shape needs in addition.
DECODERS = {
    "llama-3-8b": {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
                   "num_hidden_layers": DECODE_LAYERS, "max_position_embeddings": 1 << 17},
    "kvasir-tiny": {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 6},
}
# Bytes of all-reduces: as in a decode step, as in a long prompt, and enough to show the bandwidth of
# the links between GPUs.
ALL_REDUCE_BYTES = [16 << 10, 1 << 20, 256 << 20]
PAIRS, FEWEST_PAIRS, MOST_SPREAD = 9, 7, 0.15
PAGE = 64
COPY_BYTES = 1 << 30


class Unserved(Exception):
    """The GPU has no kernel for the request."""


class Failure(Exception):
    pass


class TimeUp(Exception):
    """There is no time left; the current measurement is dropped."""


class Bench:
    """A process of bench_gpu, which is killed when the time is up."""

    def __init__(self, arguments):
        self.deadline = BEGIN + arguments.seconds - RESERVE_SECONDS
        self.process = subprocess.Popen([arguments.programs / "bin/bench_gpu"], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
        self.facts = self.ask(do="open", device=arguments.device,
                              module=str(arguments.programs / "bin/kvasir-emulated.so"))

    def ask(self, **request):
        if self.is_over():
            raise TimeUp
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
        except OSError:
            raise self.ended(request) from None
        # An answer is one line and is read completely, so no part of this answer is buffered yet.
        if not select.select([self.process.stdout], [], [], max(0.0, self.seconds_left()))[0]:
            self.process.kill()
            raise TimeUp
        line = self.process.stdout.readline()
        if not line:
            raise self.ended(request)
        answer = json.loads(line)
        if "error" in answer:
            raise (Unserved if answer["unimplemented"] else Failure)(answer["error"])
        return answer

    def ended(self, request):
        return Failure(f"bench_gpu ended with exit code {self.process.wait()} at the request {request}")

    def seconds_left(self):
        return self.deadline - time.monotonic()

    def is_over(self):
        return self.seconds_left() <= 0

    def close(self):
        """Returns the exit code of the process; 0 if it was killed because the time is up."""
        if self.is_over():
            self.process.kill()
            self.process.wait()
            return 0
        try:
            self.process.stdin.close()
        except OSError:  # caused by a request after the process ended
            pass
        return self.process.wait()


# ------------------------------------------------------------------ baselines

class Torch:
    """PyTorch's attention over a dense bf16 cache, with each of its back ends. The queries are one
    new token of each sequence, or whole prompts. For one token, FlashInfer's attention is also
    measured if it is installed. Every sample reads another cache."""

    def __init__(self):
        import torch
        from torch.nn.attention import SDPBackend

        if not torch.cuda.is_available():
            raise ImportError("PyTorch sees no GPU")
        self.torch = torch
        self.backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
                         "efficient": SDPBackend.EFFICIENT_ATTENTION}
        self.version = f"PyTorch {torch.__version__}"
        self.told = set()
        try:
            import flashinfer

            self.flashinfer = flashinfer
            self.version += f", FlashInfer {flashinfer.__version__}"
        except ImportError:
            self.flashinfer = None

    def make(self, shape, batch, context, sets, new_tokens=1):
        torch = self.torch
        heads, kv_heads, dim = SHAPES[shape]
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.query = torch.randn(batch, heads, new_tokens, dim, **options)
        self.caches = [(torch.randn(batch, kv_heads, context, dim, **options),
                        torch.randn(batch, kv_heads, context, dim, **options)) for _ in range(sets)]
        self.next = 0
        self.grouped = heads != kv_heads
        calls = {f"torch_{name}": self.sdpa(backend, new_tokens > 1) for name, backend in self.backends.items()}
        if self.flashinfer is not None and new_tokens == 1:
            calls["flashinfer"] = self.paged(batch, context, heads, kv_heads, dim)
        self.calls = {}
        for name, call in calls.items():
            why = self.refusal(call)
            if not why:
                self.calls[name] = call
            elif (name, shape, why) not in self.told:
                self.told.add((name, shape, why))
                print(f"  {name} does not serve {shape}: {why}", flush=True)
        return list(self.calls)

    def refusal(self, call):
        """Runs the call once to warm it up. Returns an empty text, or why the call fails. If it
        fails, PyTorch also warns about each of its back ends; these warnings are dropped."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                self.time(call)
            except (RuntimeError, ValueError, TypeError) as error:
                return first_line(error)
        for warning in said:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        return ""

    def sdpa(self, backend, causal):
        from torch.nn.attention import sdpa_kernel

        def call(key, value):
            with sdpa_kernel(backend):
                return self.torch.nn.functional.scaled_dot_product_attention(
                    self.query, key, value, is_causal=causal, enable_gqa=self.grouped)
        return call

    def paged(self, batch, context, heads, kv_heads, dim):
        torch, pages = self.torch, math.ceil(context / PAGE)
        wrapper = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "HND")
        first = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * pages
        wrapper.plan(first, torch.arange(batch * pages, dtype=torch.int32, device="cuda"),
                     torch.full((batch,), (context - 1) % PAGE + 1, dtype=torch.int32, device="cuda"),
                     heads, kv_heads, dim, PAGE, data_type=torch.bfloat16)

        def call(key, value):
            # The same bytes, viewed as pages.
            shape = (batch * pages, kv_heads, PAGE, dim)
            return wrapper.run(self.query[:, :, 0], (key.view(shape), value.view(shape)))
        return call

    def time(self, call):
        key, value = self.caches[self.next]
        self.next = (self.next + 1) % len(self.caches)
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call(key, value)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3

    def sample(self, name):
        return self.time(self.calls[name])

    def drop(self):
        self.caches, self.calls = [], {}
        self.torch.cuda.empty_cache()


class NoTorch:
    def __init__(self, why):
        self.version = f"none: {why}"

    def make(self, *_, **__):
        return []

    def drop(self):
        pass


class Transformers:
    """Hugging Face's Llama of a shape, with random bf16 weights, a static cache full of random
    numbers, and PyTorch's attention. It is not compiled, which would take much of the stage's
    time. Each step picks the likeliest token of each sequence and continues with it."""

    def __init__(self, torch, device="cuda"):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched
        import transformers

        self.torch, self.transformers, self.device = torch, transformers, device
        self.version = f"transformers {transformers.__version__}"
        self.model, self.rows = None, {}

    def load(self, shape):
        heads, kv_heads, dim = SHAPES[shape]
        config = self.transformers.LlamaConfig(
            **DECODERS[shape], num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim,
            tie_word_embeddings=False)
        with self.torch.device(self.device):
            self.model = self.transformers.AutoModelForCausalLM.from_config(
                config, dtype=self.torch.bfloat16, attn_implementation="sdpa").eval()

    def make(self, batch, context, steps):
        """Makes the cache of a row. Each sample runs `steps` steps after `context` tokens."""
        torch, config = self.torch, self.model.config
        cache = self.transformers.StaticCache(config=config, max_cache_len=context + steps)
        cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, torch.bfloat16, self.device)
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        ids = torch.randint(config.vocab_size, (batch, 1), device=self.device)
        self.rows[batch, context] = {"cache": cache, "ids": ids, "steps": steps}
        self.sample(batch, context)

    def has(self, batch, context):
        return (batch, context) in self.rows

    def sample(self, batch, context):
        """Returns the seconds that one step takes."""
        row = self.rows[batch, context]
        for layer in row["cache"].layers:
            layer.cumulative_length.fill_(context)
        seconds = self.clock()
        with self.torch.no_grad():
            for _ in range(row["steps"]):
                logits = self.model(input_ids=row["ids"], past_key_values=row["cache"], use_cache=True).logits
                row["ids"].copy_(logits[:, -1:].argmax(-1))
        return seconds() / row["steps"]

    def clock(self):
        """Starts a clock that uses the GPU's events. The returned function returns the seconds since."""
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()

        def seconds():
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) * 1e-3
        return seconds

    def drop(self, batch, context):
        if self.rows.pop((batch, context), None) is not None:
            self.free()

    def close(self):
        self.model, self.rows = None, {}
        self.free()

    def free(self):
        gc.collect()
        if self.torch.cuda.is_available():
            self.torch.cuda.empty_cache()


def decoder_baseline(others):
    """Returns (Transformers or None, its version or why there is none)."""
    if isinstance(others, NoTorch):
        return None, others.version
    try:
        baseline = Transformers(others.torch)
    except Exception as error:  # an error of a package must not fail our rows
        return None, f"none: {first_line(error)}"
    return baseline, baseline.version


def first_line(error):
    return (str(error) or type(error).__name__).splitlines()[0]


def baselines(device):
    if not device.startswith("cuda"):
        return NoTorch(f"the device is {device}")
    try:
        return Torch()
    except ImportError as error:
        return NoTorch(error)


# ---------------------------------------------------------------------- rows

def middle(values):
    """Returns {median, spread}. The spread is the range of the middle half, relative to the median."""
    ordered = sorted(values)

    def quantile(share):
        return ordered[int(share * (len(ordered) - 1) + 0.5)]

    median = statistics.median(ordered)
    return {"median": median, "spread": (quantile(0.75) - quantile(0.25)) / median if median else 0.0}


def undecided(*ratios, pairs):
    return pairs < FEWEST_PAIRS or any(ratio["spread"] > MOST_SPREAD for ratio in ratios)


def judged(row, name, value, target, pairs):
    """Puts a ratio, its spread and its target into the row."""
    row[name], row[f"{name}_spread"] = value["median"], value["spread"]
    if target is None:
        return
    open_ = undecided(value, pairs=pairs)
    row[f"{name}_target"], row[f"{name}_undecided"] = target, open_
    row[f"{name}_met"] = not open_ and value["median"] >= target


class Run:
    def __init__(self, arguments, bench, others, decoder=(None, "none")):
        """`decoder` is the result of decoder_baseline."""
        self.arguments, self.bench, self.others = arguments, bench, others
        self.decoder, decoder_version = decoder
        self.decoder_keeps = 0.0  # bytes of its weights and caches that stay in memory next to ours
        self.alone = {}  # (batch, context) -> seconds, for rows without room next to ours
        self.out_of_time, self.whole_shapes = [], []
        self.pairs = 2 if arguments.quick else PAIRS
        self.copy_bytes = 1 << 16 if arguments.quick else COPY_BYTES
        self.report = {
            "tests": [],
            "figures": {"machine": bench.facts, "baselines": others.version, "decoder": decoder_version, "pairs": self.pairs,
                        "quick": arguments.quick, "attention": [], "prefill": [], "decode": [], "all_reduce": [],
                        "left_out": []}}

    def write(self):
        part = self.arguments.json.with_suffix(".part")
        part.write_text(json.dumps(self.report))
        part.rename(self.arguments.json)

    def leave_out(self, name, why):
        self.report["figures"]["left_out"].append({"row": name, "why": why})
        print(f"  {name}: {why}", flush=True)
        self.write()

    def test(self, name, status, text=""):
        self.report["tests"].append({"name": name, "status": status, **({"text": text} if text else {})})
        self.write()

    def attempt(self, name, measure, left=None):
        """Measures a row, or notes why there is none. `left` names the rows that are not measured yet."""
        try:
            measure()
            self.test(name, "passed")
        except TimeUp:
            for row in left() if left else [name]:
                self.no_time(row)
        except Unserved as error:
            self.leave_out(name, f"not served: {error}")
            self.test(name, "skipped", str(error))
        except Failure as error:
            self.leave_out(name, f"failed: {error}")
            self.test(name, "failed", str(error))

    def all_of(self, name, measure):
        """Prepares and measures several rows. Returns True if neither an error nor the time cut it short."""
        try:
            measure()
            return True
        except TimeUp:
            self.no_time(name)
        except Failure as error:
            self.leave_out(name, f"failed: {error}")
            self.test(name, "failed", str(error))
        return False

    def no_time(self, name):
        self.out_of_time.append(name)
        self.leave_out(name, "not run: the time is up")

    def end(self):
        """Ends the run. If time was too short, the run fails only if no shape has all of its rows."""
        if self.out_of_time and not self.whole_shapes:
            self.test("bench.time", "failed", f"{len(self.out_of_time)} rows were not run, and no shape has "
                      "all of its attention rows: give more --seconds")
        self.write()
        if self.bench.close():
            self.test("bench.end", "failed", "bench_gpu ended with an error")

    def bandwidth(self):
        return self.bench.ask(do="copy", bytes=self.copy_bytes)["bytes_per_second"]

    def products(self):
        return self.bench.ask(do="multiply", steps=2 if self.arguments.quick else MULTIPLY_STEPS)["operations_per_second"]

    def free_bytes(self):
        """Returns the bytes that caches may take. Unlimited on an emulated device, whose rows are small."""
        free = self.bench.facts["free_bytes"]
        return 0.9 * free - 2 * self.copy_bytes if free else math.inf

    def attention(self, shapes, rows):
        for shape in shapes:
            before = len(self.out_of_time)
            whole = [self.all_of(f"attention.{shape}.b{batch}.c{context}", lambda row=(batch, context): self.case(shape, *row))
                     for batch, context in rows]
            if all(whole) and len(self.out_of_time) == before:
                self.whole_shapes.append(shape)

    def prefill(self, shape, tokens):
        self.all_of(f"prefill.{shape}.c{tokens}", lambda: self.case(shape, 1, tokens, new_tokens=tokens))

    def case(self, shape, batch, context, new_tokens=1):
        """Measures a row for each plan, over the same dense caches, for decoding or for a prompt."""
        free = self.free_bytes()
        slots = batch * math.ceil(context / PAGE) * PAGE
        plans, kind, size = (PLANS, "attention", f"b{batch}.c{context}") if new_tokens == 1 else (
            PREFILL_SHARES, "prefill", f"c{context}")
        bytes_of = {plan: self.bench.ask(do="bytes", shape=shape, plan=plan)["bytes_per_slot"] for plan in plans}
        # In decoding, arenas are read in turn that together have four times the L2 cache. A prompt reads what it has
        # just written.
        arenas = {plan: max(1, math.ceil(4 * self.bench.facts["l2_bytes"] / (slots * each))) if new_tokens == 1 else 1
                  for plan, each in bytes_of.items()}
        dense = slots * bytes_of["dense-bf16"] * arenas["dense-bf16"]
        dense *= 1 if isinstance(self.others, NoTorch) else 2
        case = f"{kind}.{shape}.{size}"
        if dense > free:
            return self.leave_out(case, f"does not fit: {dense / 2**30:.1f} GiB of dense caches, "
                                        f"{free / 2**30:.1f} GiB are free")
        try:
            self.bench.ask(do="make", name="dense", shape=shape, plan="dense-bf16", slots=slots,
                           arenas=arenas["dense-bf16"])
        except (Failure, Unserved) as error:
            self.leave_out(case, f"failed: {error}")
            return self.test(case, "failed", str(error))
        others = []
        self.try_baseline(f"{case}.baselines", lambda: others.extend(
            self.others.make(shape, batch, context, arenas["dense-bf16"], new_tokens=new_tokens)))
        for plan in plans:
            name = f"{kind}.{shape}.{plan}.{size}"
            if plan != "dense-bf16" and dense + slots * bytes_of[plan] * arenas[plan] > free:
                self.leave_out(name, "does not fit beside the dense caches")
                continue
            own = {"shape": shape, "plan": plan, "slots": slots, "arenas": arenas[plan]}
            launch = {"batch": batch, "context": context, "new_tokens": new_tokens}
            self.attempt(name, lambda own=own, launch=launch, plan=plan: (
                self.row(own, launch, others, bytes_of[plan]) if kind == "attention" else
                self.prefill_row(own, launch, others)))
        self.try_baseline(f"{case}.baselines", self.others.drop)
        if not self.bench.is_over():
            self.bench.ask(do="drop", name="dense")
        return None

    def samples(self, own, launch, others, ceiling):
        """Returns {name: a value for each pair}, and the kernels that ran. The names are the ceiling,
        attention over the dense cache, our own attention, only its kernel, and the others."""
        name_of_own = "dense" if own["plan"] == "dense-bf16" else "own"
        if name_of_own == "own":
            self.bench.ask(do="make", name="own", **own)
        samples = {name: [] for name in ("ceiling", "dense", "own", "kernel", *others)}
        for pair in range(-1, self.pairs):
            took = {"ceiling": ceiling()}
            order = ["dense", name_of_own] if pair % 2 else [name_of_own, "dense"]
            for name in dict.fromkeys(order):
                done = self.bench.ask(do="run", name=name, **launch)
                took[name] = done["seconds"]
                if name == name_of_own:
                    took["own"], took["kernel"] = done["seconds"], done["kernel_seconds"]
                    by = {"attended_by": done["attended_by"], "why": done["why"]}
            for name in others:
                took[name] = self.others.sample(name)
            if pair >= 0:  # the first warms up
                for name in samples:
                    samples[name].append(took[name])
        if name_of_own == "own":
            self.bench.ask(do="drop", name="own")
        return samples, by

    def beside(self, row, samples, others, target):
        """Puts the baselines, and our speedup over the fastest of them, into the row."""
        row["baselines_us"] = {name: middle(samples[name])["median"] * 1e6 for name in ("dense", *others)}
        best = min(row["baselines_us"], key=row["baselines_us"].get)
        row["best_baseline"] = best
        judged(row, "speedup", middle([base / took for base, took in zip(samples[best], samples["own"])]),
               target, self.pairs)

    def row(self, own, launch, others, bytes_per_slot):
        samples, by = self.samples(own, launch, others, self.bandwidth)
        shape, plan, batch, context = own["shape"], own["plan"], launch["batch"], launch["context"]
        read = bytes_per_slot * batch * context
        row = {"shape": shape, "plan": plan, "batch": batch, "context": context, "bytes": read, "arenas": own["arenas"],
               "us": middle(samples["own"])["median"] * 1e6,
               "copy_bytes_per_second": middle(samples["ceiling"])["median"], **by}
        filled = batch * context >= FEWEST_TOKENS
        judged(row, "share", middle([read / (took * copy) for took, copy in zip(samples["kernel"], samples["ceiling"])]),
               SHARES.get(plan) if filled else None, self.pairs)
        self.beside(row, samples, others, SPEEDUPS.get(plan) if filled else None)
        self.report["figures"]["attention"].append(row)
        print(f"  {shape} {plan} batch {batch} context {context}: {row['us']:.1f} us, {row['share']:.2f} of the copy's "
              f"bandwidth, {row['speedup']:.2f} over {row['best_baseline']}{', ' if by['why'] else ''}{by['why']}",
              flush=True)

    def prefill_row(self, own, launch, others):
        samples, by = self.samples(own, launch, others, self.products)
        shape, plan, tokens = own["shape"], own["plan"], launch["context"]
        heads, _, dim = SHAPES[shape]
        # Each token attends to itself and to all earlier ones, in two matrix products.
        operations = 4 * heads * dim * tokens * (tokens + 1) / 2
        row = {"shape": shape, "plan": plan, "tokens": tokens, "operations": operations,
               "us": middle(samples["own"])["median"] * 1e6,
               "mma_operations_per_second": middle(samples["ceiling"])["median"], **by}
        judged(row, "share", middle([operations / (took * most)
                                     for took, most in zip(samples["kernel"], samples["ceiling"])]),
               PREFILL_SHARES[plan], self.pairs)
        self.beside(row, samples, others, None)
        self.report["figures"]["prefill"].append(row)
        print(f"  prefill {shape} {plan} {tokens} tokens: {row['us']:.1f} us, {row['share']:.2f} of mma.sync's "
              f"{row['mma_operations_per_second'] * 1e-12:.1f} TFLOP/s, {row['speedup']:.2f} over "
              f"{row['best_baseline']}{', ' if by['why'] else ''}{by['why']}", flush=True)

    def all_reduce(self, sizes, calls):
        """Measures all-reduces between GPUs over NCCL, in the terms of nccl-tests."""
        gpus = self.bench.facts["gpus"]
        if gpus < 2:
            return self.leave_out("all_reduce", f"never run: needs 2 GPUs, there is {gpus}")
        for ranks in (each for each in (2, 4, 8) if each <= gpus):
            for size in sizes:
                self.attempt(f"all_reduce.g{ranks}.{size}",
                             lambda ranks=ranks, size=size: self.all_reduce_row(ranks, size, calls))
        return None

    def all_reduce_row(self, ranks, size, calls):
        library = os.environ.get("KVASIR_NCCL_LIBRARY")
        seconds = self.bench.ask(do="all_reduce", gpus=ranks, bytes=size, calls=calls, rounds=self.pairs,
                                 libraries=[library] if library else [])["seconds"]
        took = middle(seconds)
        # The bus bandwidth of nccl-tests: the traffic of each link, for any number of ranks.
        row = {"gpus": ranks, "bytes": size, "us": took["median"] * 1e6, "spread": took["spread"],
               "bus_bytes_per_second": 2 * (ranks - 1) / ranks * size / took["median"]}
        self.report["figures"]["all_reduce"].append(row)
        print(f"  all-reduce of {size} bytes between {ranks} GPUs: {row['us']:.1f} us, "
              f"{row['bus_bytes_per_second'] * 1e-9:.2f} GB/s of bus bandwidth", flush=True)

    @staticmethod
    def decoder_bytes(batch, context, bytes_per_slot):
        """Returns the bytes of a model and of its cache in all layers, with spare pages for each sequence."""
        return DECODE_WEIGHTS + batch * (context + 5 * PAGE) * DECODE_LAYERS * bytes_per_slot

    def decoders(self, shape, plans, rows, steps):
        """Measures decode steps over each plan's caches, and those of Hugging Face's decoder."""
        self.all_of(f"transformers.{shape}", lambda: self.make_decoder(shape, rows, steps, {
            plan: self.bench.ask(do="bytes", shape=shape, plan=plan)["bytes_per_slot"] for plan in {"dense-bf16", *plans}}))
        for plan in plans:
            self.decode(shape, plan, rows, steps)
        if self.decoder is not None:
            self.try_baseline(f"transformers.{shape}", self.decoder.close)

    def make_decoder(self, shape, rows, steps, bytes_of):
        """Makes Hugging Face's decoder. A row that fits next to our largest one stays, to be measured
        in turn with ours. Other rows are measured now, and their memory is freed."""
        if self.decoder is None:
            return self.leave_out(f"transformers.{shape}", self.report["figures"]["decoder"])
        free = self.free_bytes()

        def ours(plan):
            fit = [row for row in rows if self.decoder_bytes(*row[:2], bytes_of[plan]) <= free]
            return self.decoder_bytes(max(row[0] for row in fit), max(row[1] for row in fit), bytes_of[plan]) if fit else 0.0

        room = free - max(ours(plan) for plan in bytes_of) - DECODE_WEIGHTS
        if not self.try_baseline(f"transformers.{shape}", lambda: self.decoder.load(shape)):
            return self.try_baseline(f"transformers.{shape}", self.decoder.close)
        stays = False
        # The largest rows come first: they are freed before smaller ones are made.
        for batch, context, _ in sorted(rows, key=lambda row: -row[0] * row[1]):
            name = f"transformers.{shape}.b{batch}.c{context}"
            needs = self.decoder_bytes(batch, context, bytes_of["dense-bf16"])
            if needs > free:
                self.leave_out(name, f"does not fit: {needs / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
                continue
            if not self.try_baseline(name, lambda: self.decoder.make(batch, context, steps)):
                self.try_baseline(name, lambda: self.decoder.drop(batch, context))
                continue
            if needs - DECODE_WEIGHTS <= room:
                room, stays = room - (needs - DECODE_WEIGHTS), True
                self.decoder_keeps += needs - DECODE_WEIGHTS
                continue
            samples = []
            if self.try_baseline(name, lambda: samples.extend(
                    self.decoder.sample(batch, context) for _ in range(self.pairs))):
                self.alone[batch, context] = samples
            self.try_baseline(name, lambda: self.decoder.drop(batch, context))
        if stays:
            self.decoder_keeps += DECODE_WEIGHTS
        else:  # then its weights are not needed either
            self.try_baseline(f"transformers.{shape}", self.decoder.close)
        return None

    def try_baseline(self, name, do):
        """Returns True if `do` succeeds. A failure is noted, but does not fail the stage."""
        try:
            do()
            return True
        except Exception as error:
            self.leave_out(name, f"failed: {first_line(error)}")
        return False

    def decode(self, shape, plan, rows, steps):
        """Measures all rows with one model, because making its weights takes longest."""
        left = list(rows)

        def name(batch, context, _):
            return f"decode.{shape}.{plan}.b{batch}.c{context}"

        def measure():
            each = self.bench.ask(do="bytes", shape=shape, plan=plan)["bytes_per_slot"]
            for row in rows:
                needs = self.decoder_bytes(*row[:2], each)
                if needs > self.free_bytes():
                    left.remove(row)
                    self.leave_out(name(*row), f"does not fit: {needs / 2**30:.1f} GiB, "
                                               f"{self.free_bytes() / 2**30:.1f} GiB are free")
            if not left:
                raise Unserved("no row fits into the memory")
            self.decode_rows(shape, plan, left, steps, each)

        self.attempt(f"decode.{shape}.{plan}", measure, lambda: [name(*row) for row in left])

    def decode_rows(self, shape, plan, left, steps, each):
        """Removes from `left` each row that it has measured."""
        size = {"batch": max(row[0] for row in left), "context": max(row[1] for row in left)}
        made = self.bench.ask(do="decode_make", shape=shape, plan=plan, **size)
        # A second model captures and replays the same steps.
        needs = 2 * self.decoder_bytes(*size.values(), each) + self.decoder_keeps
        graphs = needs <= self.free_bytes()
        if graphs:
            graphs = self.try_baseline(f"graphs.{shape}.{plan}", lambda: self.bench.ask(
                do="decode_make", shape=shape, plan=plan, graphs=True, **size))
        else:
            self.leave_out(f"graphs.{shape}.{plan}", f"does not fit: {needs / 2**30:.1f} GiB, "
                                                     f"{self.free_bytes() / 2**30:.1f} GiB are free")
        while left:
            batch, context, target = left[0]
            shares, seconds, replayed = [], [], []
            other, theirs = f"transformers.{shape}.b{batch}.c{context}", []
            beside = self.decoder is not None and self.decoder.has(batch, context)
            for pair in range(-1, self.pairs):
                bandwidth = self.bandwidth()
                done = self.bench.ask(do="decode_run", batch=batch, context=context, steps=steps)
                if graphs:
                    by_graph = self.bench.ask(do="decode_run", batch=batch, context=context, steps=steps, graphs=True)
                if beside and not self.try_baseline(other, lambda: theirs.append(self.decoder.sample(batch, context))):
                    self.try_baseline(other, lambda: self.decoder.drop(batch, context))
                    beside = False
                if pair >= 0:
                    shares.append((made["weight_bytes"] + done["cache_bytes"]) / bandwidth / done["seconds"])
                    seconds.append(done["seconds"])
                    if graphs and by_graph["replayed"] == steps:
                        replayed.append(by_graph["seconds"])
            row = {"shape": shape, "plan": plan, "batch": batch, "context": context,
                   "ms": middle(seconds)["median"] * 1e3, "tokens_per_second": batch / middle(seconds)["median"],
                   "weight_bytes": made["weight_bytes"], "cache_bytes": done["cache_bytes"],
                   "numerics": made["numerics"]}
            judged(row, "share", middle(shares), target, self.pairs)
            if graphs and len(replayed) < self.pairs:
                self.leave_out(f"graphs.{shape}.{plan}.b{batch}.c{context}", "steps were not replayed: a capture failed")
            elif graphs:
                row["graphs_ms"] = middle(replayed)["median"] * 1e3
                judged(row, "graphs", middle([took / by for took, by in zip(seconds, replayed)]), 1.0, self.pairs)
            self.beside_decoder(row, seconds, theirs[1:] if beside else [])
            self.report["figures"]["decode"].append(row)
            print(f"  decode {shape} {plan} batch {batch} context {context}: {row['ms']:.2f} ms a step, "
                  f"{row['share']:.2f} of the floor"
                  + (f", {row['graphs_ms']:.2f} ms replayed" if "graphs_ms" in row else "")
                  + (f", {row['speedup']:.2f} over transformers" if "speedup" in row else ""), flush=True)
            del left[0]
        self.bench.ask(do="decode_drop")

    def beside_decoder(self, row, seconds, theirs):
        interleaved = bool(theirs)
        theirs = theirs or self.alone.get((row["batch"], row["context"]))
        if not theirs:
            return
        row["transformers_ms"], row["interleaved"] = middle(theirs)["median"] * 1e3, interleaved
        judged(row, "speedup", middle([base / took for base, took in zip(theirs, seconds)]), None, self.pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=pathlib.Path, required=True, help="the bundle's folder")
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--quick", action="store_true", help="a smoke test: figures mean nothing")
    arguments = parser.parse_args()
    bench = Bench(arguments)
    others = baselines(arguments.device)
    run = Run(arguments, bench, others, decoder_baseline(others))
    if arguments.quick:
        run.decoders("kvasir-tiny", ["dense-bf16", "palu-50-g4"], [(1, 30, 0.75), (2, 40, 0.6)], 1)
        run.attention(["kvasir-tiny"], [(2, 40)])
        run.prefill("kvasir-tiny", 40)
        run.all_reduce([4096, 100000], 2)
    else:
        run.attention(["llama-3-8b"], ROWS)
        run.prefill(PREFILL_SHAPE, PREFILL_TOKENS)
        run.all_reduce(ALL_REDUCE_BYTES, 20)
        run.decoders(DECODE_SHAPE, DECODE_PLANS, DECODE_ROWS, 8)
        run.attention(["llama-2-7b"], ROWS)
    run.end()
    return 1 if any(test["status"] == "failed" for test in run.report["tests"]) else 0


if __name__ == "__main__":
    sys.exit(main())
