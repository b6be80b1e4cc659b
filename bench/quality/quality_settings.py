"""The rows and claims of bench/quality/quality.py on the built-in model: what the papers
claim about parts of their methods. They are fixed before a run, because only then can a
result confirm or contradict a paper."""

from dataclasses import dataclass, field, replace
from typing import Callable

import quality_stats as stats

WINDOWS = 100
WINDOW_TOKENS = 512
SEEDS = "1,2,3"
REPEATS = 8
KEY_ERROR_WINDOWS = 8
CALIBRATION_TOKENS = 16384
RATIOS = (0.9, 0.7, 0.5)

# Every recovered row of the recovery table uses the same adapters, data and steps.
RECOVERY = ("--steps", 60, "--batch-tokens", 4096, "--rank", 16, "--lr", 1e-3)


@dataclass(frozen=True)
class Config:
    """A row of a table: the options of `apply` (without those for model, text, seed and output),
    or the name of a baseline for `evaluate`."""
    name: str
    apply: tuple = ()
    baseline: str | None = None
    recover: tuple | None = None
    seeded: bool = True  # true if the row depends on the calibration's seed

    def identity(self) -> list:
        return [list(map(str, self.apply)), self.baseline,
                None if self.recover is None else list(map(str, self.recover))]


@dataclass(frozen=True)
class Claim:
    """The claim that constant + sum of factor * loss + teacher * (the teacher's loss) <= 0."""
    name: str
    text: str
    source: str
    terms: tuple[tuple[float, Config], ...]
    constant: float = 0.0
    teacher: float = 0.0


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    text: str
    configs: list[Config]
    claims: list[Claim] = field(default_factory=list)
    # Groups of rows. The rows of a group must have equal bytes within 1 %.
    equal_bytes: list[list[Config]] = field(default_factory=list)
    extra: list[Callable] = field(default_factory=list)


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def at_most(name, text, source, left, right):
    return Claim(name, text, source, ((1.0, left), (-1.0, right)))


def apply(name, method, *options, seeded=True):
    tokens = ("--calibration-tokens", CALIBRATION_TOKENS)
    return Config(name, ("--method", method, *options, *tokens), seeded=seeded)


def recovered(config: Config, name: str | None = None) -> Config:
    return replace(config, name=f"{name or config.name}, recovered",
                   recover=RECOVERY)


# ---------------------------------------------------------------------- Palu

def palu(keep, *options, name):
    return apply(name, "palu", "--keep", keep, *options)


GROUPS = {s: palu(0.5, "--group-heads", s,
                  name=f"Palu 50 %, {label}")
          for s, label in ((1, "M-LRD (groups of 1 head)"),
                           (2, "G-LRD (2)"), (4, "G-LRD (4)"),
                           ("all", "J-LRD (all 8)"))}
PALU_50 = GROUPS[4]
SEARCH = {}
for _keep in (0.7, 0.5, 0.3):
    SEARCH[_keep, "fisher"] = (
        PALU_50 if _keep == 0.5 else
        palu(_keep, "--group-heads", 4, name=f"Palu {percent(_keep)}, Fisher"))
    for _search in ("module", "uniform"):
        SEARCH[_keep, _search] = palu(_keep, "--group-heads", 4, "--search",
                                      _search,
                                      name=f"Palu {percent(_keep)}, {_search}")
PLAIN = palu(0.5, "--group-heads", 4, "--decomposition", "svd",
             name="Palu 50 %, plain SVD")
ESPACE = palu(0.5, "--group-heads", 4, "--decomposition", "espace",
              name="Palu 50 %, ESPACE")
BITS = {}
for _bits in (4, 3, 2):
    for _hadamard in ("on", "off"):
        BITS[_bits, _hadamard] = palu(
            0.5, "--group-heads", 4, "--key-bits", _bits, "--value-bits", _bits,
            "--hadamard", _hadamard,
            name=f"Palu 50 %, {_bits} bits, Hadamard {_hadamard}")

