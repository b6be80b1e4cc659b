"""Paired statistics over evaluation windows, for bench/quality/.

This is deliberately independent of `kvasir-compress evaluate`, which computes the same for
one candidate (compress/evaluate/paired_interval.h). A test compares the two."""

import math
import statistics
from dataclasses import dataclass


def t_quantile(degrees: int) -> float:
    """Returns the 97.5 % quantile of Student's t. It is the normal quantile with the first four
    corrections in powers of 1/degrees."""
    z = statistics.NormalDist().inv_cdf(0.975)
    n = degrees
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / n**k for k, term in enumerate(terms))


@dataclass(frozen=True)
class Interval:
    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def interval(samples: list[float]) -> Interval:
    """Returns the mean of the samples and the half width of its 95 % interval."""
    n = len(samples)
    mean = statistics.fmean(samples)
    if n < 2:
        return Interval(mean, math.inf)
    half = t_quantile(n - 1) * statistics.stdev(samples) / math.sqrt(n)
    return Interval(mean, half)


def combine(terms: list[tuple[float, list[float]]], constant: float = 0.0
            ) -> Interval:
    """Returns the interval of constant + sum of factor * loss. Each loss is a list of nats, one
    for each window, and all lists are for the same windows."""
    length = len(terms[0][1])
    if any(len(losses) != length for _, losses in terms):
        raise ValueError("losses of different windows")
    return interval([
        constant + sum(factor * losses[w] for factor, losses in terms)
        for w in range(length)
    ])


def verdict(difference: Interval, by_seed: list[Interval]) -> str:
    """Judges "difference <= 0" by the mean over calibration seeds, unless a single seed
    says the opposite."""
    if difference.high <= 0:
        return ("seeds disagree" if any(one.low > 0 for one in by_seed)
                else "confirmed")
    if difference.low > 0:
        return ("seeds disagree" if any(one.high <= 0 for one in by_seed)
                else "contradicted")
    return "undecided"


def mean_of_seeds(runs: list[list[float]]) -> list[float]:
    """Returns the mean over calibration seeds for each window."""
    return [statistics.fmean(values) for values in zip(*runs, strict=True)]


def two_sided(samples: list[float]) -> float:
    """Returns the p-value of the hypothesis that the samples' mean is 0, by Student's t."""
    n = len(samples)
    if n < 2:
        return 1.0
    mean, deviation = statistics.fmean(samples), statistics.stdev(samples)
    if deviation == 0.0:
        return 1.0 if mean == 0.0 else 0.0
    return t_tails(abs(mean) * math.sqrt(n) / deviation, n - 1)


def t_tails(t: float, degrees: int) -> float:
    """Returns P(|T| > t). It is integrated by Simpson's rule over the angle
    atan(t / sqrt(degrees)), in which the density is a power of the cosine."""
    def integral(low: float, high: float, steps: int = 2000) -> float:
        width = (high - low) / steps
        values = [max(math.cos(low + k * width), 0.0) ** (degrees - 1)
                  for k in range(steps + 1)]
        return width / 3 * (values[0] + values[-1] + 4 * sum(values[1:-1:2]) +
                            2 * sum(values[2:-1:2]))
    angle = math.atan(t / math.sqrt(degrees))
    return integral(angle, math.pi / 2) / integral(0.0, math.pi / 2)


def holm(p_values: list[float]) -> list[float]:
    """Adjusts p-values for their number (Holm's procedure). If those of at most 0.05 are
    accepted, the chance that any of them is accidental is at most 0.05."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def ranks_agree(first: list[float], second: list[float]) -> float:
    """Returns Spearman's correlation. Equal numbers share their mean rank. The result is nan if
    all numbers of a list are equal."""
    def ranks(values: list[float]) -> list[float]:
        return [sum(other < value for other in values) +
                (sum(other == value for other in values) - 1) / 2
                for value in values]
    if min(len(set(first)), len(set(second))) < 2:
        return math.nan
    return statistics.correlation(ranks(first), ranks(second))
