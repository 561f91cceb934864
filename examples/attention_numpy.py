"""Attention on NumPy arrays, without any framework: grouped heads, causal, checked against the formula."""

import numpy as np

import flashkernel as fk

rng = np.random.default_rng(0)
q = rng.standard_normal((1, 8, 128, 64), dtype=np.float32)  # [batch, heads_q, seq_q, head_dim]
k, v = (rng.standard_normal((1, 2, 128, 64), dtype=np.float32) for _ in range(2))  # four query heads share a kv head

out, lse = fk.attention(q, k, v, causal=True, return_lse=True)

scores = q @ k.repeat(4, axis=1).swapaxes(-1, -2) / 8
scores[..., ~np.tri(128, dtype=bool)] = -np.inf
weights = np.exp(scores - lse[..., None])
np.testing.assert_allclose(out, weights @ v.repeat(4, axis=1), atol=1e-5)

kernel = fk.explain("attention", q, k, v, causal=True).kernel
print(f"attention gave {out.shape} on {fk.get_num_threads()} threads by {kernel}")