PALU_TABLES = [
    Table(
        "palu_groups", "Palu: size of the head groups",
        "Half of the numbers kept, Fisher rank search, whitened (paper: "
        "table 6; its table 1 has no groups of 2, and equal ranks in all groups).",
        list(GROUPS.values()),
        [at_most("j_below_g4", "J-LRD ≤ G-LRD (4)", "Palu tables 1, 6",
                 GROUPS["all"], GROUPS[4]),
         at_most("g4_below_g2", "G-LRD (4) ≤ G-LRD (2)", "Palu table 6",
                 GROUPS[4], GROUPS[2]),
         at_most("g2_below_m", "G-LRD (2) ≤ M-LRD", "Palu table 6", GROUPS[2],
                 GROUPS[1])],
        [list(GROUPS.values())]),
    Table(
        "palu_search", "Palu: rank search",
        "Groups of 4 heads. *Fisher* gives every group its own rank, *module* "
        "one rank per projection, *uniform* one for all (paper: table 8).",
        list(SEARCH.values()),
        [at_most(f"fisher_{keep}", f"Fisher ≤ uniform at {percent(keep)}",
                 "Palu table 8", SEARCH[keep, "fisher"],
                 SEARCH[keep, "uniform"]) for keep in (0.7, 0.5, 0.3)]),
    Table(
        "palu_whitening", "Palu: how factors are found",
        "50 %, groups of 4 heads.",
        [PALU_50, PLAIN, ESPACE],
        [Claim("whitened_half", "whitened adds at most half of what plain SVD "
               "adds", "Palu section 2.2, SVD-LLM",
               ((1.0, PALU_50), (-0.5, PLAIN)), teacher=-0.5)]),
    Table(
        "palu_bits", "Palu: bits and Hadamard",
        "50 %, groups of 4 heads, both sides at the same bits, one range per "
        "group and token (paper: table 7). All singular values are in the latent; "
        "Palu's code puts their square roots in both factors.",
        [PALU_50, *BITS.values()],
        [Claim("three_bits", "3 bits with Hadamard add at most 0.03 nats",
               "Palu table 7", ((1.0, BITS[3, "on"]), (-1.0, PALU_50)), -0.03),
         Claim("hadamard_gain", "Hadamard's gain at 2 bits is at least twice "
               "its gain at 3, all singular values in the latent", "Palu G.2",
               ((2.0, BITS[3, "off"]), (-2.0, BITS[3, "on"]),
                (-1.0, BITS[2, "off"]), (1.0, BITS[2, "on"])))]),
]

# ---------------------------------------------------------------------- LoRC

