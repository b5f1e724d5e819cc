"""FlashAttention-2, the second paper: Algorithm 1 forward, Algorithm 2 backward.

The outer loop goes over blocks of queries, each of which is a task of its own. The output stays on the chip,
not normalised, until the last block of keys; then it is divided once, and of the statistics only the LSE is
kept. Backward, the outer loop goes over blocks of keys. One head: query (N, d), key (N_k, d), value
(N_k, d_v). Line numbers are those of the paper's algorithms.
"""

from __future__ import annotations

import math

from torch import Tensor

from flashtile.lab.memory import Memory
from flashtile.lab.setting import Blocks, Setting, parts


def forward(
    query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, setting: Setting, memory: Memory
) -> tuple[Tensor, Tensor]:
    """``(out, lse)``: (N, d_v) and (N, 1). A row that sees no key has output 0 and LSE -inf."""
    length = query.shape[0]
    out = memory.result((length, value.shape[1]), query)
    lse = memory.scratch((length, 1), query)
    for rows in parts(length, blocks.rows):  # line 3
        Q_i = memory.load(query[rows])  # line 4
        O_i = memory.fresh(out[rows].shape, query, 0.0)  # line 5
        l_i, m_i = (memory.fresh(lse[rows].shape, query, fill) for fill in (0.0, -math.inf))
        for columns in parts(key.shape[0], blocks.columns):  # line 6
            if not setting.visits(rows, columns):
                continue
            K_j, V_j = memory.load(key[columns]), memory.load(value[columns])  # line 7
            S = (Q_i @ K_j.T) * setting.scale  # line 8
            memory.resident(Q_i, K_j, V_j, O_i, l_i, m_i, S)
            S = setting.mask(S, rows, columns)

            m_new = m_i.maximum(S.row_max())  # line 9
            P = (S - m_new.finite()).exp()
            from_old = (m_i - m_new.finite()).exp()
            l_i = l_i.rescaled(from_old) + P.row_sum()

            P = setting.dropout(P, rows, columns)
            O_i = O_i.rescaled(from_old) + P @ V_j  # line 10
            m_i = m_new
        memory.store(out[rows], O_i / l_i.or_one())  # lines 12, 14
        memory.store(lse[rows], m_i + l_i.log())  # lines 13, 15
    return out, lse


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    blocks: Blocks,
    setting: Setting,
    memory: Memory,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value; P is computed again from the LSE (Algorithm 2).

    The output is read once, for D; the inner loop needs it no more.
    """
    length = query.shape[0]
    grad_query = memory.result(query.shape, query, fill=0.0)  # line 3
    grad_key, grad_value = (memory.result(tensor.shape, query) for tensor in (key, value))
    delta = memory.scratch((length, 1), query)  # line 4: D = rowsum(dO * O)
    for rows in parts(length, blocks.rows):
        memory.store(delta[rows], (memory.load(grad_out[rows]) * memory.load(out[rows])).row_sum())

    for columns in parts(key.shape[0], blocks.columns):  # line 5
        visited = [rows for rows in parts(length, blocks.rows) if setting.visits(rows, columns)]
        dK_j, dV_j = (memory.fresh(tensor[columns].shape, query, 0.0) for tensor in (key, value))  # line 7
        if visited:
            K_j, V_j = memory.load(key[columns]), memory.load(value[columns])  # line 6
        for rows in visited:  # line 8
            Q_i, dO_i = memory.load(query[rows]), memory.load(grad_out[rows])  # line 9
            dQ_i, L_i, D_i = (memory.load(tensor[rows]) for tensor in (grad_query, lse, delta))
            S = setting.mask((Q_i @ K_j.T) * setting.scale, rows, columns)  # line 10
            P = (S - L_i.finite()).exp()  # line 11

            dV_j = dV_j + setting.dropout(P, rows, columns).T @ dO_i  # line 12
            dP = setting.dropout(dO_i @ V_j.T, rows, columns)  # line 13
            memory.resident(Q_i, K_j, V_j, dO_i, dQ_i, dK_j, dV_j, L_i, D_i, P, dP)
            dS = P * (dP - D_i)  # line 14
            memory.store(grad_query[rows], dQ_i + (dS @ K_j) * setting.scale)  # line 15
            dK_j = dK_j + (dS.T @ Q_i) * setting.scale  # line 16
        memory.store(grad_key[columns], dK_j)  # line 18
        memory.store(grad_value[columns], dV_j)
    return grad_query, grad_key, grad_value
