"""The engine's features as an ablation sees them: everything on, one off, and the ladder from the naive loop upwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchinfer.errors import ConfigError

Changes = tuple[tuple[str, Any], ...]  # fields of EngineConfig and their values
FIXED_DRAFTS = 4  # tokens guessed at a time where the length does not adapt
SPECULATION = "speculation"


@dataclass(frozen=True, slots=True)
class Feature:
    """A switch: the setting behind it, and its values for on and off. `slow` without it a run takes many times as long."""

    name: str
    about: str
    setting: str
    on: Any
    off: Any
    slow: bool = False


# In the order of the ladder: each rung rests on those below it.
FEATURES = (
    Feature("kv_cache", "keys and values are kept, not computed again for every token", "kv_cache", True, False, slow=True),
    Feature("continuous_batching", "a waiting row enters as soon as another one ends", "continuous_batching", True, False),
    Feature("paged", "KV memory in blocks, as rows grow, not reserved for the longest", "paged", True, False),
    Feature("prefix_cache", "equal beginnings of prompts are computed once", "prefix_caching", True, False),
    Feature("prefix_order", "rows with equal beginnings run together, long ones start early", "order", "auto", "arrival"),
    Feature("chunked_prefill", "long prompts are spread over several steps", "chunked_prefill", True, False),
    Feature("flash_attention", "attention kernels that never store the scores", "flash_attention", True, False, slow=True),
    Feature("graphs", "fused kernels on a CPU, CUDA graphs on a GPU", "graphs", True, False),
    Feature("quantization", "weights in 8 bits", "quantization", "int8", "none"),
    Feature("kv_quant", "keys and values in 8 bits", "kv_cache_dtype", "int8", "auto"),
    Feature(SPECULATION, "tokens are guessed ahead from the text and verified together", "speculative", "ngram", "off"),
)
NAMES = tuple(feature.name for feature in FEATURES)


@dataclass(frozen=True, slots=True)
class Variant:
    """One configuration of the engine, as changes to the user's own."""

    name: str
    changes: Changes
    concurrency: int
    slow: bool = False  # known to be too slow for the whole workload

    def without(self, feature: Feature) -> Variant:
        """This configuration with one feature off."""
        changes = tuple((name, feature.off if name == feature.setting else value) for name, value in self.changes)
        return replace(self, name=f"without {feature.name}", changes=changes, slow=self.slow or feature.slow)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a feature is worth: the speed of `on` over the speed of `off`."""

    name: str
    about: str
    on: Variant
    off: Variant

    @property
    def told_of(self) -> Variant:
        """The variant that the row's latencies, blocks and agreement are of: the one that is not the baseline."""
        return self.off if self.on.name == BASELINE else self.on


@dataclass(frozen=True, slots=True)
class Rung:
    """A step of the ladder: what it adds, and the configuration that it makes."""

    name: str
    variant: Variant


BASELINE = "everything on"
NAIVE = "naive loop"


def chosen_features(names: Sequence[str] | None, features: Sequence[Feature] = FEATURES) -> tuple[Feature, ...]:
    """The features asked for, in their own order; `ConfigError` for a name that is none."""
    if names is None:
        return tuple(features)
    known = [feature.name for feature in features]
    for name in names:
        if name not in known:
            reason = "not available on this device" if name in NAMES else "no such feature"
            raise ConfigError(f"--features {name}: {reason}; there are {', '.join(known)}")
    return tuple(feature for feature in features if feature.name in names)


def baseline(features: Sequence[Feature], concurrency: int) -> Variant:
    """Everything on."""
    return Variant(BASELINE, tuple((feature.setting, feature.on) for feature in features), concurrency)


def leave_one_out(features: Sequence[Feature], chosen: Sequence[Feature], concurrency: int) -> list[Comparison]:
    """Each chosen feature against the same engine without it; speculation twice, of adaptive and of fixed length."""
    everything = baseline(features, concurrency)
    found: list[Comparison] = []
    for feature in chosen:
        off = everything.without(feature)
        if feature.name != SPECULATION:
            found.append(Comparison(feature.name, feature.about, everything, off))
            continue
        fixed = replace(everything, name="fixed speculation", changes=(*everything.changes, ("num_speculative_tokens", FIXED_DRAFTS)))
        found.append(Comparison("speculation_adaptive", f"{feature.about}, as many as pay", everything, off))
        found.append(Comparison("speculation_fixed", f"{feature.about}, always up to {FIXED_DRAFTS}", fixed, off))
    return found


def ladder(features: Sequence[Feature], concurrency: int) -> list[Rung]:
    """From the naive loop, with everything off, to everything on, one feature more at a time."""
    variant = baseline(features, concurrency)
    rungs: list[Rung] = []
    for place in range(len(features) - 1, -1, -1):
        rungs.append(Rung(features[place].name, variant))
        below = variant.without(features[place])
        # Everything but the last feature is that feature left out alone, and is measured once for both.
        name = below.name if len(rungs) == 1 else f"ladder up to {features[place - 1].name}" if place else NAIVE
        variant = replace(below, name=name)
    return [Rung("naive", variant), *reversed(rungs)]
