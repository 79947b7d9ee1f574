"""`batchinfer models`: which names resolve to what, fetch one, look inside, clear what was unpacked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from batchinfer.weights.source import ModelFiles

app = typer.Typer(no_args_is_help=True, help="Which models there are: list, pull, inspect, clear.")

Name = Annotated[str, typer.Argument(help="A folder, a .gguf file, an alias or a hub id (org/name).", show_default=False)]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a hub repository.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """Names that --model takes, what they resolve to, whether they are here, and where the caches are."""
    from batchinfer.weights.fetch import hub_cache, models_cache
    from batchinfer.weights.packed_shelf import kept_weights, packed_folder, packed_limit
    from batchinfer.weights.shelf import known_names

    names, packed = known_names(), kept_weights()
    caches = {"unpacked models": str(models_cache()), "packed weights": str(packed_folder()), "Hugging Face hub": str(hub_cache())}
    if as_json:
        rows = [
            {"name": n.name, "about": n.about, "origin": n.origin, "files": str(n.files) if n.files else None, "missing": n.missing}
            for n in names
        ]
        files = [{"model": k.model, "form": k.form, "bytes": k.num_bytes, "file": str(k.path)} for k in packed]
        _print_json({"models": rows, "packed": files, "packed_limit": packed_limit(), "caches": caches})
        return
    for known in names:
        print(known.name)
        _print_facts({"what": known.about, "from": known.origin, "here": str(known.files or f"no: {known.missing}")}, indent="  ")
    if packed:
        total = sum(kept.num_bytes for kept in packed)
        print(f"packed weights, {total / 1e6:,.0f} of at most {packed_limit() / 1e6:,.0f} MB, used last first")
        for kept in packed:
            print(f"  {kept.model} ({kept.form})  {kept.num_bytes / 1e6:,.0f} MB")
    print("caches")
    _print_facts(caches, indent="  ")


@app.command()
def pull(name: Name, revision: Revision = None) -> None:
    """Fetch a model now and print where its files are."""
    from batchinfer.weights.source import resolve_model

    print(resolve_model(name, revision).path)


@app.command()
def inspect(name: Name, revision: Revision = None, as_json: AsJson = False) -> None:
    """Architecture, sizes, tensor formats, KV bytes per token, chat template and end ids of a model."""
    from batchinfer.weights.source import resolve_model

    facts = model_facts(resolve_model(name, revision))
    if as_json:
        _print_json(facts)
        return
    _print_facts({key.replace("_", " "): _readable(value) for key, value in facts.items()})


@app.command()
def clear(
    name: Annotated[
        str | None, typer.Argument(help="One model's name; without it, everything that was unpacked or packed.", show_default=False)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete models that this tool unpacked, and weights that it packed, from its own cache. The hub's cache is left alone."""
    from batchinfer.config import cache_root
    from batchinfer.weights.packed_shelf import clear_packed, kept_weights
    from batchinfer.weights.shelf import remove_unpacked, unpacked_models

    there = unpacked_models()
    chosen = [(known, size) for known, size in there if name in (None, known)]
    packed = [kept for kept in kept_weights() if name in (None, kept.model)]
    if name is not None and not chosen and not packed:
        remove_unpacked(name)  # says what is there
    if not chosen and not packed:
        typer.echo(f"nothing to clear in {cache_root()}", err=True)
        return
    items = [*chosen, *((f"packed weights of {kept.model}, {kept.form}", kept.num_bytes) for kept in packed)]
    listed = ", ".join(f"{known} ({size / 1e6:,.0f} MB)" for known, size in items)
    if not yes:
        typer.confirm(f"delete {listed} from {cache_root()}?", abort=True, err=True)
    for known, _ in chosen:
        remove_unpacked(known)
    clear_packed(packed)
    typer.echo(f"deleted {listed}", err=True)


def model_facts(files: ModelFiles) -> dict[str, Any]:
    """What `inspect` prints, from headers and settings alone."""
    from batchinfer.io.tokenizer import load_tokenizer
    from batchinfer.model.config import read_model_config
    from batchinfer.model.generation import read_generation_config
    from batchinfer.weights.formats import bytes_by_format, count_parameters, open_checkpoint

    config = read_model_config(files)
    entries = open_checkpoint(files).entries.values()
    tokenizer = load_tokenizer(files)
    generation = read_generation_config(files)
    vocabulary = tokenizer.vocabulary
    return {
        "name": files.name,
        "files": str(files.path),
        "architecture": config.family,
        "parameters": count_parameters(entries),
        "layers": config.num_layers,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "context": config.max_position,
        "tied_head": config.tied_head,
        "formats": bytes_by_format(entries),
        "weight_bytes": sum(entry.num_bytes for entry in entries),
        "kv_bytes_per_token_bf16": 2 * config.num_layers * config.num_kv_heads * 2 * config.head_dim,
        "kv_bytes_per_token_int8": 2 * config.num_layers * config.num_kv_heads * (config.head_dim + 4),  # a float32 scale each
        "vocabulary": vocabulary.size,
        "embedding_rows": config.vocab_size,
        "chat_template": tokenizer.has_chat_template,
        "eos_ids": {str(index): vocabulary.token_bytes[index].decode("utf-8", "replace") for index in vocabulary.eos_ids},
        "sampling_defaults": dict(generation.defaults),
        "notes": list(generation.notes),
    }


def _readable(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_readable(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    return str(value)


def _print_facts(facts: dict[str, str], indent: str = "") -> None:
    """A name and what is known in two columns; lines end between words, so that paths and ids stay whole."""
    import shutil
    import textwrap

    left = max(map(len, facts), default=0) + 2
    width = shutil.get_terminal_size().columns
    for name, text in facts.items():
        margin = indent + " " * left
        head = f"{indent}{name:<{left}}"
        print(textwrap.fill(text, width, initial_indent=head, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False))


def _print_json(data: dict[str, Any]) -> None:
    import json

    print(json.dumps(data, indent=2, ensure_ascii=False))
