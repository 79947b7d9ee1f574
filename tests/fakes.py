"""Fakes with behaviour, for tests of the control plane: a model whose answer depends on its whole KV history."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from batchinfer.build_control import control_plane, row_parts, settled, whole_slabs
from batchinfer.config import EngineConfig
from batchinfer.core.admission import EngineLimits
from batchinfer.core.forecast import OutputForecast
from batchinfer.core.ngram import room_for_drafts
from batchinfer.core.plan import Drafts, Plan, StepResult
from batchinfer.core.request import Request, Result, SamplingParams
from batchinfer.core.sequences import SequenceTable
from batchinfer.core.vocabulary import Vocabulary
from batchinfer.engine import Engine, EngineFacts
from batchinfer.runtime.data_plane import DataPlane

LETTERS = Vocabulary(token_bytes=[bytes([97 + i]) for i in range(26)] + [b"<eos>"], special_ids=frozenset({26}), eos_ids=(26,))


@dataclass(frozen=True)
class Setup:
    """Settings of a fake engine."""

    blocks: int = 400
    block_size: int = 4
    budget: int = 64
    max_num_seqs: int = 8
    kv_cache: bool = True
    paged: bool = True
    prefix: bool = True
    continuous: bool = True
    chunked: bool = True
    grouped: bool = True
    max_model_len: int = 200
    optimistic: bool = False  # expect rows to end at once: admits too many, and preempts
    vocabulary: Vocabulary = field(default=LETTERS, hash=False, compare=False)
    num_tokens: int = 26  # ids the model may answer with; 27 lets it say EOS
    lookahead: int = 0  # tokens of drafts to make room for


@dataclass(frozen=True)
class Span:
    """One row's part of a step."""

    slot: int
    start: int
    count: int
    samples: int
    drafts: list[int]


