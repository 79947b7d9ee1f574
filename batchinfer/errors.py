"""The exception tree. What a user can cause is an exception that says the way out; our own bugs are asserts."""

from __future__ import annotations

OUT_OF_MEMORY_WORDS = (
    *("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory"),
    *("failed to map segment", "bad_alloc", "enomem"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """True for Python's, torch's, the loader's and the allocators' ways of saying so."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in OUT_OF_MEMORY_WORDS)


class BatchInferError(Exception):
    """Base of every error that this package raises on purpose."""

    exit_code = 1


class ConfigError(BatchInferError):
    """A wrong option or combination of options; names the option and what it allows."""

    exit_code = 2


class InputError(BatchInferError):
    """One bad row: becomes that row's error record, never stops the job.

    `code` is a short stable word for machines (`invalid_json`, `too_long`, ...); the message is for people.
    """

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


class InputFileError(BatchInferError):
    """The input as a whole cannot be read (truncated Parquet, no prompt column); names the file."""

    exit_code = 2


class OutputError(BatchInferError):
    """The output cannot be written or does not belong to this job; names the path."""


class OutputConflict(OutputError):
    """The output exists and is not this job's, or is the input; nothing was touched."""

    exit_code = 2


class ModelError(BatchInferError):
    """The model cannot be found, read or run; names the file and tensor."""


class UnsupportedModel(ModelError):
    """An architecture, format or setting that this version does not run, by name."""


class WeightMismatch(ModelError):
    """Tensors missing, surplus or of a wrong shape."""


class CapacityError(BatchInferError):
    """The model or the KV pool can never fit the memory at hand."""


class BackendError(BatchInferError):
    """A required device or kernel is missing."""


class EngineFault(BatchInferError):
    """The engine or its device fails whatever it is given; finished rows are kept."""
