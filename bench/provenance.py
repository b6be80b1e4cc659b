"""Which binary a result is of, measured where and with what arguments."""

import functools
import hashlib
import platform
from pathlib import Path


@functools.cache
def binary_hash(binary: Path) -> str:
    return hashlib.sha256(binary.read_bytes()).hexdigest()


def of(binary: Path, arguments) -> dict:
    return {"binary": binary_hash(binary), "host": platform.node(),
            "argv": [str(argument) for argument in arguments]}
