"""The house rules a machine can check: pure functions from text to findings, so that each can be shown to fail.

A finding is one line, `path:line what`. An allowance is written down here with its reason; one that is no longer
needed is itself a finding.
"""

from __future__ import annotations

import ast
import hashlib
import re
import statistics
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping

LINES_MAX = 600
FUNCTION_MAX = 70

# --- sizes -----------------------------------------------------------------------------------------


def functions(source: str) -> list[tuple[str, int, int]]:
    """(name, line, length) of every function, first to last line, docstring included."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [(node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1) for node in found]


def too_long(path: str, source: str) -> list[str]:
    n = source.count("\n")
    findings = [f"{path}:1 {n} lines; a file a person reads in one sitting has at most {LINES_MAX}"] * (n > LINES_MAX)
    return findings + [
        f"{path}:{line} {name} has {length} lines; at most {FUNCTION_MAX}"
        for name, line, length in functions(source) if length > FUNCTION_MAX
    ]


def spread(lengths: Iterable[int]) -> dict[str, int]:
    """Median and 90th percentile of function lengths, as whole lines."""
    ordered = sorted(lengths)
    return {"median": round(statistics.median(ordered)), "p90": ordered[int(0.9 * (len(ordered) - 1))]}


def worse(recorded: Mapping[str, int], measured: Mapping[str, int]) -> list[str]:
    return [
        f"function length, {key}: {measured[key]} lines, recorded {recorded[key]}"
        for key in recorded if measured[key] > recorded[key]
    ]


# --- effects go through one door ---------------------------------------------------------------------

IMPORTS = {
    "time": "clock", "random": "chance", "secrets": "chance", "uuid": "chance", "tempfile": "chance",
    "subprocess": "processes", "multiprocessing": "processes",
}
CALLS = {
    "os.urandom": "chance", "os.getrandom": "chance", "os.system": "processes", "os.popen": "processes",
    "os.fork": "processes", "os.posix_spawn": "processes", "os.execv": "processes", "os.execvp": "processes",
    "os.unlink": "deletes", "os.remove": "deletes", "os.rmdir": "deletes", "os.removedirs": "deletes",
    "shutil.rmtree": "deletes", "shutil.move": "deletes",
    "datetime.now": "clock", "datetime.utcnow": "clock", "datetime.today": "clock", "date.today": "clock",
}
DELETING_METHODS = ("unlink", "rmdir", "rmtree", "erase", "delete_async", "delete_object", "delete_objects")
SEEDED = ("default_rng", "Generator", "Philox", "PCG64", "SeedSequence")


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain, or "" where it starts with something else than a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([*([node.id] if isinstance(node, ast.Name) else [""]), *reversed(parts)])


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(what, effect) of an import statement."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] in IMPORTS:
                yield alias.name, IMPORTS[alias.name.split(".")[0]]
    elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            effect = IMPORTS.get(node.module.split(".")[0]) or CALLS.get(full)
            if effect:
                yield full, effect


def _used(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(what, effect) of an attribute or a call that reaches outside without an import of its own."""
    if isinstance(node, ast.Attribute):
        name = dotted(node)
        last_two = ".".join(name.split(".")[-2:])
        if last_two in CALLS:
            yield last_two, CALLS[last_two]
        elif node.attr in DELETING_METHODS:
            yield f".{node.attr}", "deletes"
        elif re.match(r"(np|numpy)\.random\.\w+$", name) and node.attr not in SEEDED:
            yield name, "chance"
    elif isinstance(node, ast.Call) and not node.args and dotted(node.func).endswith("random.default_rng"):
        yield "default_rng() without a seed", "chance"


def effects(source: str) -> list[tuple[str, str, int]]:
    """(effect, what, line) of every place that touches clock, chance, processes, or deletes."""
    found = []
    for node in ast.walk(ast.parse(source)):
        for what, effect in (*_imported(node), *_used(node)):
            found.append((effect, what, getattr(node, "lineno", 0)))
    return sorted(found)


def undeclared(path: str, source: str, allowed: Mapping[tuple[str, str], str]) -> list[str]:
    """Effects of a file that the allow-list does not name."""
    return [
        f"{path}:{line} {what} ({effect}): hand in a Platform instead"
        for effect, what, line in effects(source) if (path, effect) not in allowed
    ]


