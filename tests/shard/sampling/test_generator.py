"""Random numbers against the published answers of Philox, and their distribution."""

import numpy as np
import pytest
from headrace_shard.sampling.generator import philox, uniforms

# Lines "philox4x32 10" of the file kat_vectors that comes with Random123.
_KNOWN = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), _KNOWN)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    words = philox(np.array(counter, dtype=np.uint64), np.array(key, dtype=np.uint64))
    assert tuple(words.tolist()) == expected


def test_philox_is_the_same_for_many_at_once() -> None:
    counters = np.array([counter for counter, _, _ in _KNOWN], dtype=np.uint64).T
    keys = np.array([key for _, key, _ in _KNOWN], dtype=np.uint64).T
    assert philox(counters, keys).T.tolist() == [list(expected) for _, _, expected in _KNOWN]


def test_uniforms_take_53_bits_of_the_first_two_words() -> None:
    index = 0x85A308D3_243F6A88
    seed = 0x299F31D0_A4093822
    words = philox(
        np.array([0x243F6A88, 0x85A308D3, 0, 0], dtype=np.uint64),
        np.array([0xA4093822, 0x299F31D0], dtype=np.uint64),
    )
    number = uniforms(np.array([seed], dtype=np.uint64), np.array([index], dtype=np.uint64))[0]
    assert number == ((int(words[0]) >> 5) * 2**26 + (int(words[1]) >> 6)) / 2**53


def test_uniforms_depend_on_seed_and_index_alone() -> None:
    seeds = np.array([[3], [2**64 - 1]], dtype=np.uint64)
    indices = np.array([[0, 1, 7], [7, 0, 1]], dtype=np.uint64)
    table = uniforms(seeds, indices)
    for row in range(2):
        for column in range(3):
            alone = uniforms(seeds[row], indices[row, column : column + 1])
            assert alone[0] == table[row, column]
    assert len(set(table.flatten().tolist())) == 6


def test_uniforms_are_uniform_along_and_across_seeds() -> None:
    for seeds, indices in (
        (np.full(100_000, 5), np.arange(100_000)),
        (np.arange(100_000), np.zeros(100_000)),
    ):
        numbers = uniforms(seeds.astype(np.uint64), indices.astype(np.uint64))
        assert numbers.min() >= 0 and numbers.max() < 1
        counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
        # 99 degrees of freedom: 148 is exceeded once in a thousand.
        assert ((counts - 1000) ** 2 / 1000).sum() < 148
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.015
