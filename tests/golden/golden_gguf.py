"""Blocks of every type of GGUF files that is served, with the numbers that the package `gguf` unpacks from them."""

import json
import zlib

import gguf
import numpy as np

TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
         "IQ4_XS")
# {type: offsets of the float16 numbers in a block}
HALVES = {"F16": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
          "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0]}


def blocks_of(name, kind, random):
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    count = 64 if numbers == 1 else 4 if numbers == 32 else 2
    blocks = random.integers(0, 256, (count, size), np.uint8)
    if name == "F32":
        blocks = random.standard_normal((count, 1)).astype("<f4").view(np.uint8)
    if name == "BF16":
        blocks[:, 1] &= 0xBF  # so that no number is infinite or NaN
    for at in HALVES.get(name, []):
        scales = random.standard_normal(count) * 0.05
        scales[0] *= 1e-4  # subnormal
        blocks[:, at:at + 2] = scales.astype("<f2").reshape(-1, 1).view(np.uint8)
    return blocks


def write(root):
    cases = {}
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        blocks = blocks_of(name, kind, np.random.default_rng(zlib.crc32(name.encode())))
        numbers = gguf.quants.dequantize(blocks, kind)
        assert np.isfinite(numbers).all(), name
        cases[name] = {"type": int(kind), "blocks": blocks.tobytes().hex(),
                       "numbers": numbers.astype("<f4").tobytes().hex()}
    folder = root / "gguf"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "blocks.json").write_text(json.dumps(cases, indent=1) + "\n")
