"""The house rules hold for every file of this repository. Each rule is shown to fail in test_rules.py."""

from __future__ import annotations

import subprocess
import sys

from packtrain.core import errors
from tests.house import allowed, ratchet, rules, tree

SOURCES = tree.files("packtrain", suffix=".py")
TESTS = tree.files("tests", "bench", suffix=".py")
ROOMS_WITHOUT_JAX = ("core", "data", "checkpoint", "monitor", "supervise", "recipes", "cli")


def test_small_pieces() -> None:
    """No file has more than 600 lines and no function more than 70, tests included."""
    assert not [finding for path, text in (SOURCES | TESTS).items() for finding in rules.too_long(path, text)]


def test_functions_do_not_grow() -> None:
    """Median and 90th percentile of function length never exceed what was recorded."""
    assert not rules.worse(ratchet.recorded(), ratchet.measure())


def test_effects_go_through_one_door() -> None:
    """Clock, chance, processes and deletion are named only by files that are allowed to, each with a reason."""
    assert not [finding for path, text in SOURCES.items() for finding in rules.undeclared(path, text, allowed.EFFECTS)]


def test_allowances_are_needed() -> None:
    """No allowance outlives its reason."""
    assert not rules.stale(SOURCES, allowed.EFFECTS)
    assert all(reason for reason in allowed.EFFECTS.values())


def test_packages_run_nothing_at_import() -> None:
    """Every __init__.py is empty."""
    assert not [path for path, text in SOURCES.items() if path.endswith("__init__.py") and text.strip()]


def test_recipes_import_config_structs_only() -> None:
    """Recipes import core, each other, and the config.py of rooms."""
    recipes = {path: text for path, text in SOURCES.items() if path.startswith("packtrain/recipes/")}
    assert not [finding for path, text in recipes.items() for finding in rules.beyond_configs(path, text)]


def test_seam_can_be_copied() -> None:
    """The client of the seam and the shim need the standard library and each other only."""
    seam = {".errors", ".offers", ".wire", ".words"}
    for name in ("breaking", "contract", "errors", "offers", "wire", "words", "shim"):
        path = f"packtrain/core/{name}.py"
        assert not rules.beyond_standard_library(path, SOURCES[path], but=seam)


def test_tests_say_what_must_hold() -> None:
    """Every test has a docstring."""
    assert not [finding for path, text in TESTS.items() for finding in rules.untold(path, text)]


def test_fakes_are_handed_in() -> None:
    """No test mocks or patches anything."""
    assert not [finding for path, text in TESTS.items() for finding in rules.patched(path, text)]


def test_no_test_sleeps() -> None:
    """No test waits by sleeping, but for those listed with a reason."""
    assert not [finding for path, text in TESTS.items() for finding in rules.sleeps(path, text, allowed.SLEEPS)]
    assert all(rules.sleeps(path, TESTS[path], {}) for path in allowed.SLEEPS), "an allowance nobody needs"


def test_no_debts_without_an_owner() -> None:
    """A TODO names an owner whose line stands in docs/LIMITS.md."""
    limits = tree.files("docs/LIMITS.md")["docs/LIMITS.md"]
    mentions = ("tests/house/", "docs/LIMITS.md")
    texts = {path: text for path, text in tree.files(".").items() if not path.startswith(mentions)}
    assert not [finding for path, text in texts.items() for finding in rules.debts(path, text, limits)]


def test_no_names_of_one_machine() -> None:
    """Nothing names a person's home, a workplace, its tools or its mirrors."""
    texts = {path: text for path, text in tree.files(".").items() if not path.startswith("tests/house/")}
    assert not [finding for path, text in texts.items() for finding in rules.local_names(path, text)]


def test_recipes_say_what_to_expect() -> None:
    """The header of every recipe in the catalog states command, hardware, time and expectation."""
    from packtrain.recipes.catalog import CATALOG

    paths = {recipe.module.replace(".", "/") + ".py" for recipe in CATALOG.values()}
    assert paths
    assert not [finding for path in sorted(paths) for finding in rules.recipe_header(path, SOURCES[path])]


def leaves(base: type[errors.PacktrainError]) -> list[type[errors.PacktrainError]]:
    children = [child for child in base.__subclasses__() if child.__module__ == errors.__name__]
    return [leaf for child in children for leaf in leaves(child)] if children else [base]


def test_errors_are_documented() -> None:
    """Every error stands in docs/ERRORS.md with its exit code and a remedy, a warning with a dash, and nothing else."""
    rows = [line.split("|") for line in tree.files("docs/ERRORS.md")["docs/ERRORS.md"].splitlines()]
    documented = {row[1].strip(" `"): row for row in rows if len(row) >= 5 and row[1].strip().startswith("`")}
    assert all(cell.strip() for row in documented.values() for cell in row[1:-1])
    known = {leaf.name: str(leaf.exit_code) for leaf in leaves(errors.PacktrainError)}
    exits = {name: row[2].strip() for name, row in documented.items()}
    warnings = [name for name, code in exits.items() if code == "-"]
    assert {name: code for name, code in exits.items() if name not in warnings} == known
    assert all(any(f'"{name}"' in text for text in SOURCES.values()) for name in warnings)


def test_error_names_are_stable_and_distinct() -> None:
    """No two leaves share a name, and each is `family.what`, or one word, in lower case."""
    names = [leaf.name for leaf in leaves(errors.PacktrainError)]
    assert len(names) == len(set(names))
    assert all(name.replace(".", "").replace("_", "").islower() and name.count(".") <= 1 for name in names)


def test_jax_stays_in_train() -> None:
    """Importing every module of every other room in a fresh interpreter loads neither JAX nor torch."""
    modules = [
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in SOURCES
        if path.split("/")[1] in ROOMS_WITHOUT_JAX
    ]
    program = "; ".join(
        ["import sys", *(f"import {module}" for module in modules),
         "print(sorted(name for name in ('jax', 'jaxlib', 'optax', 'torch') if name in sys.modules))"]
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tree.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def run(*argv: str) -> None:
    done = subprocess.run([sys.executable, *argv], cwd=tree.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_passes() -> None:
    """ruff is clean, also where only pytest is run."""
    run("-m", "ruff", "check", "--output-format", "concise")


def test_import_arrows_hold() -> None:
    """The arrows between rooms, written as contracts in pyproject.toml, hold."""
    run("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")
