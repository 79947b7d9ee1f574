"""Weights in 4 bits: groups of inputs on a grid of 16 steps each, found from the values or taken over from the checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer.layers.prepared import Form, Packing, Prepared, Tensors, with_bias
from batchinfer.ops.layouts import GroupInt4, PanelInt4

GROUP = 32  # as in GGUF files of 4 bits, whose groups are kept
OUTPUTS = 16  # the kernels take outputs in multiples of this
STEPS = 15
MIDDLE = 8  # torch's kernel computes (code - 8) * scale + offset
SAMPLE = 256  # groups that are looked at to tell whether a weight was in 4 bits before
DIVISORS = (1, 2, 3, 4, 5)  # of the least difference within a group, tried as its step
ON_GRID = 0.02  # of a step: what rounding in float32 may leave


def can_pack_int4(weight: Tensor) -> bool:
    """True when the weight's sizes are those of the 4-bit kernels."""
    return weight.shape[0] % OUTPUTS == 0 and weight.shape[1] % GROUP == 0


def _to_groups(weight: Tensor, bias: Tensor | None) -> Prepared:
    """4 bits for every weight, for torch's kernel; `weight` in float32.

    A weight that was dequantised from groups of 32 (GGUF's Q4_0 and Q4_1) keeps their grids and codes; any other is
    rounded between the least and the largest of each group. Grids are rounded to bf16.
    """
    codes, least, step = _on_grids(weight)
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.view(weight.shape), 1)
    scale_offset = torch.stack((step, least + MIDDLE * step), dim=-1).view(len(weight), -1, 2).transpose(0, 1)
    return Prepared(GROUPS, with_bias(bias, packed=packed, scale_offset=scale_offset.bfloat16().contiguous()))


def _to_panels(weight: Tensor, bias: Tensor | None) -> Prepared:
    """The same for the native kernel, with grids in float16, as GGUF files have them."""
    codes, least, step = _on_grids(weight)
    vectors, groups = len(weight) // OUTPUTS, weight.shape[1] // GROUP
    parts = codes.view(vectors, OUTPUTS, groups, 4, 4, 2).permute(4, 5, 0, 2, 3, 1)  # [pair, half, ...], lanes last
    lanes = torch.zeros(parts.shape[2:], dtype=torch.int32)
    for pair in range(4):
        for half in range(2):
            lanes |= parts[pair, half] << (4 * pair + 16 * half)
    grid = torch.stack((step, least), dim=-1).view(vectors, OUTPUTS, groups, 2).permute(0, 2, 3, 1)
    return Prepared(PANELS, with_bias(None if bias is None else bias.float(), codes=lanes, grid=grid.half().contiguous()))


def _finish_groups(tensors: Tensors) -> GroupInt4:
    return GroupInt4(tensors["packed"], tensors["scale_offset"], GROUP, tensors.get("bias"))


def _finish_panels(tensors: Tensors) -> PanelInt4:
    return PanelInt4(tensors["codes"], tensors["grid"], tensors.get("bias"))


GROUPS = Form("int4 groups", _finish_groups, copies=False)
PANELS = Form("int4 panels", _finish_panels, copies=False)
pack_int4 = Packing(_to_groups)
pack_int4_panels = Packing(_to_panels)


def _on_grids(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(int32 codes [G, 32], least [G], step [G]) of the groups in order: weight = least + codes * step."""
    assert can_pack_int4(weight)
    groups = weight.float().reshape(-1, GROUP)
    codes, least, step = _between_extremes(groups)
    return _keep_grids(groups, codes, least, step) if _was_in_groups(groups) else (codes, least, step)


def _between_extremes(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The grid from each group's least to its largest."""
    least, most = groups.aminmax(dim=-1)
    step = (most - least) / STEPS
    return _codes(groups, least, step), least, step


def _codes(groups: Tensor, least: Tensor, step: Tensor) -> Tensor:
    inverse = torch.where(step > 0, 1.0 / step, 0.0)
    return torch.round((groups - least[:, None]) * inverse[:, None]).clamp_(0, STEPS).to(torch.int32)


def _was_in_groups(groups: Tensor) -> bool:
    """True when groups have no more than 16 values each: 32 weights that never were in 4 bits have more."""
    some = groups[:: max(1, len(groups) // SAMPLE)].sort(dim=-1).values
    return bool((((some.diff(dim=-1) > 0).sum(dim=-1) + 1) <= STEPS + 1).all())


def _keep_grids(groups: Tensor, codes: Tensor, least: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Correct the groups whose own grid has less than 16 steps in use: there it is not the one between the extremes."""
    wrong = ((codes * step[:, None] + least[:, None] - groups).abs().amax(-1) > ON_GRID * step).nonzero().squeeze(-1)
    if not len(wrong):
        return codes, least, step
    some, low = groups[wrong], least[wrong]
    spread = STEPS * step[wrong]
    apart = some.sort(dim=-1).values.diff(dim=-1)
    apart = torch.where(apart > ON_GRID / STEPS * spread[:, None], apart, torch.inf).amin(-1)
    best = torch.full_like(apart, torch.nan)
    for divisor in reversed(DIVISORS):
        steps = (some - low[:, None]) * (divisor / apart)[:, None]
        fits = ((steps - steps.round()).abs().amax(-1) <= ON_GRID) & (steps.amax(-1) <= STEPS + ON_GRID)
        best = torch.where(fits, spread / steps.amax(-1).round(), best)  # a grid as coarse as can be
    found = ~best.isnan()
    where, own = wrong[found], best[found]
    codes[where], step[where] = _codes(some[found], low[found], own), own
    return codes, least, step
