"""The console entry point: runs a command, turns what went wrong into one line on stderr and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from batchinfer.errors import BatchInferError, is_out_of_memory

INTERRUPTED = 130
READER_GONE = 141
LATER_FLAGS = frozenset(
    f"--{name}"
    for name in (
        *("response-format", "choices", "html"),
        *("logprobs", "prompt-logprobs", "n", "repetition-penalty", "presence-penalty", "frequency-penalty", "logit-bias", "bad-words"),
        *("chat-template", "tensor-parallel-size", "gpu-memory-utilization"),
    )
)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its verdict."""
    _prepare_streams()
    sys.exit(run_command(list(sys.argv[1:] if args is None else args)))


def run_command(args: list[str]) -> int:
    """Exit code of one command line. Users' mistakes become one line on stderr; our own bugs keep their traceback."""
    try:
        return _invoke(args)
    except BatchInferError as error:
        return _say(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        _silence(sys.stdout)
        return READER_GONE
    except SystemExit as stop:  # rich leaves this way when the reader of its table has gone
        return READER_GONE if isinstance(stop.__context__, BrokenPipeError) else int(stop.code or 0)
    except (MemoryError, ImportError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        first = (str(error) or type(error).__name__).splitlines()[0]
        return _say(f"out of memory ({first}); free some, raise the memory limit, or give --kv-cache-memory a smaller size", 1)


def _invoke(args: list[str]) -> int:
    import typer

    from batchinfer.cli.main import command_tree, with_leading_flags_moved

    usage_error: Any = typer.BadParameter.__mro__[1]  # typer has its own copy of click in some versions, click's in others
    args = with_leading_flags_moved(args)
    command: Any = typer.main.get_command(command_tree(args))
    try:
        with command.make_context("batchinfer", list(args)) as context:
            verdict = command.invoke(context)
        _flush(sys.stdout)
    except typer.Exit as stop:
        return stop.exit_code
    except typer.Abort:
        return _say("aborted", 1)
    except usage_error as error:
        return _usage(error, _command_path(command, args))
    return verdict if isinstance(verdict, int) else 0


def _command_path(command: Any, args: list[str]) -> str:
    """The words of a command line that name its command, such as `batchinfer models pull`."""
    path = "batchinfer"
    for word in args:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            break
        path += f" {word}"
    return path


def _usage(error: Any, path: str) -> int:
    """Say a wrong command line in one line, and where the help of its command is; some parser errors do not know it."""
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(error.ctx.get_help() + "\n")
        return 2
    option = str(getattr(error, "option_name", "") or "").split("=")[0]
    message = " ".join(error.format_message().split())
    if option in LATER_FLAGS or option.replace("--no-", "--") in LATER_FLAGS:
        message = f"{option} is not in this version"
    return _say(f"{message.rstrip('.')} (see {path} --help)", int(error.exit_code))


def _say(message: str, code: int) -> int:
    if sys.stderr is not None:
        sys.stderr.write(f"batchinfer: {message}\n")
    return code


def _prepare_streams() -> None:
    """Data on stdout is UTF-8 under any locale, messages never fail to encode, and closed streams stay closed.

    A process started with stdin, stdout or stderr closed would hand their numbers to the next files it opens, and
    then data or messages would end up inside those: the numbers are taken by the null device first.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
    _reconfigure(sys.stdout, "strict")
    _reconfigure(sys.stderr, "backslashreplace")


def _reconfigure(stream: TextIO | None, errors: str) -> None:
    if stream is not None and hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="utf-8", errors=errors)


def _flush(stream: TextIO | None) -> None:
    if stream is not None:
        stream.flush()


def _silence(stream: TextIO | None) -> None:
    """Point stdout at the null device, so that the interpreter's last flush does not complain."""
    if stream is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main()
