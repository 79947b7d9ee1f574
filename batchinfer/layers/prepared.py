"""A weight on its way to a layout: first plain tensors, which a disk can keep, then what the kernels read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from batchinfer.ops.layouts import Layout

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of plain tensors, and how they become a layout."""

    name: str  # in files that keep them
    finish: Callable[[Tensors], Layout]
    copies: bool  # the layout has memory of its own; else the tensors live on in it


@dataclass(frozen=True, slots=True)
class Prepared:
    """A weight after everything that takes long and before what no disk can keep, such as a library's own layout."""

    form: Form
    tensors: Tensors

    def finish(self) -> Layout:
        """The layout."""
        return self.form.finish(self.tensors)


@dataclass(frozen=True, slots=True)
class Packing:
    """(weight [out, in], bias [out] or None), on the run's device and in the dtype that the packing asks for -> layout, in two steps.

    Every output is packed for itself: packing some rows of a weight gives these rows' outputs, bit for bit.
    """

    prepare: Callable[[Tensor, Tensor | None], Prepared]

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Layout:
        """Both steps."""
        return self.prepare(weight, bias).finish()


def with_bias(bias: Tensor | None, **tensors: Tensor) -> Tensors:
    """The tensors, and the bias where there is one."""
    return tensors if bias is None else {**tensors, "bias": bias}
