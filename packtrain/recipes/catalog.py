"""Which recipes there are. An explicit table: nothing registers itself, and only the recipe asked for is imported."""

from __future__ import annotations

import difflib
import importlib
from typing import NamedTuple

from packtrain.core.errors import BadValue
from packtrain.recipes.spec import RunSpec


class Recipe(NamedTuple):
    module: str
    function: str
    dial: str
    """What follows the name after a colon; empty: nothing does."""
    about: str


CATALOG = {
    "first-light": Recipe("packtrain.recipes.first_light", "first_light", "", "small decoder for 2 CPU cores, minutes"),
    "rung": Recipe("packtrain.recipes.rung", "rung", "SIZE", "one dial for size: rung:10m ... rung:64b"),
}


def names() -> list[str]:
    return [f"{name}:{recipe.dial}" if recipe.dial else name for name, recipe in CATALOG.items()]


def _look_up(text: str) -> tuple[Recipe, str]:
    name, _, dial = text.partition(":")
    recipe = CATALOG.get(name)
    if recipe is None:
        near = difflib.get_close_matches(name, CATALOG, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise BadValue(f"no recipe is called {name!r}", where="RECIPE", fix=f"{hint}there are: {', '.join(names())}")
    if bool(dial) != bool(recipe.dial):
        wanted = f"{name}:{recipe.dial}" if recipe.dial else name
        raise BadValue(f"recipe {text!r} is incomplete or has too much", where="RECIPE", fix=f"write {wanted}")
    return recipe, dial


def resolve(text: str, vocab: int | None = None) -> RunSpec:
    """`first-light` or `rung:300m` -> its configuration, for data of `vocab` padded tokens when that is known.

    Raises BadValue with the nearest right spelling.
    """
    recipe, dial = _look_up(text)
    module = importlib.import_module(recipe.module)
    function = getattr(module, recipe.function)
    arguments = [module.parse_dial(dial)] if dial else []
    spec: RunSpec = function(*arguments) if vocab is None else function(*arguments, vocab=vocab)
    return spec
