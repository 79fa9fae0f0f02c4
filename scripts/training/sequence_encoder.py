"""The sequence encoder of the paper: frame rows in, rows that also depend on the seconds before them out.

The product does not use it; training and evaluation measure what it would add.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_db.store.references import FEATURE_SIZE

LOOK_BACK_S = 15  # seconds before its own that a sequence row may depend on
N_HEADS, HIDDEN = 8, 1024


class SequenceEncoder(nn.Module):
    """Unit rows [..., n, 512], one per second -> unit rows that also depend on the 15 seconds before their own.

    One transformer layer without positions. A row attends to itself and its LOOK_BACK_S predecessors only, so the start
    of the sequence does not matter once they are known. A zero row is a hole: no row attends to it, and it stays zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.Linear(FEATURE_SIZE, 3 * FEATURE_SIZE)  # query, key, value
        self.gather = nn.Linear(FEATURE_SIZE, FEATURE_SIZE)
        self.widen = nn.Linear(FEATURE_SIZE, HIDDEN)
        self.narrow = nn.Linear(HIDDEN, FEATURE_SIZE)
        self.norm_attended = nn.LayerNorm(FEATURE_SIZE)
        self.norm_out = nn.LayerNorm(FEATURE_SIZE)

    def forward(self, rows: Tensor) -> Tensor:
        is_seen = rows.detach().abs().amax(-1) > 0
        x = F.normalize(rows, dim=-1)
        x = self.norm_attended(x + self.gather(self._attend(x, is_seen)))
        x = self.norm_out(x + self.narrow(F.relu(self.widen(x))))
        return F.normalize(x, dim=-1) * is_seen[..., None]

    def encode(self, rows: Tensor, context: Tensor) -> Tensor:
        """Sequence rows of the newest frame rows [n, 512], given up to 15 rows before them."""
        return cast(Tensor, self(torch.cat([context[-LOOK_BACK_S:], rows])))[-len(rows) :]

    def _attend(self, x: Tensor, is_seen: Tensor) -> Tensor:
        query, key, value = self.attend(x).chunk(3, -1)
        split = (*x.shape[:-1], N_HEADS, FEATURE_SIZE // N_HEADS)
        # Windows [..., n, heads, size, 16]: the row itself comes last.
        keys = F.pad(key.view(split), (0, 0, 0, 0, LOOK_BACK_S, 0)).unfold(-3, LOOK_BACK_S + 1, 1)
        values = F.pad(value.view(split), (0, 0, 0, 0, LOOK_BACK_S, 0)).unfold(-3, LOOK_BACK_S + 1, 1)
        in_window = F.pad(is_seen, (LOOK_BACK_S, 0)).unfold(-1, LOOK_BACK_S + 1, 1)[..., None, :]
        logits = torch.einsum("...d,...dk->...k", query.view(split), keys) / split[-1] ** 0.5
        # The window of a hole may have no seen row; a large negative number keeps the softmax finite there.
        weights = logits.masked_fill(~in_window, -1e9).softmax(-1)
        return torch.einsum("...k,...dk->...d", weights, values).flatten(-2)
