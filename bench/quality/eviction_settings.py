"""The rows, claims and budgets of bench/quality/eviction.py, for eviction on SmolLM2. They
are fixed before a run, like those of frontier_settings.py.

A row is a cache, the method that evicts from it, and the share of a prompt's slots that
stays. A window of the text is one prompt."""

import functools
import statistics
from dataclasses import dataclass, field

MODEL = "smollm2"
LAYERS, KV_HEADS = 30, 3
DOMAINS = ("books", "encyclopedia", "code", "dialogue")
SEED = 42  # seed of the method `random`
ERROR_RATE = 0.05  # error rate of a family of claims (Holm's procedure)

TOKENS, LONG = 2048, 8192  # tokens of a window
# Bytes of a held-out text for each window of TOKENS tokens. They give more than TOKENS tokens.
BYTES_PER_WINDOW = 8500
# A repeat test has a passage, another text, and the passage again.
PASSAGE_TOKENS, FILLER_TOKENS = 600, 800
# Repeat tests also run a few short windows, because `evaluate` needs at least two.
SHORT_TOKENS, SHORT_WINDOWS = 128, 2


@functools.cache
def normal_levels(bits: int) -> list[float]:
    """Returns the same levels as plan::LloydMaxLevels. Rounding a standard normal number to
    them has the least mean square error."""
    normal = statistics.NormalDist()
    levels = [normal.inv_cdf((i + 0.5) / 2**bits) for i in range(2**bits)]
    for _ in range(2000):
        edges = [-40.0, *((a + b) / 2 for a, b in zip(levels, levels[1:])), 40.0]
        means = [(normal.pdf(a) - normal.pdf(b)) / (normal.cdf(b) - normal.cdf(a))
                 for a, b in zip(edges, edges[1:])]
        moved = max(abs(a - b) for a, b in zip(levels, means))
        levels = means
        if moved < 1e-12:
            break
    return levels


@dataclass(frozen=True)
class Cache:
    """A cache of whole keys and values. 4 and 3 bits are the codes of `--kv-plan rotated-4bit`
    without its exact tokens, 8 bits the codes of `dense-8bit`. 16 bits are not coded."""
    key_bits: int
    value_bits: int
    exact: str = ""  # exact tokens, such as "sinks=4,window=28"

    @property
    def name(self) -> str:
        bits = (f"{self.key_bits} bits" if self.key_bits == self.value_bits else
                f"keys {self.key_bits}, values {self.value_bits} bits")
        tokens = [part.split("=")[1] for part in self.exact.split(",") if part]
        return bits + (f", {' + '.join(tokens)} exact" if tokens else "")

    @property
    def dense(self) -> bool:
        return self.key_bits == self.value_bits == 16

    def plan(self) -> dict:
        """Returns the content of a kv_plan.json."""
        def side(bits, stored):
            if bits == 16:
                codec = {"dtype": "BF16"}
            else:
                codec = {"bits": {"schedule": [bits]}, "param_dtype": "F16"}
                codec |= {"per_token": {}} if bits == 8 else {
                    "per_token_norm": {"levels": normal_levels(bits)},
                    "hadamard_online": {}}
            return {"parts": [{"full": {}, "stored": stored, "codec": codec}]}
        return {"schema_version": 1, "base_model": MODEL, "method": "rotated",
                "layers": LAYERS * [{"key": side(self.key_bits, "POST_ROPE"),
                                     "value": side(self.value_bits, "NO_ROPE")}]}


