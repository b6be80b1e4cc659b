"""Records which programs gave a result, on which host and with what arguments."""

import functools
import hashlib
import platform
from pathlib import Path


@functools.cache
def binary_hash(binary: Path) -> str:
    """Returns a hash of the program, and of kvasir-bench beside it, which `kvasir bench` runs."""
    digest = hashlib.sha256(binary.read_bytes())
    bench = binary.with_name("kvasir-bench")
    if bench.exists():
        digest.update(bench.read_bytes())
    return digest.hexdigest()


def of(binary: Path, arguments) -> dict:
    return {"binary": binary_hash(binary), "host": platform.node(),
            "argv": [str(argument) for argument in arguments]}
