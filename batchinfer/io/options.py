"""What the user said about input and output: frozen records, checked when made."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.errors import ConfigError

ON_TOO_LONG = ("error",)
ON_TOO_LONG_LATER = ("truncate-left", "truncate-right", "truncate-middle", "skip")


@dataclass(frozen=True, slots=True)
class InputOptions:
    """Where rows come from and how they become prompts."""

    input: str  # a file, a folder, or "-" for JSONL on stdin
    prompt_column: str | None = None
    messages_column: str | None = None
    id_column: str | None = None
    system_prompt: str | None = None
    chat: bool | None = None  # None: wrap prompts when the model has a chat template
    row_params: bool = True
    limit: int | None = None
    offset: int = 0
    strict: bool = False
    on_too_long: str = "error"

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values that can never work."""
        if self.on_too_long in ON_TOO_LONG_LATER:
            raise ConfigError(f"--on-too-long {self.on_too_long} is not supported by this version; use error")
        if self.on_too_long not in ON_TOO_LONG:
            raise ConfigError(f"--on-too-long {self.on_too_long}: must be one of {', '.join(ON_TOO_LONG)}")
        if self.limit is not None and self.limit < 0:
            raise ConfigError(f"--limit {self.limit}: must be at least 0")
        if self.offset < 0:
            raise ConfigError(f"--offset {self.offset}: must be at least 0")


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Where results go and what stands in them."""

    output: str | None = None  # a path ending in .jsonl or .parquet, "-" for stdout, None for the default name
    keep_columns: tuple[str, ...] | None = None  # None: all of them
    drop_columns: tuple[str, ...] = ()
    prefix: str = ""  # put before the names of the result columns
    overwrite: bool = False
    retry_errors: bool = False
    generated_token_ids: bool = False

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a combination that says two things."""
        if self.keep_columns is not None and self.drop_columns:
            raise ConfigError("--keep-columns and --drop-columns say the same thing twice; give one of them")
        if self.overwrite and self.retry_errors:
            raise ConfigError("--overwrite starts afresh and --retry-errors keeps the good rows; give one of them")
