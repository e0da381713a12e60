"""pase zoo: the models that come with pase."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pase.files.terminal import console

__all__ = ["zoo"]


def zoo(
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """The models that come with pase.

    Lists each model's parameters, its settings with their defaults, and where it is from.

    Use one as zoo:NAME, with settings as in zoo:gpt2?batch=32&seq=512.
    """
    from pase.zoo import entry, names

    entries = [entry(name) for name in names()]
    if json:
        from json import dumps

        models: list[dict[str, Any]] = [
            {
                "name": model.name,
                "parameters": model.published_parameters,
                "settings": dict(model.settings),
                "description": model.description,
                "source": model.source,
            }
            for model in entries
        ]
        print(dumps({"models": models}))
        return

    from rich.table import Table

    table = Table("name", box=None, pad_edge=False, header_style="bold")
    table.add_column("parameters", justify="right")
    table.add_column("settings and their defaults", ratio=2)
    table.add_column("source", ratio=3)
    for model in entries:
        settings = " ".join(f"{key}={value}" for key, value in model.settings.items())
        table.add_row(model.name, f"{model.published_parameters:,}", settings, model.source)
    out = console()
    out.print(table)
    out.print("\nUse one as zoo:NAME, with settings as in 'zoo:gpt2?batch=32&seq=512'.")