def stale(sources: Mapping[str, str], allowed: Mapping[tuple[str, str], str]) -> list[str]:
    """Allowances that nothing needs any more."""
    return [
        f"{path} no longer needs its allowance for {effect}"
        for path, effect in allowed
        if path not in sources or effect not in {found for found, _, _ in effects(sources[path])}
    ]


# --- what a file may import ----------------------------------------------------------------------------


def imports(source: str) -> list[tuple[str, int]]:
    """(module, line) of every import, also those inside functions."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(("." * node.level + (node.module or ""), node.lineno))
    return found


def beyond_standard_library(path: str, source: str, but: Collection[str] = ()) -> list[str]:
    """Imports that a program copying this file could not satisfy; `but` names what is allowed besides."""
    return [
        f"{path}:{line} imports {module}: only the standard library here"
        for module, line in imports(source) if module.split(".")[0] not in sys.stdlib_module_names and module not in but
    ]


def beyond_configs(path: str, source: str) -> list[str]:
    """Imports of a recipe that reach into a room further than its config."""
    return [
        f"{path}:{line} imports {module}: a recipe knows configurations only"
        for module, line in imports(source)
        if module.startswith("packtrain.") and not module.startswith(("packtrain.core", "packtrain.recipes"))
        and not module.endswith(".config")
    ]


# --- tests ---------------------------------------------------------------------------------------------


def untold(path: str, source: str) -> list[str]:
    """Tests that do not say what must hold."""
    return [
        f"{path}:{node.lineno} {node.name} has no sentence that says what must hold"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]


def patched(path: str, source: str) -> list[str]:
    """Mocks and patches: fakes are handed in instead."""
    findings = [
        f"{path}:{line} imports {module}: hand in a fake"
        for module, line in imports(source) if "mock" in module.split(".")
    ]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and dotted(node) in ("monkeypatch.setattr", "mocker.patch"):
            findings.append(f"{path}:{node.lineno} {dotted(node)}: hand in a fake")
    return findings


def sleeps(path: str, source: str, allowed: Mapping[str, str]) -> list[str]:
    if path in allowed:
        return []
    return [
        f"{path}:{node.lineno} time.sleep: wait in virtual time, or for the thing itself"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and dotted(node.func) in ("time.sleep", "sleep")
    ]


# --- text ------------------------------------------------------------------------------------------------

MARKERS = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b(?:\((\w[\w-]*)\))?")
HOMES = re.compile(r"(?<![\w.])/(?:home|Users)/[a-z]\w*|(?<![\w.$])/root\b")
WORDS = re.compile(r"[a-z0-9][a-z0-9_.-]*[a-z0-9]|/[a-z]+(?=/)")

# SHA-256 of lower-case words that name somebody's machine, tools or mirrors; hashed, so that this file names none.
FORBIDDEN = frozenset({
    "0c9a453fad615c83", "0a5f8f166c7431be", "fbb8037df8cc9050", "8cf10d1b0e07c1d8", "c8cf701f30ad11d3",
    "94a168d2da574b00", "a4aa2ac280bb8d1a", "c899567ee9068517", "e680c440a2e92079", "0dc11026ac75c015",
    "fc90c6845c5b502a",
})


def fingerprint(word: str) -> str:
    return hashlib.sha256(word.encode()).hexdigest()[:16]


def debts(path: str, text: str, limits: str) -> list[str]:
    """TODO marks without an owner whose line stands in docs/LIMITS.md."""
    return [
        f"{path}:{number} {match[0]}: finish it, or give it an owner line in docs/LIMITS.md"
        for number, line in enumerate(text.splitlines(), 1)
        for match in MARKERS.finditer(line)
        if not (match[1] and match[1] in limits)
    ]


def local_names(path: str, text: str, forbidden: frozenset[str] = FORBIDDEN) -> list[str]:
    """Words that only mean something on one machine or in one workplace."""
    findings = []
    for number, line in enumerate(text.splitlines(), 1):
        words = [match[0] for match in HOMES.finditer(line)]
        words += [word for word in WORDS.findall(line.lower()) if fingerprint(word) in forbidden]
        findings += [f"{path}:{number} {word}: names one machine or workplace" for word in words]
    return findings


RECIPE_LABELS = ("Command:", "Hardware:", "Time:", "Expect:")


def recipe_header(path: str, source: str) -> list[str]:
    """A recipe says how to start it, on what, for how long and what number to expect."""
    header = ast.get_docstring(ast.parse(source)) or ""
    return [f"{path}:1 header lacks {label!r}" for label in RECIPE_LABELS if label not in header]
