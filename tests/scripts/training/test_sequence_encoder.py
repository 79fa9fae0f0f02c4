"""The sequence encoder: rows by the definition, in pieces and in batches, and across holes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reference_db.store.references import FEATURE_SIZE
from training.sequence_encoder import LOOK_BACK_S, N_HEADS, SequenceEncoder


def unit_rows(n: int, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(n, FEATURE_SIZE, generator=torch.Generator().manual_seed(seed)), dim=-1)


@pytest.fixture(scope="module")
def sequence() -> SequenceEncoder:
    torch.manual_seed(3)
    return SequenceEncoder().eval()


def by_definition(sequence: SequenceEncoder, rows: Tensor) -> Tensor:
    """Row by row and head by head."""
    out = torch.zeros_like(rows)
    width = FEATURE_SIZE // N_HEADS
    for i in range(len(rows)):
        if not rows[i].any():
            continue
        window = [rows[j] for j in range(max(0, i - LOOK_BACK_S), i + 1) if rows[j].any()]
        query = sequence.attend(rows[i])[:FEATURE_SIZE]
        seen = torch.stack([sequence.attend(row) for row in window])
        heads = []
        for h in range(N_HEADS):
            part = slice(h * width, (h + 1) * width)
            key, value = seen[:, FEATURE_SIZE : 2 * FEATURE_SIZE][:, part], seen[:, 2 * FEATURE_SIZE :][:, part]
            heads.append((key @ query[part] / width**0.5).softmax(0) @ value)
        x = sequence.norm_attended(rows[i] + sequence.gather(torch.cat(heads)))
        x = sequence.norm_out(x + sequence.narrow(sequence.widen(x).relu()))
        out[i] = x / x.norm()
    return out


@torch.no_grad()
def test_rows_are_those_of_the_definition(sequence: SequenceEncoder) -> None:
    rows = unit_rows(40)
    rows[[0, 7, 8, 30]] = 0  # holes
    found = sequence(rows)
    torch.testing.assert_close(found, by_definition(sequence, rows), atol=1e-5, rtol=0)
    assert not found[[0, 7, 8, 30]].any()


@torch.no_grad()
@pytest.mark.parametrize("cuts", [(1,) * 40, (7, 16, 1, 16), (40,)])
def test_a_stream_in_pieces_gives_the_same_rows(sequence: SequenceEncoder, cuts: tuple[int, ...]) -> None:
    rows = unit_rows(40, seed=1)
    rows[12] = 0
    pieces, at = [], 0
    for n in cuts:
        pieces.append(sequence.encode(rows[at : at + n], rows[max(0, at - LOOK_BACK_S) : at]))
        at += n
    torch.testing.assert_close(torch.cat(pieces), sequence(rows), atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_batch_of_sequences_is_each_of_them(sequence: SequenceEncoder) -> None:
    batch = torch.stack([unit_rows(20, seed) for seed in range(3)])
    torch.testing.assert_close(sequence(batch)[1], sequence(batch[1]), atol=1e-5, rtol=0)


def test_gradients_are_finite_across_holes(sequence: SequenceEncoder) -> None:
    rows = unit_rows(5)
    rows[2] = 0
    sequence(rows)[:, :7].sum().backward()
    gradients = [p.grad for p in sequence.parameters()]
    assert all(g is not None and torch.isfinite(g).all() for g in gradients)
