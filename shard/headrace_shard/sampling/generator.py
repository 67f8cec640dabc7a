"""Random numbers of one request: a pure function of its seed and of the index of the token to choose.

Nothing is kept between tokens, so neither a preemption nor a chunked prompt nor a batch-mate can change what
a request draws. Knows no logits and no device.
"""

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

_NUM_ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox(counters: UInt64Array, keys: UInt64Array) -> UInt64Array:
    """Philox 4x32-10: counters [4, ...] and keys [2, ...], 32-bit words, broadcast -> [4, ...] 32-bit words.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Each word is held in 64 bits,
    so that the products of two words need no second type.
    """
    first, second, third, fourth = counters
    low_key, high_key = keys
    for _ in range(_NUM_ROUNDS):
        product = first * _MULTIPLIERS[0]
        other = third * _MULTIPLIERS[1]
        first = (other >> _32) ^ second ^ low_key
        second = other & _LOW
        third = (product >> _32) ^ fourth ^ high_key
        fourth = product & _LOW
        low_key = (low_key + _KEY_STEPS[0]) & _LOW
        high_key = (high_key + _KEY_STEPS[1]) & _LOW
    return np.stack(np.broadcast_arrays(first, second, third, fourth))


def uniforms(seeds: UInt64Array, indices: UInt64Array) -> npt.NDArray[np.float64]:
    """One number in [0, 1), a multiple of 2**-53, for each seed and index of the same, or broadcast, shape.

    The seed is the key, the index the low half of the counter; 53 of the 128 bits are used.
    """
    zeros = np.zeros_like(indices)
    counters = np.stack([indices & _LOW, indices >> _32, zeros, zeros])
    words = philox(counters, np.stack([seeds & _LOW, seeds >> _32]))
    whole = (words[0] >> np.uint64(5)) * np.uint64(2**26) + (words[1] >> np.uint64(6))
    numbers: npt.NDArray[np.float64] = whole.astype(np.float64) * 2.0**-53
    return numbers
