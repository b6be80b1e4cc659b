"""Paired statistics over evaluation windows, for bench/quality/quality.py.

Apart on purpose from what `kvasir-compress evaluate` computes for one candidate
(compress/evaluate/paired_interval.h): a test compares the two."""

import math
import statistics
from dataclasses import dataclass


def t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t: the normal one, corrected by the
    first four terms in 1/degrees."""
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
    """Mean and half width of its 95 % interval."""
    n = len(samples)
    mean = statistics.fmean(samples)
    if n < 2:
        return Interval(mean, math.inf)
    half = t_quantile(n - 1) * statistics.stdev(samples) / math.sqrt(n)
    return Interval(mean, half)


def combine(terms: list[tuple[float, list[float]]], constant: float = 0.0
            ) -> Interval:
    """The paired interval of constant + sum of factor * loss, where each loss
    is a list of nats over the same windows."""
    length = len(terms[0][1])
    if any(len(losses) != length for _, losses in terms):
        raise ValueError("losses of different windows")
    return interval([
        constant + sum(factor * losses[w] for factor, losses in terms)
        for w in range(length)
    ])


def verdict(difference: Interval, by_seed: list[Interval]) -> str:
    """What the data say of "difference <= 0": of the mean over calibration
    seeds, unless a single one says the opposite."""
    if difference.high <= 0:
        return ("seeds disagree" if any(one.low > 0 for one in by_seed)
                else "confirmed")
    if difference.low > 0:
        return ("seeds disagree" if any(one.high <= 0 for one in by_seed)
                else "contradicted")
    return "undecided"


def mean_of_seeds(runs: list[list[float]]) -> list[float]:
    """Per window, the mean over calibration seeds."""
    return [statistics.fmean(values) for values in zip(*runs, strict=True)]
