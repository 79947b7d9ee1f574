"""The flags, in records by group, and the decorator that spreads such records into a command's parameters."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from batchinfer.cli.settings_file import apply_settings_file, overruled

Command = TypeVar("Command", bound=Callable[..., Any])
FEATURES = "Features, one by one"
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of a size such as `512MB`, `1.5GiB` or a plain number."""
    match = SIZE.fullmatch(str(text).strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write a number of bytes or something like 800MB or 1.5GiB")
    number, prefix, binary = match.groups()
    power = " kmgtp".index(prefix.lower() or " ")
    return int(float(number) * (1024 if binary else 1000) ** power) if power or "." in number else int(number)


def parse_count(text: str) -> int:
    """A whole number; `1e6`, `1_000` and `1,000` are understood."""
    cleaned = str(text).strip().replace("_", "").replace(",", "")
    try:
        return int(cleaned)
    except ValueError:
        pass
    try:
        number = float(cleaned)
        if number == int(number):
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise typer.BadParameter(f"{text!r} is not a whole number")


def _print_version(wanted: bool) -> None:
    if wanted:
        from batchinfer import __version__

        print(f"batchinfer {__version__}")
        raise typer.Exit


def option(panel: str, *names: str, text: str, **more: Any) -> Any:
    """A flag in one of the help's groups."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


def switch(panel: str, *names: str, text: str, **more: Any) -> Any:
    """A flag that is on or off."""
    return option(panel, *names, text=text, metavar=" ", **more)


def count(panel: str, *names: str, text: str) -> Any:
    """A flag that takes a whole number."""
    return option(panel, *names, text=text, parser=parse_count, metavar="N")


def _feature(name: str, text: str) -> Any:
    return switch(FEATURES, f"--{name}/--no-{name}", text=text)


@dataclass(frozen=True)
class InputFlags:
    """Which rows, and where in a row the prompt stands."""

    limit: Annotated[int | None, count("Input", "--limit", "--max-examples", text="Take only the first N rows (after --offset).")] = None
    offset: Annotated[int | None, count("Input", "--offset", text="Leave out the first N rows.")] = None
    shard: Annotated[
        str | None,
        option(
            "Input", "--shard", text="Take part I of N equal parts of these rows; results laid end to end are one job's.", metavar="I/N"
        ),
    ] = None
    prompt_column: Annotated[str | None, option("Input", "--prompt-column", text="Column that holds the prompt (else: prompt).")] = None
    messages_column: Annotated[
        str | None, option("Input", "--messages-column", text="Column that holds chat messages (else: messages).")
    ] = None
    id_column: Annotated[str | None, option("Input", "--id-column", text="Column that names a row (else: custom_id, id, row number).")] = (
        None
    )
    system_prompt: Annotated[
        str | None, option("Input", "--system-prompt", text="Put a system message with this text first; a row's own wins.")
    ] = None
    chat: Annotated[
        bool | None,
        switch("Input", "--chat/--no-chat", text="Wrap prompts as chat messages, or send them raw (else: as the model has a template)."),
    ] = None
    prompt_template: Annotated[
        str | None,
        option("Input", "--prompt-template", text="Build each prompt from columns: Jinja text or @file, such as 'Translate: {{ text }}'."),
    ] = None
    chat_template_kwargs: Annotated[
        str | None,
        option(
            "Input",
            "--chat-template-kwargs",
            text="Variables for the chat template, as JSON or @file, such as '{\"enable_thinking\": false}'.",
            metavar="JSON",
        ),
    ] = None
    tools: Annotated[
        str | None, option("Input", "--tools", text="Tool definitions for every chat, as a JSON list or @file.", metavar="JSON")
    ] = None
    row_params: Annotated[
        bool, switch("Input", "--row-params/--no-row-params", text="Take sampling parameters from columns of the same name (on).")
    ] = True
    on_too_long: Annotated[
        str | None,
        option(
            "Input",
            "--on-too-long",
            text="A prompt longer than the context: error, skip, truncate-left, -right or -middle (error).",
            metavar="WHAT",
        ),
    ] = None
    strict: Annotated[bool, switch("Input", "--strict", text="End the job with exit code 1 at the first bad row.")] = False


@dataclass(frozen=True)
class OutputFlags:
    """Where results go and what an output row holds."""

    output: Annotated[
        str | None,
        option(
            "Output",
            "-o",
            "--output",
            "--output-file",
            text="Result file, .jsonl or .parquet, also s3:// and its like; - for stdout (else: <input>.out.…).",
            metavar="FILE",
        ),
    ] = None
    overwrite: Annotated[bool, switch("Output", "--overwrite", text="Replace an output that is already there.")] = False
    retry_errors: Annotated[
        bool, switch("Output", "--retry-errors", text="Run again only the rows that failed, also after the job has finished.")
    ] = False
    retry_truncated: Annotated[
        int | None,
        count(
            "Output",
            "--retry-truncated",
            text="Run again the rows that max_tokens cut, with N instead, also after the job has finished.",
        ),
    ] = None
    metrics: Annotated[
        bool, switch("Output", "--metrics", text="Add a column of queue, prefill and decode seconds, cached tokens and preemptions.")
    ] = False
    reasoning_split: Annotated[
        bool, switch("Output", "--reasoning-split", text="Put what a model thinks between tags such as <think> into a column of its own.")
    ] = False
    keep_columns: Annotated[
        str | None, option("Output", "--keep-columns", text="Input columns to carry over (else: all).", metavar="A,B")
    ] = None
    drop_columns: Annotated[str | None, option("Output", "--drop-columns", text="Input columns to leave out.", metavar="A,B")] = None
    output_prefix: Annotated[
        str | None, option("Output", "--output-prefix", text="Put this before the names of the columns that are added.")
    ] = None
    generated_token_ids: Annotated[
        bool, switch("Output", "--generated-token-ids", text="Add a column with the ids of the generated tokens.")
    ] = False
    unordered: Annotated[bool, switch("Output", "--unordered", text="With -o -, write rows as they finish, not in input order.")] = False
    timings: Annotated[
        bool, switch("Output", "--timings", text="Show at the end where the time went, stage by stage from the start of the process on.")
    ] = False
    quiet: Annotated[
        bool, switch("Output", "-q", "--quiet", text="Print only warnings and the last line on stderr: N succeeded, M failed.")
    ] = False


@dataclass(frozen=True)
class ModelFlags:
    """Which model, and in which arithmetic."""

    model: Annotated[str, option("Model", "-m", "--model", text="Folder, .gguf file, alias or hub id (else: smollm2-135m).")] = (
        "smollm2-135m"
    )
    revision: Annotated[str | None, option("Model", "--revision", text="Branch, tag or commit of a hub id.")] = None
    dtype: Annotated[str, option("Model", "--dtype", text="auto, bf16 (bfloat16) or float32 (fp32).", metavar="TYPE")] = "auto"
    device: Annotated[str, option("Model", "--device", text="auto, cpu or cuda.", metavar="DEVICE")] = "auto"
    max_model_len: Annotated[int | None, count("Model", "--max-model-len", text="Longest prompt plus output, in tokens.")] = None
    quantization: Annotated[
        str,
        option(
            "Model", "--quantization", text="Weights in fewer bits, CPU only: none, int8 (faster) or int4 (least memory).", metavar="TYPE"
        ),
    ] = "none"


@dataclass(frozen=True)
class EngineFlags:
    """How the engine batches rows and keeps their KV; a row's text depends on none but the KV's type and, if it outgrows it, the pool."""

    max_num_seqs: Annotated[
        int | None,
        count("Engine", "--max-num-seqs", "--concurrency", text="Most rows in one batch; --concurrency is the same (else: chosen)."),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, count("Engine", "--max-num-batched-tokens", text="Most tokens in one step (else: chosen).")
    ] = None
    kv_cache_memory: Annotated[
        int | None, option("Engine", "--kv-cache-memory", text="Size of the KV pool, such as 2GiB.", parser=parse_size, metavar="SIZE")
    ] = None
    num_kv_blocks: Annotated[int | None, count("Engine", "--num-kv-blocks", text="Size of the KV pool in blocks.")] = None
    block_size: Annotated[int | None, count("Engine", "--block-size", text="Tokens in a KV block (32).")] = None
    kv_cache_dtype: Annotated[
        str, option("Engine", "--kv-cache-dtype", text="Keys and values: auto (as --dtype), bf16, float32 or int8.", metavar="TYPE")
    ] = "auto"
    order: Annotated[
        str, option("Engine", "--order", text="auto (shared beginnings together, long rows first) or arrival.", metavar="ORDER")
    ] = "auto"
    speculative: Annotated[
        str,
        option(
            "Engine",
            "--speculative",
            text="Guess tokens ahead and check several at once: ngram (from the row's own text), draft:MODEL or off (off).",
            metavar="HOW",
        ),
    ] = "off"
    threads: Annotated[int | None, count("Engine", "--threads", text="CPU threads (else: the cores this process may use).")] = None
    fake_model: Annotated[bool, switch("Engine", "--fake-model", text="Everything real but the forward pass.", hidden=True)] = False
    kv_cache: Annotated[bool, _feature("kv-cache", "Keep keys and values from step to step (on).")] = True
    paged: Annotated[bool, _feature("paged", "KV in blocks as needed; off: room for --max-model-len per row (on).")] = True
    prefix_caching: Annotated[bool, _feature("prefix-caching", "Share the KV of equal beginnings (on).")] = True
    continuous_batching: Annotated[bool, _feature("continuous-batching", "Let rows join as others end (on).")] = True
    chunked_prefill: Annotated[bool, _feature("chunked-prefill", "Spread long prompts over several steps (on).")] = True
    flash_attention: Annotated[bool, _feature("flash-attention", "Attend with the native kernel (on).")] = True
    enforce_eager: Annotated[
        bool, switch(FEATURES, "--enforce-eager", text="Operation by operation: no fused kernels, no native sampling, no CUDA graphs.")
    ] = False
    num_speculative_tokens: Annotated[
        int | None, count(FEATURES, "--num-speculative-tokens", text="Guess always so many tokens (else: as many as pay).")
    ] = None


@dataclass(frozen=True)
class GeneralFlags:
    """Flags that every command has."""

    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="TOML file of settings: keys are long flag names; the command line wins.",
            rich_help_panel="General",
            callback=apply_settings_file,
            is_eager=True,
            show_default=False,
            metavar="FILE",
        ),
    ] = None
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", metavar=" ", rich_help_panel="General", callback=_print_version, is_eager=True
        ),
    ] = False


def gathers_flags(function: Command) -> Command:
    """Let a command take flag records: each field of a record becomes one flag of the command.

    A parameter of the command's own that is called like a field takes its place; the record keeps the field's default.
    """
    spread: dict[str, type[Any] | None] = {}
    parameters: list[inspect.Parameter] = []
    given = inspect.signature(function, eval_str=True).parameters
    for parameter in given.values():
        record = parameter.annotation if hasattr(parameter.annotation, "__dataclass_fields__") else None
        spread[parameter.name] = record
        parameters.extend([flag for flag in _flags_of(record) if flag.name not in given] if record is not None else [parameter])

    @functools.wraps(function)
    def command(context: typer.Context, **values: Any) -> Any:
        values |= overruled(context, values)
        given = {
            name: values[name] if record is None else record(**{f.name: values[f.name] for f in fields(record) if f.name not in spread})
            for name, record in spread.items()
        }
        return function(**given)

    parameters.append(inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context))
    ordered = sorted(parameters, key=lambda p: (p.kind, p.default is not inspect.Parameter.empty))
    command.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in ordered}
    return typing.cast(Command, command)


def _flags_of(record: type[Any]) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(record, include_extras=True)
    return [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if f.default is MISSING else f.default,
            annotation=hints[f.name],
        )
        for f in fields(record)
    ]


def name_list(text: str | None) -> tuple[str, ...] | None:
    """Names of a comma-separated flag; None where the flag was not given."""
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())
