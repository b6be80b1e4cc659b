"""The rows, claims and budgets of bench/quality/frontier.py on SmolLM2. They are fixed
before a run, like those of quality_settings.py.

A row is a cache: an artifact of `kvasir-compress`, or a baseline of `evaluate`. A claim
says that its left row diverges no more than its right one, by the ratio of their KL over
the same windows, and takes at most a share of the right one's bytes. The bytes are those
of a sequence as long as a window, exact tokens included."""

from dataclasses import dataclass

MODEL = "smollm2"
NUMBERS_PER_TOKEN = 11520  # 30 layers * (keys and values) * 3 heads * 64 dims
DENSE_BYTES = 2 * NUMBERS_PER_TOKEN

SEED = 42
DOMAINS = ("books", "encyclopedia", "code", "dialogue")
# The calibration tokens of the papers' methods and of OSCAR; auto has its own number.
CALIBRATION_TOKENS = 32768

SHORT, LONG = 1024, 8192  # tokens of a window
# Bytes of every held-out text for the windows of LONG tokens. They give more than enough tokens.
LONG_BYTES_PER_TEXT = 34000

# The error rate of a family of claims (Holm's procedure).
ERROR_RATE = 0.05


@dataclass(frozen=True)
class Artifact:
    """An artifact, given by the options of `plan` without those for model, calibration and
    output."""
    method: tuple
    built_in_texts: bool = False  # auto calibrates on its own domains


@dataclass(frozen=True)
class Row:
    name: str
    artifact: Artifact | None = None
    baseline: str | None = None
    # Other exact tokens than those of the artifact's plan: "sinks=4,window=128".
    exact: str = ""
    quick: bool = False  # also measured with the small budget

    @property
    def calibrates(self) -> bool:
        """Whether the row is a baseline that is measured on the calibration texts."""
        return self.baseline is not None and self.baseline.startswith("oscar:")

    def candidate(self, folder) -> str:
        """Returns the row as an argument of `evaluate`."""
        if self.baseline is not None:
            return self.baseline
        return f"{folder}:{self.exact}" if self.exact else str(folder)


@dataclass(frozen=True)
class Claim:
    """The claim that KL(left) <= KL(right) and that left takes at most `share` of right's bytes,
    or at most `bits` bits for each key and value number."""
    name: str
    family: str  # p-values of a family's claims are corrected together
    left: Row
    right: Row
    tokens: int
    share: float | None = None
    bits: float | None = None

    @property
    def text(self) -> str:
        size = (f"{self.bits:g} bits a number" if self.share is None else
                "no more bytes" if self.share == 1.0 else
                f"{self.share:.2f} of its bytes")
        return f"{self.left.name} ≤ {self.right.name}, at {size}"


@dataclass(frozen=True)
class Budget:
    """Says how much of the study is measured."""
    name: str
    windows_per_text: int  # windows of SHORT tokens
    repeats_per_text: int
    long_windows: int
    all_rows: bool
    engine: bool  # also compares the server's loss with the oracle's

    def rows(self) -> list[Row]:
        return [row for row in ROWS if self.all_rows or row.quick]

    def long_rows(self) -> list[Row]:
        return LONG_ROWS if self.all_rows else QUICK_LONG_ROWS


FULL = Budget("full", 2, 2, 2, True, True)
QUICK = Budget("quick", 2, 0, 2, False, False)
BUDGETS = {budget.name: budget for budget in (FULL, QUICK)}


def bits(per_number: float) -> int:
    """Returns the bytes per token if each number takes `per_number` bits."""
    return round(per_number * NUMBERS_PER_TOKEN / 8)


# ---------------------------------------------------------- what papers propose


def paper(name, method, *options, quick=False):
    return Row(name, Artifact((method, *options)), quick=quick)


PALU = paper("Palu 50 %, all heads", "palu", "--keep", 0.5,
             "--group-heads", "all", quick=True)
PALU_4 = paper("Palu 50 %, all heads, 4 bits", "palu", "--keep", 0.5,
               "--group-heads", "all", "--key-bits", 4, "--value-bits", 4,
               quick=True)
LORC = paper("LoRC 60 %, progressive", "lorc", "--keep", 0.6,
             "--skip-layers", 6)
LORC_UNIFORM = paper("LoRC 60 %, uniform", "lorc", "--keep", 0.6,
                     "--skip-layers", 6, "--ranks", "uniform", quick=True)
