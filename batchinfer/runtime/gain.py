"""What 8-bit weights would gain on this machine, measured with one product and remembered."""

from __future__ import annotations

import torch

from batchinfer.errors import BackendError
from batchinfer.layers.kinds import choose_linear
from batchinfer.layers.trial import best_seconds, trial_product
from batchinfer.ops.native.products import products_with
from batchinfer.remembered import remembered
from batchinfer.runtime.device import ComputeTarget

ROWS = 256
MOST = 2048  # outputs and inputs of the product that is timed; larger ones gain alike
TURNS, TURN_SECONDS = 3, 0.004  # in turn, so that other work on the machine meets both
WORTH_SAYING = 1.1


def int8_speed_up(target: ComputeTarget, shapes: list[tuple[int, int]]) -> float | None:
    """How many times as fast 8-bit products are as this target's, for the middle one of these layers (out, in).

    None where that is not worth saying: the target is quantised already or no CPU, there are no exact 8-bit products
    here, or they are not faster. Cached by processor, torch version, threads, format, native library and shape.
    """
    if target.device.type != "cpu" or target.linear.name != "none":
        return None
    out, size = sorted(shapes, key=lambda shape: shape[0] * shape[1])[len(shapes) // 2]
    shape = min(out, MOST), min(size, MOST)
    facts = [torch.__version__, torch.get_num_threads(), target.dtype_name, target.native.target, shape]
    ratio = float(remembered("int8-gain", facts, lambda: round(_measure(target, shape), 2)).value)
    return ratio if ratio >= WORTH_SAYING else None


def _measure(target: ComputeTarget, shape: tuple[int, int]) -> float:
    """Seconds of the target's product over those of the 8-bit one; 0 where there is none."""
    library = target.native.library
    try:
        int8, _ = choose_linear("int8", target.device, target.dtype, library)
    except BackendError:
        return 0.0
    products = [trial_product(kind, target.dtype, ROWS, shape, products_with(library)) for kind in (target.linear, int8)]
    with torch.inference_mode():
        times = [[best_seconds(product, TURN_SECONDS) for product in products] for _ in range(TURNS)]
    return min(own for own, _ in times) / min(narrow for _, narrow in times)
