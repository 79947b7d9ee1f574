"""What the user said about input and output: frozen records, checked when made."""

from __future__ import annotations

import re
from dataclasses import dataclass

from batchinfer.errors import ConfigError
from batchinfer.io.chat_options import PLAIN_CHAT, ChatOptions

POLICIES = ("error", "truncate-left", "truncate-right", "truncate-middle", "skip")
SHARD = re.compile(r"(\d{1,9})/(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` (from 1) of `count` contiguous parts of the chosen rows; their sizes differ by one at most."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """`2/8` as a shard, else `ConfigError`."""
        match = SHARD.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"--shard {text}: must be a part and a number of parts, such as 2/8")
        index, count = int(match[1]), int(match[2])
        if not 1 <= index <= count:
            raise ConfigError(f"--shard {text}: parts are counted from 1, so the first must be 1/{max(count, 1)}")
        return cls(index, count)

    def part_of(self, start: int, stop: int) -> tuple[int, int]:
        """The shard's rows of those from `start` to `stop`: laid end to end, all shards give exactly these."""
        size = max(0, stop - start)
        return start + size * (self.index - 1) // self.count, start + size * self.index // self.count

    @property
    def tag(self) -> str:
        """For file names: they sort as the shards do."""
        return f"{self.index:05d}-of-{self.count:05d}"


@dataclass(frozen=True, slots=True)
class InputOptions:
    """Where rows come from and how they become prompts."""

    input: str  # a file, a folder, a pattern, the address of one of these, or "-" for JSONL on stdin
    prompt_column: str | None = None
    messages_column: str | None = None
    id_column: str | None = None
    system_prompt: str | None = None
    chat: bool | None = None  # None: wrap prompts when the model has a chat template
    row_params: bool = True
    limit: int | None = None
    offset: int = 0
    shard: Shard | None = None  # of the rows that offset and limit leave
    strict: bool = False
    on_too_long: str = "error"
    prompt_template: str | None = None  # Jinja, over a row's columns
    job_chat: ChatOptions = PLAIN_CHAT  # tools and template variables of rows that do not say otherwise

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values that can never work."""
        if not self.input:
            raise ConfigError("the input's name is empty; give a file, a folder, or - for stdin")
        if self.on_too_long not in POLICIES:
            raise ConfigError(f"--on-too-long {self.on_too_long}: must be one of {', '.join(POLICIES)}")
        if self.prompt_template is not None and (self.prompt_column is not None or self.messages_column is not None):
            raise ConfigError("--prompt-template builds the prompt from any columns; leave --prompt-column and --messages-column out")
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
    unordered: bool = False  # rows as they finish; for outputs that are written as they come
    generated_token_ids: bool = False
    retry_truncated: int | None = None  # rows that max_tokens cut run again with at least so many
    metrics: bool = False
    reasoning_split: bool = False  # what a model thinks before it answers goes into a column of its own

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an empty name, or a combination that says two things."""
        if self.output == "":
            raise ConfigError("-o: the output's name is empty; give a file name ending in .jsonl or .parquet, or - for stdout")
        if self.keep_columns is not None and self.drop_columns:
            raise ConfigError("--keep-columns and --drop-columns say the same thing twice; give one of them")
        if self.retry_truncated is not None and self.retry_truncated < 1:
            raise ConfigError(
                f"--retry-truncated {self.retry_truncated}: must be a number of tokens, the new max_tokens of rows that were cut"
            )
        if self.overwrite and self.retry_truncated is not None:
            raise ConfigError("--overwrite starts afresh and --retry-truncated keeps the whole rows; give one of them")
        if self.overwrite and self.retry_errors:
            raise ConfigError("--overwrite starts afresh and --retry-errors keeps the good rows; give one of them")
