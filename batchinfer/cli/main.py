"""The command tree. Command modules import nothing heavy, so that `batchinfer --help` is quick."""

from __future__ import annotations

import typer

from batchinfer.cli.ablate import ablate
from batchinfer.cli.bench import bench
from batchinfer.cli.doctor import doctor
from batchinfer.cli.flags import GeneralFlags, gathers_flags
from batchinfer.cli.models import app as models_app
from batchinfer.cli.plan import plan
from batchinfer.cli.run import run
from batchinfer.cli.sweep_kv import sweep_kv

app = typer.Typer(
    name="batchinfer",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
@gathers_flags
def everywhere(general: GeneralFlags) -> None:
    """Offline batch LLM inference: a prompts file in, generated text out, in input order."""


app.command("run")(run)
app.command("plan")(plan)
app.command("ablate")(ablate)
app.command("sweep-kv")(sweep_kv)
app.command("bench")(bench)
app.add_typer(models_app, name="models")
app.command("doctor")(doctor)


def with_leading_flags_moved(args: list[str]) -> list[str]:
    """The command line with `--threads` and `--config` given before the command put behind it, where they are read."""
    lead, rest = [], list(args)
    while rest and rest[0].split("=")[0] in ("--threads", "--config"):
        width = 1 if "=" in rest[0] else 2
        lead += rest[:width]
        rest = rest[width:]
    return rest[:1] + lead + rest[1:] if rest else args
