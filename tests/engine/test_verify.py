"""Drafts in a batch: where they stand, which rows are sampled, and which tokens a span keeps."""

from __future__ import annotations

import numpy as np
import torch

from batchinfer.core.plan import Drafts, Plan
from batchinfer.core.request import RowError
from batchinfer.core.sequences import Sequence, SequenceTable
from batchinfer.runtime.batch import RaggedBatchBuilder, StepBatch
from batchinfer.runtime.verify import accept
from tests.fakes import request

FAILURE = RowError("non_finite_logits", "no number")


def table_of(lengths: list[int], block_size: int = 4) -> SequenceTable:
    table = SequenceTable(len(lengths), 60, 16)
    for i, length in enumerate(lengths):
        seq = Sequence(i, request(i, [100 * i + j for j in range(length)], max_tokens=30), limit=length + 30, clipped=False)
        slot = table.admit(seq, 0)
        table.num_blocks[slot] = 12
        table.block_table[slot, :12] = 1 + 12 * i + np.arange(12)
    return table


def test_drafts_stand_behind_their_rows_tokens_and_are_sampled_too() -> None:
    table = table_of([5, 9, 7])
    slots = table.running().copy()
    plan = Plan(slots, np.array([4, 2, 3], np.int32), np.array([1, 3, 4], np.int32), np.array([True, False, True]))
    drafts = Drafts(np.array([2, 0, 3], np.int32), np.array([71, 72, 91, 92, 93], np.int32))
    batch = RaggedBatchBuilder(table, 4, torch.device("cpu")).build(plan, drafts)
    assert batch.input_ids.tolist() == [4, 71, 72, 102, 103, 104, 203, 204, 205, 206, 91, 92, 93]
    assert batch.positions.tolist() == [4, 5, 6, 2, 3, 4, 3, 4, 5, 6, 7, 8, 9]
    assert batch.attn.num_tokens.tolist() == [3, 3, 7]
    assert batch.attn.query_start.tolist() == [0, 3, 6, 13]
    assert batch.logit_rows.tolist() == [0, 1, 2, 9, 10, 11, 12]
    assert batch.sampling_slots.tolist() == [slots[0]] * 3 + [slots[2]] * 4
    assert batch.fill_positions.tolist() == [5, 6, 7, 7, 8, 9, 10]
    assert batch.num_drafts.tolist() == [2, 3]
    assert table.num_tokens[slots].tolist() == [5, 9, 7], "a draft is not one of the row's tokens"
    assert batch.attn.write_block.tolist()[-3:] == [int(table.block_table[slots[2], p // 4]) for p in (7, 8, 9)]


def by_hand(said: list[int], drafts: list[list[int]]) -> list[list[int]]:
    out, at = [], 0
    for guess in drafts:
        mine = said[at : at + len(guess) + 1]
        kept = [mine[0]]
        while len(kept) <= len(guess) and kept[-1] == guess[len(kept) - 1]:
            kept.append(mine[len(kept)])
        out.append(kept)
        at += len(guess) + 1
    return out


def batch_of(drafts: list[list[int]]) -> StepBatch:
    counts = np.array([len(guess) for guess in drafts], np.int32)
    slots = np.repeat(np.arange(len(drafts), dtype=np.int32), counts + 1)
    ids = np.array([token for guess in drafts for token in guess], np.int32)
    empty = torch.empty(0)
    return StepBatch(empty, empty, None, empty, slots, slots, counts, ids)  # type: ignore[arg-type]


def test_a_span_keeps_its_tokens_up_to_the_first_that_differs() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        drafts = [rng.integers(0, 2, rng.integers(0, 5)).tolist() for _ in range(rng.integers(1, 7))]
        batch = batch_of(drafts)
        said = rng.integers(0, 2, len(batch.sampling_slots)).astype(np.int32)
        result = accept(said, np.ones(len(said), bool), batch, FAILURE)
        expected = by_hand(said.tolist(), drafts)
        assert result.counts.tolist() == [len(kept) for kept in expected]
        assert result.token_ids.tolist() == [token for kept in expected for token in kept]
        assert not result.failures


def test_only_a_token_that_the_row_keeps_can_fail_it() -> None:
    batch = batch_of([[1, 2], [1, 2], []])
    said = np.array([1, 2, 3, 0, 9, 9, 5], np.int32)
    for bad, failed in ((2, [0]), (3, [1]), (4, []), (5, []), (6, [2])):
        sound = np.ones(7, bool)
        sound[bad] = False
        assert sorted(accept(said, sound, batch, FAILURE).failures) == failed