@dataclass(frozen=True)
class Row:
    cache: Cache
    method: str  # a method of evaluate's --eviction
    budget: float = 0.0  # share of the window that stays; 0: all
    weight: float = 0.5  # lambda of q-hitter
    recent: int = 64
    # Also measured with the small budget.
    quick: bool = field(default=False, compare=False)

    @property
    def options(self) -> tuple[str, ...]:
        """Returns the options that apply to all rows of a command."""
        return ("--eviction-lambda", f"{self.weight:g}",
                "--eviction-recent", str(self.recent))

    @property
    def shown(self) -> str:
        words = {"none": "all tokens", "recent": "recent only",
                 "streaming": "sinks + recent", "random": "random", "h2o": "H2O",
                 "q-hitter": f"Q-Hitter, λ = {self.weight:g}"}[self.method]
        return words + (f", {self.recent} recent" if self.recent != 64 else "")

    @property
    def name(self) -> str:
        kept = f" {100 * self.budget:g} %" if self.budget else ""
        return f"{self.cache.name}: {self.shown}{kept}"


@dataclass(frozen=True)
class Claim:
    """The claim that KL(left) <= KL(right)."""
    family: str
    left: Row
    right: Row

    @property
    def text(self) -> str:
        return (f"{self.left.cache.name}, {100 * self.left.budget:g} %: "
                f"{self.left.shown} ≤ {self.right.shown}")


@dataclass(frozen=True)
class StreamRow:
    """A run that streams a text through a cache of at most STREAM_SLOTS slots."""
    # A method of the server's --eviction, or "window": a dense cache of the latest STREAM_SLOTS
    # tokens, which is computed anew every STREAM_STRIDE tokens.
    method: str
    heavy: float = 0.0  # share of the slots that stay by score, sinks among them
    rolling: bool = True  # a token's position is its slot, otherwise its place in the text
    # Also measured with the small budget.
    quick: bool = field(default=False, compare=False)

    @property
    def flags(self) -> list[str]:
        """Returns the flags of `kvasir perplexity`."""
        if self.method == "window":
            return ["--window", str(STREAM_SLOTS), "--stride", str(STREAM_STRIDE)]
        # Up to STREAM_EVERY more tokens are added before the next eviction.
        kept = STREAM_SLOTS - STREAM_EVERY
        flags = ["--stream", "--eviction", self.method, "--eviction-budget", str(kept),
                 "--eviction-every", str(STREAM_EVERY), "--eviction-sinks",
                 str(STREAM_SINKS)]
        if self.heavy:
            flags += ["--eviction-recent", str(round(kept * (1 - self.heavy)))]
        return flags + ["--eviction-rolling"] * self.rolling

    @property
    def shown(self) -> str:
        if self.method == "window":
            return f"windows run anew every {STREAM_STRIDE} tokens"
        words = {"streaming": "sinks + recent",
                 "h2o": f"H2O, {self.heavy:.3g} heavy"}[self.method]
        return f"{words}, {'rolling' if self.rolling else 'original'} positions"


@dataclass(frozen=True)
class Budget:
    """Says how much of the study is measured."""
    name: str
    windows: int  # windows of TOKENS tokens, equally many of each text
    copies: int  # repeat tests
    long_windows: int
    stream_bytes: int  # bytes of the novel, from its beginning
    all_rows: bool

    def of(self, rows: list[Row]) -> list[Row]:
        return [row for row in rows if self.all_rows or row.quick]


FULL = Budget("full", 4, 8, 2, 120_000, True)
QUICK = Budget("quick", 4, 3, 2, 60_000, False)
BUDGETS = {budget.name: budget for budget in (FULL, QUICK)}

DENSE = Cache(16, 16)
CODES = {bits: Cache(bits, bits) for bits in (8, 4, 3)}
SERVED = Cache(4, 4, "sinks=4,window=28")
KEYS, VALUES = Cache(4, 16), Cache(16, 4)  # only keys, or only values, are coded
METHODS = ("h2o", "q-hitter", "streaming", "recent", "random")
SHARES = (0.5, 0.2, 0.1)


def matrix() -> list[Row]:
    """Combines caches, methods and budgets, and adds codes without eviction. Leaves out Q-Hitter
    without codes, because it is then the same as H2O."""
    rows = []
    for cache in (CODES[4], CODES[3], DENSE, CODES[8]):
        quick_codes = cache in (CODES[4], CODES[3])
        if not cache.dense:
            rows.append(Row(cache, "none", quick=quick_codes))
        for share in SHARES:
            for method in METHODS:
                if cache.dense and method == "q-hitter":
                    continue
                quick = share in (0.5, 0.2) and (
                    cache == CODES[4] or quick_codes and method != "random" or
                    cache.dense and method == "h2o")
                rows.append(Row(cache, method, share, quick=quick))
    return rows


