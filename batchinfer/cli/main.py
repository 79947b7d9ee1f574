"""The command tree. Command modules import nothing heavy, and a command line loads its own alone, so that each is quick."""

from __future__ import annotations

from importlib import import_module

import typer

from batchinfer.cli.flags import GeneralFlags, gathers_flags

COMMANDS = ("run", "plan", "ablate", "sweep-kv", "bench", "models", "doctor")


@gathers_flags
def everywhere(general: GeneralFlags) -> None:
    """Offline batch LLM inference: a prompts file in, generated text out, in input order."""


def command_tree(args: list[str]) -> typer.Typer:
    """The command that a command line begins with, or all of them where it begins with none: for help, and to find what was meant."""
    app = typer.Typer(
        name="batchinfer",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(everywhere)
    for name in args[:1] if args[:1] and args[0] in COMMANDS else COMMANDS:
        place = name.replace("-", "_")
        module = import_module(f"batchinfer.cli.{place}")
        if name == "models":
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(getattr(module, place))
    return app


def with_leading_flags_moved(args: list[str]) -> list[str]:
    """The command line with `--threads` and `--config` given before the command put behind it, where they are read."""
    lead, rest = [], list(args)
    while rest and rest[0].split("=")[0] in ("--threads", "--config"):
        width = 1 if "=" in rest[0] else 2
        lead += rest[:width]
        rest = rest[width:]
    return rest[:1] + lead + rest[1:] if rest else args