class HistoryModel:
    """Keeps one cell per KV slot: a hash of everything before it. A wrong block, position or order changes the answer.

    Stands for batch builder, runner and head at once; reads every cell through the block table, as attention does.
    """

    def __init__(self, table: SequenceTable, block_size: int, setup: Setup) -> None:
        self._table, self._size, self._setup = table, block_size, setup
        self._cells: dict[int, int] = {}

    def build(self, plan: Plan, drafts: Drafts) -> list[Span]:
        whole = not (self._setup.chunked and self._setup.kv_cache)
        alone = np.count_nonzero(plan.num_tokens > 1) == 1 and not len(drafts.token_ids)
        within = int(plan.num_tokens.sum() + drafts.counts.sum()) <= self._setup.budget
        assert within or (whole and alone), "the step's token budget is exceeded"
        if not self._setup.kv_cache:
            self._cells.clear()  # what an earlier step left is lost: whoever counts on it fails
        assert not drafts.counts[~plan.samples].any()
        guesses = np.split(drafts.token_ids, np.cumsum(drafts.counts)[:-1])
        columns = (plan.slots, plan.start, plan.num_tokens, plan.samples)
        return [Span(*map(int, span), guess.tolist()) for *span, guess in zip(*columns, guesses, strict=True)]

    def _cell(self, slot: int, position: int) -> int:
        block = int(self._table.block_table[slot, position // self._size])
        assert block > 0, "a token's KV would go to the null block"
        return block * self._size + position % self._size

    def forward(self, spans: list[Span]) -> list[tuple[list[int], list[int]]]:
        """For each sampling span what the model says after its last token and after each draft, and the drafts."""
        out = []
        for span in spans:
            own = self._table.tokens[span.slot, span.start : span.start + span.count].tolist()
            said = []
            for position, token in enumerate([*own, *span.drafts], span.start):
                before = self._cells[self._cell(span.slot, position - 1)] if position else 17
                cell = hash((before, token, position)) % (2**61 - 1)
                self._cells[self._cell(span.slot, position)] = cell
                said.append(cell // 7 % self._setup.num_tokens)
            if span.samples:
                out.append((said[span.count - 1 :], span.drafts))
        return out

    def copy(self, copies: list[tuple[int, int]]) -> None:
        for source, target in copies:
            for offset in range(self._size):
                self._cells.pop(target * self._size + offset, None)
                if source * self._size + offset in self._cells:
                    self._cells[target * self._size + offset] = self._cells[source * self._size + offset]

    def decide(self, hidden: list[tuple[list[int], list[int]]], spans: list[Span]) -> StepResult:
        tokens, counts = [], []
        for said, drafts in hidden:
            agreed = 0
            while agreed < len(drafts) and said[agreed] == drafts[agreed]:
                agreed += 1
            tokens += said[: agreed + 1]
            counts.append(agreed + 1)
        return StepResult(np.array(tokens, np.int32), np.array(counts, np.int32))


class Guesser:
    """Proposes at random what the model will say, something else, or nothing: an oracle that knows the answers, and lies."""

    def __init__(self, table: SequenceTable, block_size: int, budget: int, answers: dict[int, list[int]], most: int = 6) -> None:
        self._table, self._size, self._budget, self._answers, self._most = table, block_size, budget, answers, most
        self._rng = random.Random(7)
        self.accepted = self.proposed = 0

    def propose(self, plan: Plan) -> Drafts:
        left = self._budget - int(plan.num_tokens.sum())
        counts, tokens = np.zeros(len(plan.slots), np.int32), []
        for index, slot in enumerate(plan.slots.tolist()):
            if not plan.samples[index]:
                continue
            room = int(room_for_drafts(self._table, plan.slots[index : index + 1], self._size)[0])
            said = int(self._table.num_tokens[slot] - self._table.num_prompt[slot])
            true = self._answers.get(int(self._table.row[slot]), [])[said:]
            count = max(0, min(self._rng.randrange(self._most + 1), room, left))
            guess = [true[i] if i < len(true) and self._rng.random() < 0.8 else self._rng.randrange(26) for i in range(count)]
            counts[index] = count
            left -= count
            tokens += guess
        return Drafts(counts, np.array(tokens, np.int32))

    def learn(self, plan: Plan, drafts: Drafts, accepted: np.ndarray) -> None:
        assert (accepted <= drafts.counts).all()
        self.accepted += int(accepted.sum())
        self.proposed += int(drafts.counts.sum())


class Optimist(OutputForecast):
    """Expects every row to give back more than it holds, so that any row is admitted, the pool overflows and rows are preempted."""

    def expected(self, remaining: np.ndarray, produced: np.ndarray, exact: np.ndarray) -> np.ndarray:
        return np.full_like(remaining, -(10**6))

    def expected_of_one(self, remaining: int, produced: int, exact: bool) -> int:
        return -(10**6)


def make_engine(setup: Setup) -> Engine:
    """An engine whose control plane is the real one, put together as for real."""
    config = settled(
        EngineConfig(
            kv_cache=setup.kv_cache,
            paged=setup.paged,
            continuous_batching=setup.continuous,
            prefix_caching=setup.prefix,
            chunked_prefill=setup.chunked,
            order="auto" if setup.grouped else "arrival",
        )
    )
    size, blocks = setup.block_size, setup.blocks
    if not setup.paged:
        blocks = whole_slabs(blocks, setup.max_num_seqs, setup.max_model_len, size)
    limits = EngineLimits(setup.max_model_len, (blocks - 1) * size, setup.max_num_seqs, setup.budget, size, blocks, 1)
    control = control_plane(config, limits, row_parts(setup.vocabulary, limits))
    control.memory.lookahead = setup.lookahead
    if setup.optimistic:
        control.scheduler.forecast = Optimist()
    model = HistoryModel(control.memory.table, size, setup)
    return Engine(control, DataPlane(model, model, model, copy=model.copy), limits, setup.vocabulary, EngineFacts())


def request(row: int, prompt: list[int] | str, **params: object) -> Request:
    ids = [ord(c) - 97 for c in prompt] if isinstance(prompt, str) else prompt
    return Request(row, np.array(ids, np.int32), SamplingParams(**params).check())  # type: ignore[arg-type]


def run_checked(engine: Engine, requests: list[Request], max_steps: int = 20_000) -> dict[int, Result]:
    """Run to the end, asserting every invariant after every step; results by row."""
    results: dict[int, Result] = {}
    for item in requests:
        engine.add(item)
    while engine.num_unfinished:
        for result in engine.step():
            assert result.row not in results, "a row finished twice"
            results[result.row] = result
        engine.memory.check()
        assert engine.stats.steps < max_steps, "no progress"
    assert engine.memory.pool.num_used == 0, "blocks leak"
    return results