SVDQ = {2: "8,4,4,0,0,0,0,0", 3: "8,4,4,4,2,2,0,0"}
SVDQ = {width: paper(f"SVDq keys {width}, values 4", "svdq",
                     "--key-bits", schedule, "--value-bits", 4,
                     quick=width == 2)
        for width, schedule in SVDQ.items()}
RAP = paper("RAP 70 %", "rap", "--keep", 0.7, quick=True)
COMMUTING = paper("commuting 70 %", "commuting", "--keep", 0.7,
                  "--group-heads", "all", quick=True)
SINKS = "sinks=4"
# The windows of the named plans: rotated-4bit; rotated-3bit; rotated-k3v2 and rotated-2bit.
SHIPPED, SHIPPED_3, SHIPPED_2 = (f"sinks=4,window={window}" for window in (28, 60, 124))
RECENT = "sinks=4,window=128"
OSCARS = "sinks=64,window=256"  # of OSCAR's paper
NO_WINDOW = "sinks=4,window=0"  # instead of a plan's own window


def with_exact(row: Row, exact: str, quick: bool = False) -> Row:
    """Returns the row with other exact tokens and the same codes."""
    said = {SINKS: "4 exact", NO_WINDOW: "4 exact", SHIPPED: "4 + 28 exact",
            SHIPPED_3: "4 + 60 exact", SHIPPED_2: "4 + 124 exact", RECENT: "4 + 128 exact", OSCARS: "64 + 256 exact"}[exact]
    if row.baseline is not None:
        return Row(f"{row.name}, {said}", baseline=f"{row.baseline},{exact}",
                   quick=quick)
    return Row(f"{row.name}, {said}", row.artifact, exact=exact, quick=quick)


PAPERS = [PALU, PALU_4, with_exact(PALU_4, RECENT), LORC, LORC_UNIFORM,
          SVDQ[3], SVDQ[2], with_exact(SVDQ[2], RECENT), RAP, COMMUTING]

# ------------------------------------------------------------ what others serve


def baseline(name, text, quick=False):
    return Row(name, baseline=text, quick=quick)


ROTATED = {width: baseline(f"rotated {width} bits",
                           f"rotated:k{width},v{width}", quick=True)
           for width in (4, 3)}
ROTATED_SINKS = {width: with_exact(row, SINKS, quick=True)
                 for width, row in ROTATED.items()}
ROTATED_SHIPPED = {width: with_exact(row, SHIPPED, quick=True)
                   for width, row in ROTATED.items()}
ROTATED_RECENT = {width: with_exact(row, RECENT, quick=True)
                  for width, row in ROTATED.items()}
ROTATED_OSCARS = {width: with_exact(row, OSCARS) for width, row in (
    ROTATED | {2: baseline("rotated 2 bits", "rotated:k2,v2")}).items()}
# Named plans that are measured only with windows of LONG tokens.
NAMED_3 = with_exact(ROTATED[3], SHIPPED_3)
NAMED_K3V2 = with_exact(baseline("rotated keys 3, values 2 bits", "rotated:k3,v2"), SHIPPED_2)
NAMED_2 = with_exact(baseline("rotated 2 bits", "rotated:k2,v2"), SHIPPED_2)
NAMED_8 = baseline("per token 8 bits", "per-token:k8,v8")
ROTATED_SKIP = baseline("rotated 4 bits, 2 + 2 layers whole (vLLM)",
                        "rotated:k4,v4,skip=2")
KIVI = {(width, residual): baseline(
    f"KIVI {width} bits" + (", 128 exact" if residual else ""),
    f"kivi:{width},group=32,residual={residual}", quick=True)
    for width in (4, 2) for residual in (0, 128)}
KIVI_OSCARS = baseline("KIVI 2 bits, 64 + 256 exact",
                       "kivi:2,group=32,residual=256,sinks=64")
OSCAR = with_exact(baseline("OSCAR 2 bits", "oscar:2"), OSCARS)
PER_TOKEN = baseline("per token 4 bits", "per-token:k4,v4",
                     quick=True)
Q8 = baseline("q8_0", "ggml:kq8_0,vq8_0")
Q4 = baseline("q4_0", "ggml:kq4_0,vq4_0", quick=True)
Q4_PLAIN = baseline("q4_0, not rotated", "ggml:kq4_0,vq4_0,rotation=off")
FP8 = baseline("fp8 e4m3", "fp8:e4m3", quick=True)