MATRIX = matrix()
SERVED_ROWS = [Row(SERVED, "none", quick=True), *(
    Row(SERVED, method, share, quick=method == "h2o") for share in (0.5, 0.2)
    for method in ("streaming", "h2o", "q-hitter"))]
SWEEP = [Row(CODES[4], "q-hitter", 0.2, weight=weight, quick=weight == 0.75)
         for weight in (0.0, 0.25, 0.75, 0.9, 0.95, 0.99)]
# Half of what stays is recent: 512 of 1023 slots, 204 of 409.
HALF_RECENT = {0.5: 512, 0.2: 204}
SPLIT = [Row(CODES[4], "h2o", share, recent=recent,
             quick=recent in (128, 256, HALF_RECENT[share]))
         for share, recents in ((0.2, (16, 128, 204, 256, 384)), (0.5, (256, 512, 768)))
         for recent in recents]
SIDES = [Row(cache, method, 0.2, quick=True) for cache in (KEYS, VALUES)
         for method in ("h2o", "q-hitter")]
OTHERS = [*SIDES, *SERVED_ROWS, *SWEEP, *SPLIT]

FAR = [Row(CODES[4], "none", quick=True), *(
    Row(CODES[4], method, share, quick=method not in ("recent", "random"))
    for share in (0.5, 0.2) for method in METHODS), *(
    Row(CODES[4], "h2o", share, recent=recent, quick=True)
    for share, recent in HALF_RECENT.items())]

LONG_ROWS = [Row(CODES[4], "none"), *(
    Row(CODES[4], method, share, quick=method != "q-hitter" and share == 0.2)
    for share, methods in ((0.2, ("streaming", "h2o", "q-hitter")),
                           (0.5, ("h2o", "q-hitter"))) for method in methods)]

# A token has about four bytes, so a stream has more tokens than LONG, the model's maximum length.
STREAM_SLOTS, STREAM_STRIDE, STREAM_EVERY, STREAM_SINKS = 1024, 256, 128, 4
STREAM_TARGET = 1.03  # loss divided by that of STREAM_WINDOW
STREAM_WINDOW = StreamRow("window", quick=True)
STREAM_CLAIM = StreamRow("h2o", 1 / 16, quick=True)
STREAMS = [STREAM_WINDOW, STREAM_CLAIM, StreamRow("streaming", quick=True),
           StreamRow("h2o", 1 / 2, quick=True),
           StreamRow("h2o", 1 / 16, rolling=False, quick=True),
           StreamRow("streaming", rolling=False)]

# To find heavy tokens, each cache evicts by received attention, and all heads of a layer evict
# together.
OVERLAP_SINKS, OVERLAP_RECENT, OVERLAP_SHARE, OVERLAP_BYTES = 4, 64, 0.2, 6000


def overlap_plan(cache: Cache) -> dict:
    plan = cache.plan()
    for layer in plan["layers"]:
        layer["eviction"] = {
            "units": [{"heads": list(range(KV_HEADS))}], "budget_ratio": OVERLAP_SHARE,
            "sinks": OVERLAP_SINKS, "recent": OVERLAP_RECENT, "lambda": 1.0,
            "positions": "ORIGINAL", "every_tokens": 128}
    return plan


CLAIMS = [Claim(family, Row(CODES[bits], left, share),
                Row(CODES[bits], right, share))
          for family, left, right in (
              ("q-hitter", "q-hitter", "h2o"),
              ("recent", "h2o", "recent"), ("recent", "q-hitter", "recent"),
              ("sinks", "h2o", "streaming"), ("sinks", "q-hitter", "streaming"))
          for bits in (4, 3) for share in SHARES]
