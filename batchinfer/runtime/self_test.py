"""Runs the linear self-test once per machine and remembers the verdict."""

from __future__ import annotations

import torch

from batchinfer.layers.linear_check import ROW_COUNTS, WINDOWS, differing_row_counts
from batchinfer.remembered import Known, remembered
from batchinfer.runtime.device import ComputeTarget


def linear_self_test(target: ComputeTarget, shapes: list[tuple[int, int]]) -> Known:
    """Of the layer shapes (out, in), a list of those whose rows see their neighbours on this machine; [] is the strong promise.

    On a GPU the promise is not made and nothing is tested. Verdicts are cached by processor, torch version, threads,
    dtype, native library and shapes.
    """
    if target.device.type != "cpu":
        return Known([], measured=False)
    packs = dict.fromkeys((target.linear.pack, target.linear.head_pack))  # both for every shape: which is which matters little

    def test() -> list[tuple[int, int]]:
        return [shape for shape in shapes if any(differing_row_counts(pack, target.ops, shape, target.dtype) for pack in packs)]

    facts = [torch.__version__, torch.get_num_threads(), target.dtype_name, target.linear.name, target.native.target]
    known = remembered("self-test", [*facts, sorted(set(shapes)), ROW_COUNTS, WINDOWS], test)
    return Known([(int(o), int(i)) for o, i in known.value], known.measured)
