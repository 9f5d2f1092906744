"""The seed-to-tensor generator: counter-based, exact in IEEE arithmetic, the same everywhere.

Word i of a tensor is SplitMix64's output function (Steele, Lea, Flood 2014) of key + i · 0x9E3779B97F4A7C15
(mod 2^64), where key is the first 8 bytes of BLAKE2b(name, key = seed as 8 little-endian bytes). A word
holds four 16-bit fields; a *normal* value is (sum of the fields − 131070) / √(4·(2^32 − 1)/12), a bell of
variance 1 whose only rounding is that one division. No torch or NumPy random stream is involved.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fulldiff.cases.model import Shape, Values, numel

F64 = NDArray[np.float64]
STEP = np.uint64(0x9E3779B97F4A7C15)
DEVIATION = math.sqrt(4 * (2**32 - 1) / 12)
CHUNK = 1 << 20

# Exact values: nonzeros per row of a factor and of the base weight. With inputs in {0, ±1} and up to
# three adapters every sum stays below 2^8 times the unit, so that even bf16 holds it.
FACTOR_NONZEROS = 2
BASE_NONZEROS = 4
SPECIAL_EXPONENTS = 4


def words(seed: int, name: str, start: int, count: int) -> NDArray[np.uint64]:
    """Words start … start + count − 1 of the stream ``name`` of ``seed``."""
    key = hashlib.blake2b(name.encode(), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    counter = np.arange(start, start + count, dtype=np.uint64)
    z = np.uint64(int.from_bytes(key, "little")) + (counter + np.uint64(1)) * STEP
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def normal(seed: int, name: str, shape: Shape) -> F64:
    """Bell-shaped values of mean 0 and variance 1, |v| < 3.5."""
    out = np.empty(numel(shape))
    for start in range(0, out.size, CHUNK):
        block = words(seed, name, start, min(CHUNK, out.size - start))
        fields = block.view(np.uint16).reshape(-1, 4)
        out[start : start + block.size] = fields.sum(1, dtype=np.int64) - 131070
    return (out / DEVIATION).reshape(shape)


def signs(seed: int, name: str, shape: Shape) -> F64:
    """Values in {−1, 0, 1}: one in eight is 0."""
    w = words(seed, name, 0, numel(shape))
    return np.where(w % 8 == 0, 0.0, np.where((w >> 8) % 2 == 0, 1.0, -1.0)).reshape(shape)


def sparse(seed: int, name: str, shape: Shape, nonzeros: int) -> F64:
    """Rows (first axis) of zeros with one to ``nonzeros`` entries ±1; every row has at least one.

    One dimension gives `signs`, and none ±1 (a scale of 0 would hide its adapter).
    """
    if len(shape) < 2:
        return signs(seed, name, shape) if shape else np.where(words(seed, name, 0, 1)[0] % 2 == 0, 1.0, -1.0)
    rows, columns = shape[0], numel(shape[1:])
    out = np.zeros((rows, columns))
    w = words(seed, name, 0, rows * nonzeros).reshape(rows, nonzeros)
    for turn in range(nonzeros if columns else 0):
        at = (w[:, turn] >> np.uint64(8)) % np.uint64(columns)
        out[np.arange(rows), at.astype(np.int64)] = np.where(w[:, turn] % 2 == 0, 1.0, -1.0)
    return out.reshape(shape)


def special(seed: int, name: str, shape: Shape) -> F64:
    """Values spread over 2^±4 with signed zeros: where badly ordered arithmetic loses or overflows."""
    w = words(seed, name + "!", 0, numel(shape)).reshape(shape)
    spread = np.exp2((w % (2 * SPECIAL_EXPONENTS + 1)).astype(np.float64) - SPECIAL_EXPONENTS)
    zero = np.where((w >> np.uint64(8)) % np.uint64(8) == 0, 0.0, spread)
    return normal(seed, name, shape) * zero


def factor(values: Values, seed: int, name: str, shape: Shape, dense: bool = False) -> F64:
    """One factor of an adapter, float64; variance about 1 / in so that products keep their size.

    Exact ones are sparse, or all ±1 but for some zeros where ``dense``.
    """
    if values == "exact":
        return signs(seed, name, shape) if dense else sparse(seed, name, shape, FACTOR_NONZEROS)
    return _maker(values)(seed, name, shape) / math.sqrt(max(1, numel(shape[1:])))


def magnitude(values: Values, seed: int, name: str, shape: Shape) -> F64:
    """The magnitudes of a DoRA, float64: 0.5 and more, about the norms that a base weight has."""
    return 0.5 + np.abs(_maker(values)(seed, name, shape)) / 2


def base(values: Values, seed: int, name: str, shape: Shape) -> F64:
    """The base weight (out, in / groups, *kernel) or bias (out,), float64."""
    if values == "exact":
        return sparse(seed, name, shape, BASE_NONZEROS)
    return _maker(values)(seed, name, shape) / math.sqrt(max(1, numel(shape[1:])))


def activation(values: Values, seed: int, name: str, shape: Shape) -> F64:
    """The input, float64."""
    return signs(seed, name, shape) if values == "exact" else _maker(values)(seed, name, shape)


def _maker(values: Values) -> Callable[[int, str, Shape], F64]:
    return special if values == "special" else normal
