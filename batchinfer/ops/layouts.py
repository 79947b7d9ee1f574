"""The few layouts that kernels are written for; checkpoint formats end in one of them at load."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Dense:
    """Plain weight [out, in] with an optional bias [out]."""

    weight: Tensor
    bias: Tensor | None
    sizes: tuple[int, ...] = ()  # numbers of rows at which the library sums alike; empty: at all


@dataclass(frozen=True, slots=True)
class OneDnnBf16:
    """A bf16 weight reordered once into oneDNN's blocked layout; opaque to torch's other operations."""

    packed: Tensor
    bias: Tensor | None
    sizes: tuple[int, ...] = ()  # as above


@dataclass(frozen=True, slots=True)
class Int8Channel:
    """A weight in 8 bits, rotated as the rows that it multiplies: rotate(w)[o] / block = codes[o] * scale[o].

    It is reordered for oneDNN's product of uint8 rows with int8 weights.
    """

    packed: Tensor  # the codes, opaque to torch's other operations
    scale: Tensor  # float32 [out]
    zero: Tensor  # int32 [out], all 0: oneDNN wants them named
    bias: Tensor | None  # float32 [out]


@dataclass(frozen=True, slots=True)
class GroupInt4:
    """A weight in 4 bits, w = (code - 8) * scale + offset with one pair for every `group` inputs of an output, multiplied in bf16."""

    packed: Tensor  # the codes, two in a byte, in the order of torch's kernel
    scale_offset: Tensor  # bf16 [in / group, out, 2]
    group: int
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class PanelInt4:
    """A weight in 4 bits as the native kernel reads it, w = code * step + least with one pair for every 32 inputs of an output."""

    codes: Tensor  # int32 [out / 16, in / 32, 4, 16]: a lane holds eight inputs' codes, pairs of inputs in its two halves
    grid: Tensor  # float16 [out / 16, in / 32, 2, 16]: steps, then least values
    bias: Tensor | None  # float32 [out]


@dataclass(frozen=True, slots=True)
class TileBf16:
    """A bf16 weight as matrix registers read it: panels of 32 outputs, steps of 32 inputs; zeros behind the last of both."""

    tiles: Tensor  # bf16 [out / 32, in / 32, 2, 16, 16, 2]: two tiles a step, of each pairs of inputs by outputs
    out: int
    size: int  # inputs
    bias: Tensor | None  # float32 [out]


@dataclass(frozen=True, slots=True)
class TileInt8:
    """The codes of an `Int8Channel` as matrix registers read them, in steps of 64 inputs."""

    tiles: Tensor  # int8 [out / 32, in / 64, 2, 16, 16, 4]
    scale: Tensor  # float32 [out]
    shift: Tensor  # int32 [out], subtracted from the sums: what the zero point of the rows adds to them
    size: int  # inputs
    bias: Tensor | None  # float32 [out]


Layout = Dense | OneDnnBf16 | Int8Channel | GroupInt4 | PanelInt4 | TileBf16 | TileInt8
