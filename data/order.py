"""The order of samples: a keyed permutation, the same on every machine and with every library version."""

import numpy as np

_FEISTEL_ROUNDS = 6


def permute(index: np.ndarray, n: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Sends each `index` in 0..n-1 to one of 0..n-1, one to one for each (seed, epoch); int64.

    A Feistel permutation with cycle walking (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains").
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    key = _mix(_mix(np.full(index.shape, seed % 2**64, dtype=np.uint64)) + epoch.astype(np.uint64))
    x = _feistel(index.astype(np.uint64), key, half)
    while (outside := x >= n).any():  # 4^half < 4n, so a few iterations suffice
        x[outside] = _feistel(x[outside], key[outside], half)
    return x.astype(np.int64)


def _feistel(x: np.ndarray, key: np.ndarray, half: int) -> np.ndarray:
    """A keyed permutation of the numbers of 2·half bits, element by element."""
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> bits, x & mask
    for i in range(_FEISTEL_ROUNDS):
        left, right = right, left ^ (_mix(key + (right << np.uint64(8)) + np.uint64(i)) & mask)
    return (left << bits) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's output function (Steele, Lea and Flood 2014), modulo 2^64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
