"""`packtrain sample RUN`: what the model writes after a prompt."""

from __future__ import annotations

from typing import Annotated

import typer


def sample(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.")],
    prompt: Annotated[str, typer.Option("--prompt", help="What the text begins with.")],
    tokens: Annotated[int, typer.Option("--tokens", min=1, max=100_000, help="How many to add at most.")] = 96,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, max=10.0, help="0: always the likeliest token.")
    ] = 0.8,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Another seed, another text.")] = 0,
) -> None:
    """Continue a prompt with a trained model.

    It is the last published checkpoint of RUN; a run that is still training can be asked too.
    """
    from packtrain.cli import extras, folders

    folder = folders.find_run(run)
    extras.require("train")
    from packtrain.monitor.report import printable
    from packtrain.train.sample import generate

    typer.echo(printable(prompt + generate(folder, prompt, tokens, temperature, seed)))
