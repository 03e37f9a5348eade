"""Recipes: complete configurations from plain functions, one dial for size."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.core.errors import BadValue, Contradiction
from packtrain.recipes import catalog
from packtrain.recipes.rung import (
    LARGEST,
    SMALLEST,
    TOLERANCE,
    dial_text,
    length,
    parameters,
    parse_dial,
    rung,
    suggested_vocab,
)

DIALS = ("10m", "17m", "30m", "50m", "100m", "300m", "777m", "1b", "1.3b", "3b", "8b", "13b", "30b", "64b")


@pytest.mark.parametrize("dial", DIALS)
def test_rung_holds_the_dial(dial: str) -> None:
    """The parameter count is within 10% of the dial and every size divides the way a mesh needs it."""
    n = parse_dial(dial)
    spec = rung(n)
    model = spec.model
    assert abs(parameters(model) / n - 1) < TOLERANCE
    assert model.embed % 128 == 0 and model.mlp % 128 == 0 and model.vocab % 128 == 0
    assert model.heads * model.head == model.embed and model.heads % model.kv_heads == 0
    assert spec.data.batch_rows % 8 == 0
    assert model.embed < 4096 or model.kv_heads == 8


@pytest.mark.parametrize("dial", DIALS)
def test_rung_reads_twenty_tokens_a_parameter(dial: str) -> None:
    """The horizon in tokens is 20 times the dial, to within one batch."""
    n = parse_dial(dial)
    spec = rung(n)
    batch_tokens = spec.data.batch_rows * spec.data.length
    assert 0 <= spec.train.steps * batch_tokens - 20 * n < batch_tokens


def test_rung_grows_monotonically() -> None:
    """A larger dial never gives fewer parameters, a shorter row, fewer tokens a batch or a higher learning rate."""
    specs = [rung(parse_dial(dial)) for dial in DIALS]
    pairs = list(itertools.pairwise(specs))
    assert all(parameters(a.model) < parameters(b.model) for a, b in pairs)
    assert all(a.data.length <= b.data.length for a, b in pairs)
    assert all(a.optim.learning_rate > b.optim.learning_rate for a, b in pairs)
    assert {length(SMALLEST), length(LARGEST)} == {256, 4096}


@given(st.integers(SMALLEST, LARGEST), st.sampled_from([256, 4096, 32_768]))
def test_rung_counts_the_vocabulary_of_the_data(n: int, vocab: int) -> None:
    """With the data's vocabulary the whole model still meets the dial, or the error names a vocabulary that fits."""
    model = rung(n, vocab).model
    assert model.vocab == vocab and abs(parameters(model) / n - 1) < TOLERANCE


def test_rung_refuses_a_vocabulary_larger_than_the_model() -> None:
    """A vocabulary that alone exceeds the dial is refused with a vocabulary that fits."""
    with pytest.raises(Contradiction, match=r"--vocab 4096"):
        rung(SMALLEST, 131_072)


@given(st.integers(10, 63_999))
def test_dial_text_is_the_inverse_of_parse_dial(millions: int) -> None:
    """A run's recorded recipe name asks for the same rung again."""
    n = millions * 1_000_000
    assert parse_dial(dial_text(n)) == n


@pytest.mark.parametrize("text", ["", "m", "9m", "65b", "300", "-10m", "nanb", "infb", "1e99b", "300k"])
def test_bad_dials_are_refused(text: str) -> None:
    """A size outside 10m to 64b, or no size at all, is one BadValue that shows how to write it."""
    with pytest.raises(BadValue, match="rung:300m"):
        parse_dial(text)


@pytest.mark.parametrize("name", list(catalog.CATALOG))
def test_every_recipe_resolves_and_records_its_own_name(name: str) -> None:
    """The recorded recipe name resolves to the same configuration again."""
    asked = f"{name}:{'300m' if catalog.CATALOG[name].dial else ''}".rstrip(":")
    spec = catalog.resolve(asked)
    assert spec.recipe == asked and catalog.resolve(spec.recipe) == spec


@pytest.mark.parametrize(
    ("asked", "hint"),
    [("first-lite", "did you mean first-light"), ("rung", "rung:SIZE"), ("first-light:3", "first-light")],
)
def test_unknown_recipe_names_the_nearest(asked: str, hint: str) -> None:
    """A misspelt or incomplete recipe is one BadValue that shows the right spelling."""
    with pytest.raises(BadValue, match=hint):
        catalog.resolve(asked)


def test_vocab_of_the_data_reaches_the_model() -> None:
    """Resolving for data of a known vocabulary gives a model with that many rows in its embedding."""
    assert catalog.resolve("first-light", vocab=256).model.vocab == 256
    assert catalog.resolve("rung:10m", vocab=256).model.vocab == 256
    assert suggested_vocab(SMALLEST) == 4096


@pytest.mark.parametrize("recipe", ["first-light", "rung:10m", "rung:1b", "rung:64b"])
def test_parameters_are_those_the_trainer_makes(recipe: str) -> None:
    """The formula of the dial counts what the model really has, without making it."""
    from packtrain.train.state import count_parameters

    model = catalog.resolve(recipe).model
    assert parameters(model) == count_parameters(model)
