"""The error tree."""

from __future__ import annotations

import re

import pytest

from packtrain.core import errors
from packtrain.core.errors import PacktrainError


def tree(root: type[PacktrainError] = PacktrainError) -> list[type[PacktrainError]]:
    return [root] + [found for child in root.__subclasses__() for found in tree(child)]


OURS = [kind for kind in tree() if kind.__module__ == errors.__name__]
LEAVES = [kind for kind in OURS if not any(other.__base__ is kind for other in OURS)]


def test_names_are_unique_and_stable_in_form() -> None:
    """Each member of the tree states a name of its own, and no two share one."""
    assert all("name" in vars(kind) for kind in OURS)
    names = [kind.name for kind in OURS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]+(\.[a-z_]+)?", name) for name in names)


def test_leaves_name_their_room() -> None:
    """What is printed and journalled is `room.what`; only the families right below the root have a single word."""
    assert all("." in kind.name for kind in LEAVES if kind.__base__ is not PacktrainError)


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.name)
def test_rendering_answers_three_questions(kind: type[PacktrainError]) -> None:
    """A person reads what happened, where, and what to do next; a record has the same as strings; codes are few."""
    error = kind("the disk is full", where="/run/one", fix="free 2 GiB")
    assert error.render() == f"[{kind.name}] the disk is full\n  where: /run/one\n  next:  free 2 GiB" == str(error)
    assert error.as_dict() == {"name": kind.name, "what": "the disk is full", "where": "/run/one", "fix": "free 2 GiB"}
    assert kind("only what").render() == f"[{kind.name}] only what"
    assert kind.exit_code in (errors.EXIT_USAGE, errors.EXIT_OURS, errors.EXIT_AGAIN, errors.EXIT_CONFIG)