BASELINES = [ROTATED[4], ROTATED_SINKS[4], ROTATED_SHIPPED[4], ROTATED_RECENT[4],
             ROTATED_SKIP, ROTATED[3], ROTATED_SINKS[3], ROTATED_SHIPPED[3],
             ROTATED_RECENT[3], *ROTATED_OSCARS.values(), OSCAR, PER_TOKEN,
             with_exact(PER_TOKEN, SINKS), *KIVI.values(), KIVI_OSCARS,
             Q8, Q4, Q4_PLAIN, FP8]

# ------------------------------------------------------------------------- ours


def auto(name, speed, kv_bytes, length, quick=True):
    """Returns a row of the planner. `kv_bytes` limits the bytes per token of a sequence of
    `length` tokens, exact tokens included. The planner chooses the window of exact tokens."""
    options = ("auto", "--kv-bytes-per-token", kv_bytes, "--speed", speed,
               "--target-length", length)
    return Row(name, Artifact(options, built_in_texts=True), quick=quick)


STORAGE = {width: auto(f"planned, storage, {width} bits", "storage", bits(width), SHORT)
           for width in (3, 2.25, 1.75)}
ROTATED_4_BYTES = bits(4.25)
CPU = auto("planned, cpu, 0.8 of rotated 4 bits", "cpu",
           int(0.8 * ROTATED_4_BYTES), SHORT)
PLANNED = [*STORAGE.values(), CPU]
PLANNED_RECENT = {row: with_exact(row, RECENT) for row in PLANNED}
PLANNED_SINKS = {row: with_exact(row, NO_WINDOW) for row in PLANNED}
OURS = [form for row in PLANNED
        for form in (row, PLANNED_RECENT[row], PLANNED_SINKS[row])]

ROWS = OURS + PAPERS + BASELINES

# --------------------------------------------------------- at the longer length

# An exact token of a baseline has no codes, so its bytes replace those of codes.
_RECENT_BYTES = bits(3.25) + (128 + 4) * (DENSE_BYTES - bits(3.25)) / LONG
LONG_STORAGE = auto("planned for 8K, storage, 0.6 of rotated 3 bits, 4 + 128 exact",
                    "storage", int(0.6 * _RECENT_BYTES), LONG)
LONG_SMALL = auto("planned for 8K, storage, 1.75 bits", "storage", bits(1.75), LONG,
                  quick=False)
LONG_CPU = auto("planned for 8K, cpu, 0.8 of rotated 4 bits", "cpu",
                int(0.8 * ROTATED_4_BYTES), LONG)
LONG_ROWS = [LONG_STORAGE, LONG_SMALL, LONG_CPU, ROTATED_SINKS[4], ROTATED_SHIPPED[4],
             ROTATED_RECENT[3], NAMED_3, NAMED_K3V2, NAMED_2, NAMED_8, KIVI[4, 128],
             KIVI[2, 128]]
QUICK_LONG_ROWS = [LONG_STORAGE, LONG_CPU, ROTATED_SHIPPED[4], ROTATED_RECENT[3]]

# ------------------------------------------------------------------- decode steps

TIME_SHAPE, TIME_BATCH = "smollm2-135m", 8  # sequences of LONG tokens
# Rows whose decode steps are timed, with the server's names of their plans.
TIMED = {ROTATED_SHIPPED[4]: "rotated-4bit", NAMED_3: "rotated-3bit",
         NAMED_K3V2: "rotated-k3v2", NAMED_2: "rotated-2bit", NAMED_8: "dense-8bit"}

# ------------------------------------------------------------------------ chart

