"""Token-by-token double-precision references, written from the formulas and independent of the package's code."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gdn_row(
    x: Array, a: Array, b: Array, w: dict[str, Array], conv_state: Array, memory: Array, prefix: int, commit: int, noisy: int
) -> tuple[Array, Array, Array]:
    """One row of the GDN block scan.

    x [T, C]; a, b [T, v_heads]; conv_state [C, K - 1]; memory [v_heads, k_dim, v_dim].
    Returns out [commit + noisy, v_heads, v_dim], the new conv_state and the new memory.
    """
    v_heads, k_dim, v_dim = memory.shape
    C, K = w["conv"].shape
    key_dim = (C - v_heads * v_dim) // 2
    k_heads = key_dim // k_dim
    history = np.concatenate([conv_state.T, x])  # input at position t is row t + K - 1

    def convolve(t: int) -> Array:
        total = sum(w["conv"][:, j] * history[t + j] for j in range(K))
        if t >= commit:
            for j in range(w["right_conv"].shape[1]):
                if t + 1 + j < commit + noisy:
                    total = total + w["right_conv"][:, j] * x[t + 1 + j]
        return silu(total)

    def heads(t: int) -> tuple[Array, Array, Array]:
        c = convolve(t)
        q, k = c[:key_dim].reshape(k_heads, k_dim), c[key_dim : 2 * key_dim].reshape(k_heads, k_dim)
        q, k = (m / np.sqrt((m * m).sum(-1, keepdims=True) + 1e-6) for m in (q, k))
        repeat = v_heads // k_heads
        return np.repeat(q, repeat, 0), np.repeat(k, repeat, 0), c[2 * key_dim :].reshape(v_heads, v_dim)

    memory = memory.copy()
    out = np.zeros((commit + noisy, v_heads, v_dim))
    for t in range(commit):
        q, k, v = heads(t)
        decay = np.exp(-np.exp(w["A_log"]) * np.log1p(np.exp(a[t] + w["dt_bias"])))
        beta = 1 / (1 + np.exp(-b[t]))
        for h in range(v_heads):
            faded = decay[h] * memory[h]
            memory[h] = faded + np.outer(k[h], beta[h] * (v[h] - faded.T @ k[h]))
            out[t, h] = memory[h].T @ q[h] / np.sqrt(k_dim)
    block = [heads(commit + i) for i in range(noisy)]
    n = prefix + commit
    for i, (q, _, _) in enumerate(block):
        for h in range(v_heads):
            logits = [w["temperature"][h] * (q[h] @ k[h]) for _, k, _ in block]
            values = [v[h] for _, _, v in block]
            if n > 0:
                logits.append(w["memory_bias"][h] + w["memory_slope"][h] * np.log(1 + n))
                values.append(memory[h].T @ q[h] / np.sqrt(k_dim))
            weights = np.exp(np.array(logits) - max(logits))
            out[commit + i, h] = (weights / weights.sum()) @ np.array(values)
    return out, history[commit : commit + K - 1].T, memory


def expert_subset(probs: Array, mass: float, top_k: int) -> set[int]:
    """The expert subset of a block, probs [tokens, E]; ties go to the lower id."""
    sums = np.zeros(probs.shape[1])
    for row in probs:
        for e in sorted(range(len(row)), key=lambda e: (-row[e], e))[:top_k]:
            sums[e] += row[e]
    order = sorted(range(len(sums)), key=lambda e: (-sums[e], e))
    kept, total = [], 0.0
    for e in order:
        if len(kept) >= top_k and (total >= mass * sums.sum() or sums[e] == 0):
            break
        kept.append(e)
        total += sums[e]
    return set(kept)
