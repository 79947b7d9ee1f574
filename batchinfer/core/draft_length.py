"""How many guessed tokens are worth verifying: a fixed number, or as many as save more time than they cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from batchinfer.core.plan import Plan

ROUNDS = 2  # of choosing drafts by the worth of a token, and the worth by the drafts chosen


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes before any draft is added."""

    num_tokens: int
    num_logits: int  # spans that sample
    context: int  # sum over sampling spans of the tokens attended to
    room: int  # further tokens that the step's budget allows

    @classmethod
    def of(cls, plan: Plan, budget: int) -> StepLoad:
        """The load of a plan, in a step of at most `budget` tokens."""
        tokens = int(plan.num_tokens.sum())
        ends = (plan.start + plan.num_tokens)[plan.samples]
        return cls(tokens, len(ends), int(ends.sum()), max(0, budget - tokens))


class StepCost(Protocol):
    """What a step takes on this machine."""

    def seconds(self, num_tokens: np.ndarray, num_logits: np.ndarray, decode_context: float) -> np.ndarray:
        """Seconds of steps with so many tokens and logit rows (int arrays of one shape), over so many tokens of context."""


class DraftLength(Protocol):
    """Decides how much of each guess is verified."""

    most: int  # tokens of a guess that can ever be verified

    def least_chance(self, load: StepLoad) -> float:
        """Chance of agreement below which not even one token is worth it."""

    def choose(self, chances: np.ndarray, lengths: np.ndarray, load: StepLoad) -> np.ndarray:
        """Tokens to verify of each guess, int32 [N]: `chances` of agreement float64 [N], `lengths` guessed int [N]."""


class FixedLength:
    """As many as were asked for, wherever there is a guess: what speculation costs where it does not pay."""

    def __init__(self, most: int) -> None:
        self.most = most

    def least_chance(self, load: StepLoad) -> float:
        """Every guess is taken."""
        return 0.0

    def choose(self, chances: np.ndarray, lengths: np.ndarray, load: StepLoad) -> np.ndarray:
        """All tokens of all guesses, as far as the step's budget goes."""
        wanted = np.minimum(lengths, self.most)
        before = np.cumsum(wanted) - wanted
        taken: np.ndarray = np.clip(load.room - before, 0, wanted).astype(np.int32)
        return taken


class AdaptiveLength:
    """The guesses that save more time than they cost, by the machine's measured cost of a step.

    Guess j of a row with chance p is accepted with chance p^j, and saves its row one place in one later step. Tokens
    are taken in order of that chance while one more saves more than it adds to this step; what a place is worth
    follows from the rate that the choice gives (Dinkelbach's method for a ratio, two rounds of it).
    """

    def __init__(self, cost: StepCost, most: int) -> None:
        self.most = most
        self._cost = cost

    def least_chance(self, load: StepLoad) -> float:
        """The cost of one more token over what a token is worth."""
        if not load.room or not load.num_logits:
            return np.inf
        base, one = self._seconds(load, np.array([0, 1])).tolist()
        worth = self._place_seconds(load)
        return float((one - base) / worth) if worth > 0 else np.inf

    def choose(self, chances: np.ndarray, lengths: np.ndarray, load: StepLoad) -> np.ndarray:
        """The longest drafts that pay, row by row; none where nothing does."""
        places = np.arange(1, self.most + 1)
        odds = np.where(places <= lengths[:, None], chances[:, None] ** places, 0.0)  # [N, most]
        order = np.sort(odds[odds > 0])[::-1][: load.room]
        if not len(order):
            return np.zeros(len(lengths), np.int32)
        extra = self._seconds(load, np.arange(len(order) + 1))
        extra = extra[1:] - extra[0]
        saved = np.cumsum(order)
        worth, best = self._place_seconds(load), 0
        for _ in range(ROUNDS):
            gain = worth * saved - extra
            best = int(np.argmax(gain))
            if gain[best] <= 0:
                return np.zeros(len(lengths), np.int32)
            worth = (self._place_seconds(load) * load.num_logits + extra[best]) / (load.num_logits + saved[best])
        least = order[best]
        chosen = (odds >= least).sum(1).astype(np.int32)  # chances fall along a row: the first tokens of it
        before = np.cumsum(chosen) - chosen
        clipped: np.ndarray = np.clip(load.room - before, 0, chosen).astype(np.int32)
        return clipped

    def _seconds(self, load: StepLoad, extra: np.ndarray) -> np.ndarray:
        """Seconds of the step with so many drafts added."""
        return self._cost.seconds(load.num_tokens + extra, load.num_logits + extra, load.context)

    def _place_seconds(self, load: StepLoad) -> float:
        """Seconds of one row's place in a step that decodes as many rows as sample in this one."""
        step = self._cost.seconds(np.array([load.num_logits]), np.array([load.num_logits]), load.context)
        return float(step[0]) / load.num_logits


class DraftDepth(Protocol):
    """Decides how many tokens a draft model guesses for every row of a step."""

    most: int

    def choose(self, chance: float, load: StepLoad, num_rows: int, behind: int) -> int:
        """Tokens to guess per row: `chance` of agreement, rows that can be drafted for, and the tokens that the draft
        model has yet to read before it can guess."""


class FixedDepth:
    """As many as were asked for."""

    def __init__(self, most: int) -> None:
        self.most = most

    def choose(self, chance: float, load: StepLoad, num_rows: int, behind: int) -> int:
        """The asked number, or fewer where the step's budget ends."""
        return min(self.most, load.room // num_rows) if num_rows else 0


class AdaptiveDepth:
    """The number that saves most, by the measured step costs of both models (see `AdaptiveLength`)."""

    def __init__(self, cost: StepCost, draft_cost: StepCost, most: int) -> None:
        self.most = most
        self._cost = cost
        self._draft_cost = draft_cost

    def choose(self, chance: float, load: StepLoad, num_rows: int, behind: int) -> int:
        """From 0 to `most`."""
        most = min(self.most, load.room // num_rows) if num_rows else 0
        if most < 1:
            return 0
        depth = np.arange(1, most + 1)
        rows = np.full(most, num_rows)
        verify = self._cost.seconds(load.num_tokens + num_rows * depth, load.num_logits + num_rows * depth, load.context)
        base = self._cost.seconds(np.array([load.num_tokens, load.num_logits]), np.array([load.num_logits] * 2), load.context)
        first = float(self._draft_cost.seconds(np.array([behind]), np.array([num_rows]), load.context)[0])
        further = self._draft_cost.seconds(rows, rows, load.context) * (depth - 1)
        saved = num_rows * np.cumsum(chance**depth)
        extra = verify - base[0] + first + further
        gain = float(base[1]) / load.num_logits * saved - extra
        best = int(np.argmax(gain))
        return best + 1 if gain[best] > 0 else 0
