"""Standard attention in three steps (FlashAttention, Algorithm 0 and, backward, Algorithm 3).

Every step reads its operands from the large memory and writes its result there: scores and probabilities,
N x N each, go back and forth. Mask and dropout are applied on the way, where a matrix is read anyway; see
`flashtile.lab.paper` for what it costs to give them passes of their own. Blocks that a mask hides are not
skipped. One head: query (N, d), key (N_k, d), value (N_k, d_v).

These steps are streams of matrix products and row operations whose tiles are the business of a library, so
nothing is said about the small memory.
"""

from __future__ import annotations

from torch import Tensor

from flashtile.lab.memory import Memory
from flashtile.lab.setting import Setting


def forward(
    query: Tensor, key: Tensor, value: Tensor, setting: Setting, memory: Memory
) -> tuple[Tensor, Tensor]:
    """``(out, probabilities)``: (N, d_v), and (N, N_k) without dropout, which the backward pass needs.

    A row that sees no key has output 0.
    """
    rows, columns = slice(0, query.shape[0]), slice(0, key.shape[0])
    scores = memory.scratch((query.shape[0], key.shape[0]), query)
    probabilities = memory.scratch((query.shape[0], key.shape[0]), query)
    out = memory.result((query.shape[0], value.shape[1]), query)

    # 1: S = Q K^T
    Q, K = memory.load(query), memory.load(key)
    memory.store(scores, (Q @ K.T) * setting.scale)

    # 2: P = softmax(S)
    S = setting.mask(memory.load(scores), rows, columns)
    exponentials = (S - S.row_max().finite()).exp()
    memory.store(probabilities, exponentials / exponentials.row_sum().or_one())

    # 3: O = P V
    P, V = memory.load(probabilities), memory.load(value)
    memory.store(out, setting.dropout(P, rows, columns) @ V)
    return out, probabilities


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    probabilities: Tensor,
    grad_out: Tensor,
    setting: Setting,
    memory: Memory,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    rows, columns = slice(0, query.shape[0]), slice(0, key.shape[0])
    grad_probabilities = memory.scratch((query.shape[0], key.shape[0]), query)
    grad_scores = memory.scratch((query.shape[0], key.shape[0]), query)
    grad_query, grad_key, grad_value = (memory.result(t.shape, query) for t in (query, key, value))

    # 1: dV = P^T dO
    P, dO = memory.load(probabilities), memory.load(grad_out)
    memory.store(grad_value, setting.dropout(P, rows, columns).T @ dO)

    # 2: dP = dO V^T
    dO, V = memory.load(grad_out), memory.load(value)
    memory.store(grad_probabilities, setting.dropout(dO @ V.T, rows, columns))

    # 3: dS_ij = P_ij (dP_ij - sum_l P_il dP_il)
    P, dP = memory.load(probabilities), memory.load(grad_probabilities)
    memory.store(grad_scores, P * (dP - (P * dP).row_sum()))

    # 4: dQ = dS K
    dS, K = memory.load(grad_scores), memory.load(key)
    memory.store(grad_query, (dS @ K) * setting.scale)

    # 5: dK = dS^T Q
    dS, Q = memory.load(grad_scores), memory.load(query)
    memory.store(grad_key, (dS.T @ Q) * setting.scale)
    return grad_query, grad_key, grad_value
