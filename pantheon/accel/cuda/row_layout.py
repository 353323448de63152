"""How much of a die the sampling of rows needs.  Imports no Numba."""

from __future__ import annotations

#: logits of which a block finds the best, how many it keeps, and how many when a sampler asks for more
CHUNK, KEEP, KEEP_MORE = 2048, 128, 512
#: logits of one sum of masses: what the host reads at most to draw one of them
MASS_CHUNK = 1024
#: how many bounds one launch measures
PROBES = 15
#: changes of logits that go to the die at a time
PATCHES = 4096


def levels(n: int, chunk: int, keep: int) -> list[int]:
    """Blocks of each launch that narrows n keys down to `keep`."""
    found = [-(-n // chunk)]
    while found[-1] > 1:
        found.append(-(-found[-1] * keep // chunk))
    return found


def key_count(n: int, chunk: int, keep: int) -> int:
    """Keys that all launches but the last leave."""
    return keep * sum(levels(n, chunk, keep)[:-1])


def chunks(n: int) -> int:
    """Sums of masses of a row."""
    return -(-n // MASS_CHUNK)


def row_bytes(n_rows: int, n_vocab: int) -> int:
    """Bytes beside the logits themselves, of a state with so many rows; one more row is an edited one."""
    keys = (n_rows + 1) * (key_count(n_vocab, CHUNK, KEEP) + KEEP)
    more = key_count(n_vocab, CHUNK, KEEP_MORE) + KEEP_MORE
    sums = (n_rows + 1 + PROBES) * chunks(n_vocab)
    bounds = 2 * (n_rows + 1 + PROBES)
    words = bounds + n_vocab + 4 * PATCHES + -(-n_vocab // 32)
    return 8 * (keys + more) + 12 * sums + 4 * words
