"""Makes the saved state of one sequence of llama.cpp's cache longer.
A short prompt is run, and its rows are copied in random order to the wanted number
of cells. A step then reads as much as after a prompt of that length, but its output
means nothing."""

import struct
from dataclasses import dataclass

import numpy as np

CELL = struct.Struct("<iIi")  # position, number of sequences that use the cell, sequence id


class Reader:
    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def take(self, form: str):
        value, = struct.unpack("<" + form, self.bytes(struct.calcsize("<" + form)))
        return value

    def bytes(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise ValueError(f"state of {len(self.data)} bytes ends before {self.at + count}")
        self.at += count
        return self.data[self.at - count:self.at]


@dataclass
class Longer:
    state: bytes
    cell_bytes: int  # bytes of one token's keys and values in all layers


def longer_rows(reader: Reader, out: bytearray, pick: np.ndarray, count: int) -> int:
    """Writes for each cell the stored row that `pick` names. Returns the bytes of a row."""
    kind, row = reader.take("i"), reader.take("Q")
    rows = np.frombuffer(reader.bytes(row * count), np.uint8).reshape(count, row)
    out += struct.pack("<iQ", kind, row)
    out += rows[pick].tobytes()
    return row


def longer_columns(reader: Reader, out: bytearray, pick: np.ndarray, count: int) -> int:
    """Like longer_rows, for values without flash attention. They are stored transposed: all
    cells of the first number of a row, then those of the next."""
    kind, element, width = reader.take("i"), reader.take("I"), reader.take("I")
    columns = np.frombuffer(reader.bytes(width * element * count), np.uint8)
    out += struct.pack("<iII", kind, element, width)
    out += columns.reshape(width, count, element)[:, pick].tobytes()
    return width * element


def longer(state: bytes, cells: int, seed: int = 1) -> Longer:
    """Returns the state with `cells` cells. Raises ValueError if it does not have the layout of
    this version of llama.cpp."""
    reader, out, deal = Reader(state), bytearray(), np.random.default_rng(seed)
    cell_bytes = 0
    out += reader.bytes(8)  # magic number and sequence
    streams = reader.take("I")
    out += struct.pack("<I", streams)
    for _ in range(streams):
        count = reader.take("I")
        out += struct.pack("<I", cells if count else 0)
        if not count:
            continue
        for position in range(count):
            have = CELL.unpack(reader.bytes(CELL.size))
            if have[:2] != (position, 1):
                raise ValueError(f"cell {position} of the state has position {have[0]} and "
                                 f"{have[1]} sequences, want position {position} and 1 sequence")
        for position in range(cells):
            out += CELL.pack(position, 1, 0)
        transposed, layers = reader.take("I"), reader.take("I")
        if transposed not in (0, 1):
            raise ValueError(f"the flag that values are transposed: want 0 or 1, have {transposed}")
        out += struct.pack("<II", transposed, layers)
        for part in range(2 * layers):  # keys of all layers, then values
            pick = deal.integers(count, size=cells)
            is_columns = transposed and part >= layers
            cell_bytes += (longer_columns if is_columns else longer_rows)(reader, out, pick, count)
    if reader.at != len(state):
        raise ValueError(f"{len(state) - reader.at} bytes are left after the end of the state")
    return Longer(bytes(out), cell_bytes)