# Groups of series. Each series is a line through its rows.
CHART = {
    "planned (ours)": {
        "storage": list(STORAGE.values()),
        "storage, 4 + 128 exact": [PLANNED_RECENT[row]
                                   for row in STORAGE.values()],
        "cpu": [CPU],
    },
    "papers": {
        "Palu 50 %: bf16, 4 bits": [PALU, PALU_4],
        "LoRC 60 %": [LORC, LORC_UNIFORM],
        "SVDq keys 3, 2; values 4": list(SVDQ.values()),
        "RAP 70 %": [RAP],
        "commuting 70 %": [COMMUTING],
    },
    "served by others": {
        "rotated 4, 3 bits": list(ROTATED.values()),
        "the same, 4 + 28 exact": list(ROTATED_SHIPPED.values()),
        "the same, 4 + 128 exact": list(ROTATED_RECENT.values()),
        "rotated 4-2, 64 + 256": list(ROTATED_OSCARS.values()),
        "OSCAR 2 bits, 64 + 256": [OSCAR],
        "KIVI 4, 2 bits": [KIVI[4, 0], KIVI[2, 0]],
        "the same, 128 exact": [KIVI[4, 128], KIVI[2, 128]],
        "per token 4 bits": [PER_TOKEN],
        "q8_0, q4_0": [Q8, Q4],
        "fp8 e4m3": [FP8],
    },
}

LONG_CHART = {
    "planned (ours)": {
        "storage": [LONG_SMALL, LONG_STORAGE],
        "cpu": [LONG_CPU],
    },
    "served by others": {
        "rotated 4, 4 exact": [ROTATED_SINKS[4]],
        "rotated 4, 4 + 28 exact": [ROTATED_SHIPPED[4]],
        "rotated 3, 60 and 128": [NAMED_3, ROTATED_RECENT[3]],
        "rotated k3v2, 2, 124": [NAMED_K3V2, NAMED_2],
        "8 bits": [NAMED_8],
        "KIVI 4, 2, 128 exact": [KIVI[4, 128], KIVI[2, 128]],
    },
}

TIME_CHART = {
    "served by others": {
        "rotated 4, 4 + 28 exact": [ROTATED_SHIPPED[4]],
        "rotated 3, 4 + 60 exact": [NAMED_3],
        "rotated k3v2, 2, 124": [NAMED_K3V2, NAMED_2],
        "8 bits": [NAMED_8],
    },
}

# ----------------------------------------------------------------------- claims

CLAIMS = [
    # The targets for which the planner was made.
    Claim("storage_rotated_4", "targets", STORAGE[2.25], ROTATED_SINKS[4], SHORT,
          share=0.55),
    Claim("cpu_rotated_4", "targets", CPU, ROTATED_SINKS[4], SHORT, share=0.80),
    Claim("storage_rotated_3", "targets", LONG_STORAGE, ROTATED_RECENT[3], LONG,
          share=0.60),
    Claim("storage_kivi_4", "targets", STORAGE[3], KIVI[4, 0], SHORT, bits=3.0),
    Claim("storage_kivi_4_recent", "targets", PLANNED_RECENT[STORAGE[3]],
          KIVI[4, 128], SHORT, share=0.80),
    # The right rows are plans that the server uses without a calibration.
    Claim("storage_shipped", "targets", STORAGE[3], ROTATED_SHIPPED[4], SHORT,
          share=0.65),
    Claim("cpu_shipped", "targets", LONG_CPU, ROTATED_SHIPPED[4], LONG, share=0.80),
    # Rows of the papers' methods: the planner can also choose these methods, so none of them
    # should be better at equal bytes. The remaining rows are caches that other servers use.
    *(Claim(name, "order", left, right, tokens, share=1.0)
      for name, left, right, tokens in (
          ("palu", STORAGE[3], PALU, SHORT),
          ("palu_4", STORAGE[1.75], PALU_4, SHORT),
          ("lorc", STORAGE[3], LORC_UNIFORM, SHORT),
          ("svdq", STORAGE[3], SVDQ[2], SHORT),
          ("rap", STORAGE[3], RAP, SHORT),
          ("commuting", STORAGE[3], COMMUTING, SHORT),
          ("per_token", STORAGE[3], PER_TOKEN, SHORT),
          ("q4_0", STORAGE[3], Q4, SHORT),
          ("kivi_2", STORAGE[1.75], KIVI[2, 0], SHORT),
          ("kivi_2_long", LONG_SMALL, KIVI[2, 128], LONG))),
    # These compare OSCAR with simpler codes that have the same exact tokens, and with the planner.
    *(Claim(name, "oscar", left, right, tokens, share=1.0)
      for name, left, right, tokens in (
          ("oscar_rotated_3", OSCAR, ROTATED_OSCARS[3], SHORT),
          ("oscar_kivi", OSCAR, KIVI_OSCARS, SHORT),
          ("oscar_planned", PLANNED_RECENT[STORAGE[1.75]], OSCAR, SHORT))),
]
