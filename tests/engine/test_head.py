"""The head: slices give what the whole product gives, a row is its own affair, and bans, padding and faults stay where they belong."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchinfer.core.logprobs import NO_PLACES
from batchinfer.core.plan import StepResult
from batchinfer.core.request import Request, SamplingParams
from batchinfer.core.sequences import Sequence, SequenceTable
from batchinfer.layers.kinds import LinearKind, choose_linear
from batchinfer.layers.linear import Linear, pack_dense
from batchinfer.layers.lm_head import SLICE_WIDTH, LmHead, slice_widths
from batchinfer.ops.draw import Sampler
from batchinfer.ops.rows import Entry, ScaledRows, quantise_rows, to_dense
from batchinfer.ops.table import REFERENCE
from batchinfer.runtime.head import GenerateHead, Shaping
from batchinfer.runtime.logits import Ban, MinTokens, apply_edits
from tests.engine.draws import KINDS, sampler

HIDDEN, TABLE, KNOWN = 64, 20_000, 19_990  # the model's table is wider than the tokenizer's vocabulary
EOS, STOP = 8000, 15_000
kinds = pytest.mark.parametrize("kind", KINDS)


def weights(seed: int = 0) -> Tensor:
    return torch.randn(TABLE, HIDDEN, generator=torch.Generator().manual_seed(seed)) * 0.3


def linear_kind(name: str) -> LinearKind:
    if name == "float32":
        return LinearKind("none", "plain", torch.float32, pack_dense, pack_dense)
    if name == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor cannot multiply bf16 through oneDNN")
    return choose_linear("int8" if name == "int8" else "none", torch.device("cpu"), torch.bfloat16)[0]


def entry(x: Tensor, name: str) -> Entry:
    return {"float32": lambda: x, "bf16": lambda: x.bfloat16(), "int8": lambda: quantise_rows(x)}[name]()  # type: ignore[no-any-return]


def test_slices_cover_the_vocabulary_in_near_equal_parts() -> None:
    for size in (1, 63, 64, SLICE_WIDTH - 1, SLICE_WIDTH, SLICE_WIDTH + 1, 49_152, 128_256, 151_936, 262_144):
        widths = slice_widths(size)
        assert sum(widths) == size
        assert min(widths) > 0
        assert max(widths) <= SLICE_WIDTH
        assert len(set(widths[:-1])) <= 1
        assert len(widths) == 1 or widths[-1] > SLICE_WIDTH // 4, "a narrow slice would cost as much as a wide one"


@pytest.mark.parametrize("name", ["float32", "bf16", "int8"])
def test_slices_give_the_logits_of_the_whole_product(name: str) -> None:
    kind = linear_kind(name)
    head = LmHead(weights(), kind, REFERENCE)
    x = entry(torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1)), name)
    whole = to_dense(Linear(kind.head_pack(weights().to(kind.weight_dtype), None), REFERENCE)(x), torch.float32).float()
    assert torch.allclose(head.logits(x), whole, rtol=1e-5 if name != "bf16" else 1e-2, atol=1e-5)
    assert [first for first, _ in head.slices(x, TABLE)] == [0, 6720, 13_440]
    assert [first for first, _ in head.slices(x, 13_440)] == [0, 6720], "a slice of padding alone was computed"


@pytest.mark.parametrize("name", ["float32", "bf16", "int8"])
def test_a_logit_has_the_same_bits_in_every_batch(name: str) -> None:
    head = LmHead(weights(), linear_kind(name), REFERENCE)
    x = torch.randn(130, HIDDEN, generator=torch.Generator().manual_seed(2))
    whole = head.logits(entry(x, name))
    for rows in (slice(0, 1), slice(7, 10), slice(64, 129)):
        assert torch.equal(head.logits(entry(x[rows].clone(), name)), whole[rows])


def test_a_ban_changes_only_what_it_names() -> None:
    g = torch.Generator().manual_seed(3)
    dense = torch.randn(4, 100, generator=g)
    ban = Ban(np.array([1, 3]), [[250, 205, 5], [205]])
    for logits in (dense, dense.bfloat16(), ScaledRows(dense, torch.rand(4, generator=g), None), ScaledRows(dense, torch.zeros(4), None)):
        before = to_dense(logits, torch.float32).float().clone()
        assert apply_edits([ban], 100, logits) is logits
        assert apply_edits([], 200, logits) is logits
        changed = to_dense(apply_edits([ban], 200, logits), torch.float32)
        expected = before.clone()
        expected[1, [5, 50]] = -torch.inf
        expected[3, 5] = -torch.inf
        assert torch.equal(changed, expected)
        assert torch.equal(to_dense(logits, torch.float32).float(), before), "the product itself was changed"


@dataclass
class World:
    """A head over a table of running rows."""

    head: GenerateHead
    table: SequenceTable
    slots: np.ndarray

    def decide(self, hidden: Entry, slots: np.ndarray | None = None) -> StepResult:
        who = self.slots if slots is None else slots
        nobody = np.zeros(len(who), np.int32)
        batch: Any = SimpleNamespace(
            sampling_slots=who, fill_positions=self.table.num_tokens[who], num_drafts=nobody, draft_ids=nobody[:0], scored=NO_PLACES
        )
        return self.head.decide(hidden, batch)


def world(kind: str, params: list[SamplingParams], name: str = "float32", of: LmHead | None = None) -> World:
    table = SequenceTable(len(params), 40, 4)
    editors = (MinTokens(table, [EOS], lambda p: tuple(p.stop_token_ids)),)
    slots = []
    for i, asked in enumerate(params):
        seq = Sequence(i, Request(i, np.array([1, 2, 3], np.int32), asked.check()), limit=30, clipped=False)
        slots.append(table.admit(seq, seed=100 + i))
        editors[0].admit(seq)
    chosen: Sampler = sampler(kind, KNOWN)
    head = of or LmHead(weights(), linear_kind(name), REFERENCE)
    return World(GenerateHead(head, table, KNOWN, Shaping(editors), chosen), table, np.array(slots, np.int32))


def mixed(count: int) -> list[SamplingParams]:
    options: list[dict[str, Any]] = [{}, {"temperature": 0.9}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.7, "top_k": 40}]
    return [SamplingParams(**options[i % 4]) for i in range(count)]


def hidden(rows: int, seed: int = 5) -> Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))


@kinds
@pytest.mark.parametrize("name", ["float32", "bf16", "int8"])
def test_greedy_rows_take_the_largest_logit_and_every_row_is_its_own_affair(kind: str, name: str) -> None:
    w = world(kind, mixed(21), name)
    x = hidden(21)
    together = w.decide(entry(x, name)).token_ids
    logits = w.head.lm_head.logits(entry(x, name))[::4, :KNOWN]
    assert torch.equal(logits[torch.arange(len(logits)), torch.from_numpy(together[::4]).long()], logits.amax(1))
    for row in range(21):
        alone = w.decide(entry(x[row : row + 1].clone(), name), w.slots[row : row + 1])
        assert alone.token_ids.tolist() == [together[row]], row


@kinds
def test_rows_that_filter_are_computed_in_parts_when_their_logits_are_too_many(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = mixed(30)
    whole = world(kind, params).decide(hidden(30)).token_ids
    for kept, rows in ((1, 256), (4, 256), (30, 7), (3, 5)):
        monkeypatch.setattr("batchinfer.ops.draw.KEPT_BYTES", kept * 4 * KNOWN)
        monkeypatch.setattr("batchinfer.runtime.head.MOST_ROWS", rows)
        assert np.array_equal(world(kind, params).decide(hidden(30)).token_ids, whole)


@kinds
def test_no_step_without_rows_fails(kind: str) -> None:
    w = world(kind, mixed(2))
    result = w.decide(torch.empty(0, HIDDEN), np.empty(0, np.int32))
    assert result.token_ids.shape == (0,)
    assert not result.failures


class Pointing(LmHead):
    """Logits that favour some ids by far, the same for every row."""

    def __init__(self, favoured: list[int]) -> None:
        weight = torch.zeros(TABLE, HIDDEN)
        for rank, token_id in enumerate(favoured):
            weight[token_id, 0] = 50.0 - rank
        super().__init__(weight, linear_kind("float32"), REFERENCE)


@kinds
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}], ids=str)
def test_min_tokens_bans_eos_and_stop_ids_until_it_is_reached(kind: str, options: dict[str, Any]) -> None:
    params = [
        SamplingParams(min_tokens=2, stop_token_ids=(STOP,), **options),
        SamplingParams(min_tokens=2, ignore_eos=True, **options),
        SamplingParams(**options),
    ]
    w = world(kind, params, of=Pointing([EOS, STOP, 77]))
    x = torch.zeros(3, HIDDEN)
    x[:, 0] = 10.0
    assert w.decide(x).token_ids.tolist() == [77, EOS, EOS]
    w.table.append(w.slots, np.array([5, 5, 5], np.int32))
    w.table.append(w.slots, np.array([5, 5, 5], np.int32))
    assert w.decide(x).token_ids.tolist() == [EOS, EOS, EOS]


@kinds
def test_ids_without_a_token_are_never_said(kind: str) -> None:
    w = world(
        kind, [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.5)] * 3, of=Pointing([KNOWN, 5])
    )
    x = torch.zeros(9, HIDDEN)
    x[:, 0] = 10.0
    assert w.decide(x).token_ids.tolist() == [5] * 9


@kinds
@pytest.mark.parametrize("name", ["float32", "bf16", "int8"])
def test_a_row_that_is_not_finite_fails_alone(kind: str, name: str) -> None:
    w = world(kind, mixed(12), name)
    x = hidden(12)
    expected = w.decide(entry(x, name)).token_ids
    broken = x.clone()
    broken[[1, 4, 6, 11]] = torch.nan
    result = w.decide(entry(broken, name))
    assert sorted(result.failures) == sorted(w.slots[[1, 4, 6, 11]].tolist())
    assert {error.code for error in result.failures.values()} == {"non_finite_logits"}
    fine = np.setdiff1d(np.arange(12), [1, 4, 6, 11])
    assert np.array_equal(result.token_ids[fine], expected[fine])
