"""A paged KV-cache: sequences of different lengths, one a fork; decode attention reads each by its block table."""

import numpy as np

import flashkernel as fk

heads, dim = 4, 64
rng = np.random.default_rng(0)
pool = fk.KvPagePool(8, heads, dim, page_size=16, dtype="float32")
cache = fk.KvCache(pool)


def append(sequence: fk.SequenceId, count: int) -> None:
    """Room for `count` tokens, and random keys and values into it."""
    slots = cache.append(sequence, count)
    k, v = (rng.standard_normal((count, heads, dim), dtype=np.float32) for _ in range(2))
    fk.kv_append(k, v, pool.k_pages(), pool.v_pages(), slots)


first, second = cache.create(), cache.create()
append(first, 37)
append(second, 5)
fork = cache.fork(first)  # shares every page; the partly filled one is copied when either side appends
append(fork, 1)

sequences = [first, second, fork]
table, lengths = cache.block_table(sequences)
q = rng.standard_normal((3, heads, 1, dim), dtype=np.float32)  # one new token each
out = fk.attention_paged(q, pool.k_pages(), pool.v_pages(), table, lengths)

k, v = fk.kv_read(pool.k_pages(), pool.v_pages(), table, lengths)  # the same keys, contiguous
for b, length in enumerate(lengths):
    dense = fk.attention(q[b : b + 1], k[b : b + 1, :length].swapaxes(1, 2), v[b : b + 1, :length].swapaxes(1, 2))
    np.testing.assert_allclose(out[b : b + 1], dense, atol=1e-5)

print(f"lengths {lengths.tolist()}, {pool.num_used} pages of {pool.num_pages} in use, block table\n{table}")
for sequence in sequences:
    cache.free(sequence)
assert pool.num_used == 0