LAYERS = 6
SKIPPED = -(-LAYERS // 5)


def lorc(name, *options):
    return apply(name, "lorc", *options, seeded=False)


LORC = lorc("LoRC 60 %, progressive", "--keep", 0.6, "--skip-layers", SKIPPED)
LORC_UNIFORM = lorc("LoRC 60 %, uniform", "--keep", 0.6, "--skip-layers",
                    SKIPPED, "--ranks", "uniform")
SINGLE = [lorc(f"only layer {layer} at 50 %", "--keep", 0.5, "--only-layers",
               layer) for layer in range(LAYERS)]
SHALLOW = lorc("layers 0-1 at 50 %", "--keep", 0.5, "--only-layers", "0,1")
DEEP = lorc("layers 4-5 at 50 %", "--keep", 0.5, "--only-layers", "4,5")

LORC_TABLES = [
    Table(
        "lorc", "LoRC: progressive ranks",
        f"Plain SVD of all heads together; the {SKIPPED} layers with the "
        "largest cumulative condition numbers are left whole (paper: table 2).",
        [LORC, LORC_UNIFORM],
        [at_most("lorc_progressive", "progressive ≤ uniform", "LoRC section 6",
                 LORC, LORC_UNIFORM)],
        [[LORC, LORC_UNIFORM]]),
    Table(
        "lorc_depth", "LoRC: one layer at a time",
        "Half of one layer's numbers kept, all others whole (paper: figure 3 "
        "and table 1).",
        [*SINGLE, SHALLOW, DEEP],
        [at_most("deep_below_shallow", "deep layers cost less than shallow",
                 "LoRC table 1", DEEP, SHALLOW)],
        [SINGLE, [SHALLOW, DEEP]]),
]

# ----------------------------------------------------------------------- RAP


def rap(keep, *options, name):
    return apply(name, "rap", "--keep", keep, "--rank-multiple", 2, *options)


RAP = {}
for _ratio in RATIOS:
    for _score, _search in (("fisher", "fisher-root"), ("fisher", "uniform"),
                            ("magnitude", "fisher-root")):
        RAP[_ratio, _score, _search] = rap(
            _ratio, "--pair-score", _score, "--search", _search,
            name=f"RAP {percent(_ratio)}, {_score}, {_search}")
RAP_BEST = {ratio: RAP[ratio, "fisher", "fisher-root"] for ratio in RATIOS}
RAP_4BIT = {ratio: rap(ratio, "--key-bits", 4, "--value-bits", 4,
                       name=f"RAP {percent(ratio)}, 4 bits") for ratio in RATIOS}
RAP_RECOVERED = {key: recovered(config) for key, config in RAP.items()
                 if key[2] == "fisher-root"}
RAP_LAYER = [rap(0.5, "--search", "uniform", "--only-layers", layer,
                 name=f"RAP 50 %, only layer {layer}")
             for layer in range(LAYERS)]
DENSE_RECOVERED = recovered(apply("dense", "uniform", "--keep", 1.0,
                                  "--group-heads", 1))
PALU_RECOVERED = recovered(PALU_50, "Palu 50 %, groups of 4")
COMMUTING_50 = apply("commuting 50 %, all heads", "commuting", "--keep", 0.5,
                     "--group-heads", "all", "--rank-multiple", 2)
COMMUTING_RECOVERED = recovered(COMMUTING_50)

RECOVERED = [*((RAP[key], found) for key, found in RAP_RECOVERED.items()),
             (PALU_50, PALU_RECOVERED), (COMMUTING_50, COMMUTING_RECOVERED)]


def recovery_gains(study) -> str:
    """Compares the losses before and after recovery. The gain that the same training gives the
    dense model is subtracted."""
    control = study.losses(DENSE_RECOVERED)
    teacher = study.teacher["window_nats"]
    lines = ["Before and after; *net* excludes the gain of the dense row by the same "
             "training.", "",
             "| configuration | added before | after | net change | KL before | "
             "after |", "|---|--:|--:|--:|--:|--:|"]
    for before, after in RECOVERED:
        plain, trained = study.losses(before), study.losses(after)
        net = stats.combine([(1, trained), (-1, plain), (-1, control),
                             (1, teacher)])
        added = [study.added(config).mean for config in (before, after)]
        kl = [study.row(config, "kl_nats") for config in (before, after)]
        lines.append(f"| {before.name} | {added[0]:+.4f} | {added[1]:+.4f} | "
                     f"{net.mean:+.4f} ± {net.half:.4f} | {kl[0]:.4f} | "
                     f"{kl[1]:.4f} |")
    return "\n".join(lines)


def pair_claims(rows, name, after=""):
    """Returns the claims of RAP's figure 13 about how to choose pairs."""
    return [at_most(f"{name}_fisher_{ratio}", f"Fisher ≤ magnitude at "
                    f"{percent(ratio)}, fisher-root{after}", "RAP figure 13",
                    rows[ratio, "fisher", "fisher-root"],
                    rows[ratio, "magnitude", "fisher-root"])
            for ratio in RATIOS]


def budget_claims():
    """Returns the claims of RAP's figure 13 about how to divide the budget among layers."""
    return [at_most(f"rap_fisher_root_{ratio}", f"fisher-root ≤ uniform at "
                    f"{percent(ratio)}, Fisher", "RAP figure 13",
                    RAP[ratio, "fisher", "fisher-root"],
                    RAP[ratio, "fisher", "uniform"]) for ratio in RATIOS]


RAP_TABLES = [
    Table(
        "rap", "RAP: which pairs, which budgets",
        "Keys lose RoPE pairs; values get whitened factors per head. Layers keep shares "
        "by the square roots of their Fisher scores (*fisher-root*), or equal ones "
        "(*uniform*; paper: figure 13 and appendix D.9). Ranks are multiples of 2 "
        "(`--rank-multiple 2`), as for commuting; for the other methods they are "
        "multiples of 8.",
        list(RAP.values()),
        pair_claims(RAP, "rap") + budget_claims(),
        [[config for key, config in RAP.items() if key[0] == ratio]
         for ratio in RATIOS]),
    Table(
        "rap_layers", "RAP: layer sensitivity",
        "Half of one layer's numbers kept, all others whole.",
        RAP_LAYER),
    Table(
        "rap_bits", "RAP with 4 bits",
        "The same with both sides in 4 bits per token (paper: figure 12).",
        [*RAP_BEST.values(), *RAP_4BIT.values()],
        [Claim(f"rap_4bit_{ratio}", f"4 bits add at most 0.03 nats at "
               f"{percent(ratio)}", "RAP figure 12",
               ((1.0, RAP_4BIT[ratio]), (-1.0, RAP_BEST[ratio])), -0.03)
         for ratio in RATIOS]),
    Table(
        "recovery", "Recovery",
        "Adapters on the attention projections, distilled from the "
        "uncompressed model on the calibration text, in the same way for every row and "
        "for the dense model. The gain of the dense row is what this training gives "
        "without any compression to recover from.",
        [*(RAP[key] for key in RAP_RECOVERED), *RAP_RECOVERED.values(),
         DENSE_RECOVERED, PALU_50, PALU_RECOVERED, COMMUTING_50,
         COMMUTING_RECOVERED],
        [at_most(f"recovery_{ratio}", f"recovery helps RAP at {percent(ratio)}",
                 "RAP figure 14", RAP_RECOVERED[ratio, "fisher", "fisher-root"],
                 RAP_BEST[ratio]) for ratio in RATIOS] +
        pair_claims(RAP_RECOVERED, "recovered", ", recovered"),
        extra=[recovery_gains]),
]

# ----------------------------------------------------------------- commuting

KEY_RATIOS = (0.75, 0.5, 0.25)


def keys_only(name, method, ratio, *options):
    return apply(name, method, "--keep", (1 + ratio) / 2, "--keep-values",
                 "--rank-multiple", 2, *options)


PAIRS = {}
for _ratio in KEY_RATIOS:
    PAIRS[_ratio, "rap"] = keys_only(
        f"{percent(_ratio, 1)} of keys, RAP (Fisher)", "rap", _ratio)
    PAIRS[_ratio, "one"] = keys_only(
        f"{percent(_ratio, 1)} of keys, pairs by query energy (s = 1)", "commuting",
        _ratio, "--group-heads", 1)
    PAIRS[_ratio, "all"] = keys_only(
        f"{percent(_ratio, 1)} of keys, commuting (s = all)", "commuting", _ratio,
        "--group-heads", "all")

COMMUTING_TABLES = [
    Table(
        "commuting", "RoPE-commuting keys against RAP",
        "Only keys are compressed. RAP is the one of the table above.",
        list(PAIRS.values()),
        [at_most(f"commuting_{ratio}", f"commuting (s = all) ≤ RAP at "
                 f"{percent(ratio, 1)}", "ours", PAIRS[ratio, "all"],
                 PAIRS[ratio, "rap"]) for ratio in KEY_RATIOS],
        [[PAIRS[ratio, kind] for kind in ("rap", "one", "all")]
         for ratio in KEY_RATIOS]),
]

# ---------------------------------------------------------------------- SVDq


def key_errors(study) -> str:
    """Compares measured errors of keys with the paper's analysis."""
    lines = [f"*Error of keys*: root of the mean over layers of |k' - k|² / |k - "
             f"mean|², over {KEY_ERROR_WINDOWS} windows. The analysis (SVDq "
             "section 4.3, lemma 4.1) expects an error of v / 4^bits in a channel of variance "
             "v, if distributions are uniform and ranges fit.", "",
             "| bits | keys | error of keys, SVDq | direct | ratio | ratio by "
             "the analysis |", "|--:|---|--:|--:|--:|--:|"]
    for bits in SCHEDULES:
        for place in ("pre", "post"):
            ours = SVDQ[bits, place, 16]
            direct = SVDQ[bits, place, 16, "direct"]
            measured = [study.row(config, "key_error")
                        for config in (ours, direct)]
            predicted = [study.row(config, "key_error_predicted")
                         for config in (ours, direct)]
            lines.append(f"| {bits} | {place}-RoPE | {measured[0]:.4f} | "
                         f"{measured[1]:.4f} | {measured[0] / measured[1]:.3f}"
                         f" | {predicted[0] / predicted[1]:.3f} |")
    return "\n".join(lines)


SCHEDULES = {
    "3": "8,4,4,4,2,2,0,0",
    "2": "8,4,4,0,0,0,0,0",
    "1.25": "4,4,2,0,0,0,0,0",
}
# The average bits of direct codes. Each layer has one width, and there are six layers. So averages
# grow in steps of 1/6 bit (4/6 from 4 to 8 bits). Direct codes never get fewer bits than SVDq.
DIRECT = {"3": "3", "2": "2", "1.25": "1.334"}
SVDQ = {}
for _bits, _schedule in SCHEDULES.items():
    for _place, _values in (("pre", 16), ("post", 16), ("pre", 4)):
        _label = f"{_place}-RoPE" + (", V4" if _values == 4 else "")
        SVDQ[_bits, _place, _values] = apply(
            f"SVDq {_bits} bits, {_label}", "svdq", "--key-bits", _schedule,
            "--value-bits", _values,
            *(("--post-rope",) if _place == "post" else ()))
        SVDQ[_bits, _place, _values, "direct"] = apply(
            f"direct {DIRECT[_bits]} bits per channel, {_label}", "channel",
            "--average-bits", DIRECT[_bits], "--value-bits", _values,
            *(("--post-rope",) if _place == "post" else ()))

SVDQ_TABLES = [
    Table(
        "svdq", "SVDq against direct quantization per channel",
        "Keys with a schedule over principal channels of the calibration's keys and "
        "static ranges, against keys quantized channel by channel at the same mean bits "
        "or the next that six layers allow. The paper compares 3 and 2 bits with direct "
        "3 bits (table 2), and has lower widths only with sparsity (table 3).",
        list(SVDQ.values()),
        [at_most(f"svdq_{bits}", f"SVDq ≤ direct at {bits} bits, pre-RoPE",
                 "SVDq table 2" if bits == "3" else "SVDq section 4.3",
                 SVDQ[bits, "pre", 16],
                 SVDQ[bits, "pre", 16, "direct"]) for bits in SCHEDULES],
        extra=[key_errors]),
]

# ----------------------------------------------------------------- baselines

BASELINES = [
    Config(f"per token, {bits} bits", baseline=f"per-token:k{bits},v{bits}",
           seeded=False) for bits in (8, 4, 3, 2)
] + [
    Config(f"KIVI, {bits} bits", baseline=f"kivi:{bits},group=32,residual=128",
           seeded=False) for bits in (4, 2)
] + [
    Config("ThinK-like 50 % of key channels, 4 bits", baseline="think:0.5,4",
           seeded=False),
    Config("low-rank keys 160/1024 of each sequence",
           baseline="low-rank:160/1024", seeded=False),
]

BASELINE_TABLES = [
    Table("baselines", "Pure quantization",
          "The oracle's results for caches without factors, at their true bytes: with a "
          "scale and a minimum for each head of 32 numbers, 4 bits per token are 5.0 bits "
          "a number.", BASELINES),
]

TABLES = (PALU_TABLES + LORC_TABLES + RAP_TABLES + COMMUTING_TABLES +
          SVDQ_TABLES + BASELINE_TABLES)

CURVES = {
    "Palu, groups of 4": [SEARCH[keep, "fisher"] for keep in (0.7, 0.5, 0.3)],
    "Palu 50 %, 4-3-2 bits": [BITS[bits, "on"] for bits in (4, 3, 2)],
    "RAP": list(RAP_BEST.values()),
    "RAP, 4 bits": list(RAP_4BIT.values()),
    "RAP, recovered": [RAP_RECOVERED[ratio, "fisher", "fisher-root"]
                       for ratio in RATIOS],
    "commuting keys": [PAIRS[ratio, "all"] for ratio in KEY_RATIOS],
    "SVDq, V4": [SVDQ[bits, "pre", 4] for bits in SCHEDULES],
    "8-4-3-2 bits per token": BASELINES[:4],
}
