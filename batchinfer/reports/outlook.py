"""What a plan foresees: how keys and values fit, how long the job takes and why, and what the order of rows is worth."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.table import Table

from batchinfer.config import ORDERS
from batchinfer.reports.gpus import Gpu, GpuRun, gpu_step_cost
from batchinfer.reports.lengths import RowLengths
from batchinfer.reports.place import KVFit, Place, kv_fits, on_gpu, this_machine
from batchinfer.reports.predict import Latency, Prediction, RowSample, predict
from batchinfer.reports.wording import in_bytes, in_words, plural

if TYPE_CHECKING:
    from batchinfer.build import ModelHandle
    from batchinfer.config import EngineConfig
    from batchinfer.core.step_cost import StepCost

SAME = 0.01  # of a time: what differs by less is called the same


@dataclass(frozen=True, slots=True)
class Outlook:
    """The expected run of a job at one place."""

    place: Place
    kv: list[KVFit]
    source: str  # of the step costs
    prediction: Prediction
    order: str
    other_order: str
    in_other_order: Prediction
    gpu: Gpu | None
    output_length: int | None  # tokens that a row is expected to generate, None: its max_tokens
    with_drafts: bool  # the run would guess tokens ahead, which is not predicted

    @property
    def order_gain(self) -> float:
        """Share of the time that the chosen order saves against the other one; below 0 where it costs time."""
        other = self.in_other_order.seconds
        return 1.0 - self.prediction.seconds / other if other else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For a JSON report; seconds, bytes and shares."""
        return {
            "device": self.place.device,
            "source": self.source,
            "speculation_ignored": self.with_drafts,
            "output_length": self.output_length,
            "prediction": self.prediction.as_dict(),
            "prefix_share": round(self.prediction.prefix_hit_rate, 4),
            "order": {
                "chosen": self.order,
                "other": self.other_order,
                "seconds": round(self.prediction.seconds, 3),
                "seconds_in_other": round(self.in_other_order.seconds, 3),
                "share_saved": round(self.order_gain, 4),
            },
            "kv": [asdict(fit) for fit in self.kv],
            "weight_bytes": self.place.weight_bytes,
            "kv_bytes_at_peak": self.kv_bytes_at_peak,
            "gpu": None if self.gpu is None else asdict(self.gpu),
        }

    @property
    def kv_bytes_at_peak(self) -> int:
        """Bytes of the blocks that are held at the fullest moment."""
        limits = self.place.limits
        return self.prediction.peak_blocks * limits.block_size * limits.kv_bytes_per_token


def find_place(config: EngineConfig, model: ModelHandle, lengths: RowLengths, gpu: Gpu | None) -> Place:
    """This machine, or the GPU that was named."""
    return this_machine(config, model, lengths) if gpu is None else on_gpu(gpu, config, model)


def look_ahead(config: EngineConfig, model: ModelHandle, place: Place, sample: RowSample, gpu: Gpu | None) -> Outlook | None:
    """Simulate the job in both orders; None where no row can run, or the weights do not fit."""
    if not sample.rows or place.weight_bytes > place.free_bytes:
        return None
    cost = _cost(config, model, place, gpu)
    other_order = next(order for order in ORDERS if order != config.order)
    found = predict(config, model, place.limits, cost, sample)
    other = predict(replace(config, order=other_order), model, place.limits, cost, sample)
    if found is None or other is None:
        return None
    fits = kv_fits(place, model, sample.lengths(), config.num_kv_blocks)
    with_drafts = config.speculative != "off"
    return Outlook(place, fits, cost.source, found, config.order, other_order, other, gpu, sample.output_length, with_drafts)


def _cost(config: EngineConfig, model: ModelHandle, place: Place, gpu: Gpu | None) -> StepCost:
    from batchinfer.build import step_cost

    if gpu is None:
        return step_cost(config, model)
    run = GpuRun(place.quantization, place.limits.kv_bytes_per_token, config.flash_attention, config.graphs)
    return gpu_step_cost(gpu, model.config, run)


def outlook_lines(outlook: Outlook) -> list[tuple[str, str]]:
    """The outlook as a person reads it: (name, text)."""
    found = outlook.prediction
    measured = "as measured on this machine" if outlook.gpu is None else outlook.source
    part = (
        ""
        if found.rows_simulated == found.rows
        else f"; {found.rows_simulated:,} of {found.rows:,} rows were simulated, the rest is scaled"
    )
    drafts = "; as if without drafts" if outlook.with_drafts else ""
    lines = [
        ("prefix cache", f"gives {found.prefix_hit_rate:.0%} of the prompt tokens"),
        ("order", _order_words(outlook)),
        (
            "expected",
            f"{in_words(found.seconds)} {_lengths(outlook)}, {found.output_tokens_per_s:,.0f} output tokens/s "
            f"({found.total_tokens_per_s:,.0f} with prompts); {measured}, start and loading not counted{drafts}{part}",
        ),
        ("first token", _latency_words(found.ttft_ms, "from a row's admission")),
    ]
    if found.itl_ms is not None:
        lines.append(("between tokens", _latency_words(found.itl_ms, "within a row")))
    lines.append(
        (
            "at the peak",
            f"{plural(found.peak_running, 'row')} at once in {plural(found.peak_blocks, 'KV block')}; {plural(found.preemptions, 'preemption')}; "
            f"weights {in_bytes(outlook.place.weight_bytes)}, KV {in_bytes(outlook.kv_bytes_at_peak)}",
        )
    )
    return lines


def kv_table(outlook: Outlook) -> Table:
    """KV formats side by side."""
    table = Table(title="keys and values", title_justify="left", title_style="", box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("type")
    for name in ("a token", "needed at once", "blocks needed", "blocks that fit", "rows at once"):
        table.add_column(name, justify="right")
    for fit in outlook.kv:
        table.add_row(
            fit.dtype,
            in_bytes(fit.bytes_per_token),
            in_bytes(fit.bytes_needed),
            f"{fit.blocks_needed:,}",
            f"{fit.blocks_that_fit:,}",
            f"{fit.rows_at_once:,}",
        )
    return table


def _order_words(outlook: Outlook) -> str:
    gain, other = outlook.order_gain, in_words(outlook.in_other_order.seconds)
    if abs(gain) < SAME:
        return f"{outlook.order} and {outlook.other_order} take the same time"
    if gain > 0:
        return f"{outlook.order} saves {gain:.0%} of the time that --order {outlook.other_order} would take ({other})"
    return f"{outlook.order} takes {-gain:.0%} longer than --order {outlook.other_order} would ({other})"


def _latency_words(latency: Latency | None, what: str) -> str:
    if latency is None:
        return "no row can run"
    return f"median {_milliseconds(latency.p50)}, 99th percentile {_milliseconds(latency.p99)}, {what}"


def _lengths(outlook: Outlook) -> str:
    length = outlook.output_length
    return "if every row uses its max_tokens" if length is None else f"if a row generates {plural(length, 'token')}"


def _milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms"
