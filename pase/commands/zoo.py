"""``pase zoo``: lists the models that come with pase."""

from __future__ import annotations

from textwrap import shorten
from typing import TYPE_CHECKING, Annotated

import typer

from pase.commands.options import JsonOption, print_json
from pase.files.json_values import JsonObject
from pase.files.terminal import console

if TYPE_CHECKING:
    from pase.zoo.catalog import Entry

__all__ = ["zoo"]

PURPOSE = "Plan"


def zoo(
    name: Annotated[
        str | None,
        typer.Argument(
            help="The model to show in full, with its settings and source.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the models that come with pase, or show one of them.

    Without NAME, prints one line for each model. With NAME, prints the settings of that model with their defaults, and
    the source of its figures.

    Other commands take a model as zoo:NAME, with settings as in 'zoo:gpt2?batch=32&seq=512'.

    \b
    Examples:
      pase zoo
      pase zoo gpt2
    """
    from pase.zoo import entry, names

    models = [entry(n) for n in ([name] if name is not None else names())]
    if json:
        print_json({"models": [_as_json(m) for m in models]})
    elif name is not None:
        _show(models[0])
    else:
        _list(models)


def _as_json(model: Entry) -> JsonObject:
    return {
        "name": model.name,
        "parameters": model.published_parameters,
        "settings": dict(model.settings),
        "description": model.description,
        "source": model.source,
    }


def _list(models: list[Entry]) -> None:
    from rich.table import Table

    out = console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("what it is", no_wrap=True)
    counts = [f"{m.published_parameters:,}" for m in models]
    room = out.width - max(len(m.name) for m in models) - max(map(len, counts)) - 4
    for m, count in zip(models, counts, strict=True):
        table.add_row(m.name, count, shorten(m.description, max(room, 20), placeholder=" …"))
    out.print(table)
    out.print(
        "\nUse a model as zoo:NAME, with settings as in 'zoo:gpt2?batch=32&seq=512'; pase zoo NAME lists them."
    )


def _show(model: Entry) -> None:
    out = console()
    out.print(f"{model.name}: {model.description}")
    out.print(f"parameters  {model.published_parameters:,}, from {model.source}")
    out.print(f"settings    {' '.join(f'{k}={v}' for k, v in model.settings.items())}")
    settings = "&".join(f"{k}={v}" for k, v in list(model.settings.items())[:2])
    out.print(f"use         pase compile 'zoo:{model.name}?{settings}' --devices 32")
