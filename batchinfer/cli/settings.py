"""From flag records to the settings of the engine and the job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from batchinfer.cli.flags import EngineFlags, InputFlags, ModelFlags, OutputFlags, name_list
from batchinfer.errors import ConfigError

if TYPE_CHECKING:
    from batchinfer.config import EngineConfig
    from batchinfer.io.options import InputOptions, OutputOptions

MAX_TEXT_BYTES = 4 << 20
SAME_TYPE = {"bfloat16": "bf16", "float": "float32", "fp32": "float32"}  # other tools' words for a number format


def engine_config(model: ModelFlags, engine: EngineFlags, seed: int = 0) -> EngineConfig:
    """The engine's settings as they were given; wrong ones are refused here, before anything is loaded."""
    from batchinfer.config import EngineConfig

    return EngineConfig(
        model=model.model,
        revision=model.revision,
        device=model.device,
        dtype=SAME_TYPE.get(model.dtype, model.dtype),
        quantization=model.quantization,
        max_model_len=model.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        block_size=engine.block_size,
        num_kv_blocks=engine.num_kv_blocks,
        kv_cache_memory=engine.kv_cache_memory,
        kv_cache_dtype=SAME_TYPE.get(engine.kv_cache_dtype, engine.kv_cache_dtype),
        kv_cache=engine.kv_cache,
        paged=engine.paged,
        prefix_caching=engine.prefix_caching,
        continuous_batching=engine.continuous_batching,
        chunked_prefill=engine.chunked_prefill,
        flash_attention=engine.flash_attention,
        graphs=not engine.enforce_eager,
        speculative=engine.speculative,
        num_speculative_tokens=engine.num_speculative_tokens,
        order=engine.order,
        seed=seed,
        threads=engine.threads,
        fake_model=engine.fake_model,
    )


def input_options(given: str | None, input_file: str | None, flags: InputFlags) -> InputOptions:
    """Which rows to read and how."""
    from batchinfer.io.chat_options import job_chat
    from batchinfer.io.options import InputOptions, Shard

    if given is not None and input_file is not None:
        raise ConfigError("the input was given twice: as an argument and with --input-file; give one of them")
    path = given if given is not None else input_file
    if path is None:
        raise ConfigError("no input: give a file of prompts, such as prompts.jsonl, or - for JSONL on stdin")
    return InputOptions(
        input=path,
        prompt_column=flags.prompt_column,
        messages_column=flags.messages_column,
        id_column=flags.id_column,
        system_prompt=flags.system_prompt,
        chat=flags.chat,
        row_params=flags.row_params,
        limit=flags.limit,
        offset=flags.offset or 0,
        shard=None if flags.shard is None else Shard.parse(flags.shard),
        strict=flags.strict,
        on_too_long=flags.on_too_long or "error",
        prompt_template=text_of(flags.prompt_template, "--prompt-template"),
        job_chat=job_chat(text_of(flags.chat_template_kwargs, "--chat-template-kwargs"), text_of(flags.tools, "--tools")),
    )


def output_options(flags: OutputFlags) -> OutputOptions:
    """Where results go and what a row of them holds."""
    from batchinfer.io.options import OutputOptions

    return OutputOptions(
        output=flags.output,
        keep_columns=name_list(flags.keep_columns),
        drop_columns=name_list(flags.drop_columns) or (),
        prefix=flags.output_prefix or "",
        overwrite=flags.overwrite,
        retry_errors=flags.retry_errors,
        generated_token_ids=flags.generated_token_ids,
        unordered=flags.unordered,
        retry_truncated=flags.retry_truncated,
        metrics=flags.metrics,
        reasoning_split=flags.reasoning_split,
    )


def text_of(given: str | None, flag: str) -> str | None:
    """A flag's text, or that of the UTF-8 file that `@FILE` names."""
    if given is None or not given.startswith("@"):
        return given
    path = Path(given[1:])
    try:
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise ConfigError(f"{flag} {given}: larger than {MAX_TEXT_BYTES:,} bytes")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{flag} {given}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {given}: not UTF-8: {error}") from None
