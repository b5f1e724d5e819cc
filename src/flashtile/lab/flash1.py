"""FlashAttention, the first paper: Algorithm 1 forward (with Algorithm 2's scale, mask and dropout) and
Algorithm 4 backward.

The outer loop goes over blocks of keys and values, the inner one over blocks of queries. Each visit to a tile
reads the normalised output of its rows and writes it again; the row sums l and row maxima m go with it. One
head: query (N, d), key (N_k, d), value (N_k, d_v). Line numbers are those of the paper's algorithms.
"""

from __future__ import annotations

import math

from torch import Tensor

from flashtile.lab.memory import Memory
from flashtile.lab.setting import Blocks, Setting, parts


def forward(
    query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, setting: Setting, memory: Memory
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, row_sum, row_max)``: (N, d_v) and twice (N, 1).

    A row that sees no key has output 0, sum 0 and maximum -inf.
    """
    length = query.shape[0]
    out = memory.result((length, value.shape[1]), query, fill=0.0)  # line 2: written here for the first time
    row_sum = memory.scratch((length, 1), query, fill=0.0)
    row_max = memory.scratch((length, 1), query, fill=-math.inf)
    for columns in parts(key.shape[0], blocks.columns):  # line 5
        visited = [rows for rows in parts(length, blocks.rows) if setting.visits(rows, columns)]
        if not visited:
            continue
        K_j, V_j = memory.load(key[columns]), memory.load(value[columns])  # line 6
        for rows in visited:  # line 7
            Q_i, O_i = memory.load(query[rows]), memory.load(out[rows])  # line 8
            l_i, m_i = memory.load(row_sum[rows]), memory.load(row_max[rows])
            S = (Q_i @ K_j.T) * setting.scale  # line 9
            memory.resident(Q_i, K_j, V_j, O_i, l_i, m_i, S)
            S = setting.mask(S, rows, columns)

            m_tile = S.row_max()  # line 10
            P = (S - m_tile.finite()).exp()
            l_tile = P.row_sum()

            m_new = m_i.maximum(m_tile)  # line 11
            from_old, from_tile = (m_i - m_new.finite()).exp(), (m_tile - m_new.finite()).exp()
            l_old = l_i.rescaled(from_old)
            l_new = l_old + l_tile.rescaled(from_tile)

            P = setting.dropout(P, rows, columns)
            O_new = O_i.rescaled(l_old) + (P @ V_j).rescaled(from_tile)  # line 12
            memory.store(out[rows], O_new / l_new.or_one())
            memory.store(row_sum[rows], l_new)  # line 13
            memory.store(row_max[rows], m_new)
    return out, row_sum, row_max


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    grad_out: Tensor,
    row_sum: Tensor,
    row_max: Tensor,
    blocks: Blocks,
    setting: Setting,
    memory: Memory,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value; P is computed again from l and m (Algorithm 4)."""
    length = query.shape[0]
    grad_query, grad_key, grad_value = (  # line 5
        memory.result(tensor.shape, query, fill=0.0) for tensor in (query, key, value)
    )
    for columns in parts(key.shape[0], blocks.columns):  # line 6
        visited = [rows for rows in parts(length, blocks.rows) if setting.visits(rows, columns)]
        if not visited:
            continue
        K_j, V_j = memory.load(key[columns]), memory.load(value[columns])  # line 7
        dK_j, dV_j = (memory.fresh(block.tensor.shape, query, 0.0) for block in (K_j, V_j))  # line 8
        for rows in visited:  # line 9
            Q_i, O_i = memory.load(query[rows]), memory.load(out[rows])  # line 10
            dO_i, dQ_i = memory.load(grad_out[rows]), memory.load(grad_query[rows])
            l_i, m_i = memory.load(row_sum[rows]), memory.load(row_max[rows])
            S = setting.mask((Q_i @ K_j.T) * setting.scale, rows, columns)  # lines 11, 12
            P = (S - m_i.finite()).exp() / l_i.or_one()  # line 13

            dV_j = dV_j + setting.dropout(P, rows, columns).T @ dO_i  # lines 14 to 16
            dP = setting.dropout(dO_i @ V_j.T, rows, columns)  # lines 17, 18
            memory.resident(Q_i, K_j, V_j, O_i, dO_i, dQ_i, dK_j, dV_j, l_i, m_i, P, dP)
            D_i = (dO_i * O_i).row_sum()  # line 19
            dS = P * (dP - D_i)  # line 20
            memory.store(grad_query[rows], dQ_i + (dS @ K_j) * setting.scale)  # line 21
            dK_j = dK_j + (dS.T @ Q_i) * setting.scale  # line 22
        memory.store(grad_key[columns], dK_j)  # line 24
        memory.store(grad_value[columns], dV_j)
    return grad_query, grad_key, grad_value
