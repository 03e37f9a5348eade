"""The code blocks of README.md and docs/: what each is for, and how the ones meant to be run are run.

The line that opens a block says `LANGUAGE TAG`: `run` is executed by `make test`, `soak` by `make soak-ci`, and
`show: reason` by nobody, for that reason.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

from tests.house import tree

TAGGED = re.compile(r"^(?P<language>[\w-]+) (?P<tag>run|soak|show: \S.+)$")
LINKS = re.compile(r"\[[^\]]+\]\((?P<target>[^)#\s]+)(?:#[^)]*)?\)")


class Block(NamedTuple):
    page: str
    line: int
    opening: str
    """What follows the three backticks."""
    text: str

    @property
    def tag(self) -> str:
        match = TAGGED.match(self.opening)
        return match["tag"].split(":")[0] if match else ""


def blocks(page: str, text: str) -> list[Block]:
    found: list[Block] = []
    inside: list[str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```") and inside is None:
            opening, start, inside = line[3:].strip(), number, []
        elif line.startswith("```") and inside is not None:
            found.append(Block(page, start, opening, "\n".join(inside) + "\n"))
            inside = None
        elif inside is not None:
            inside.append(line)
    assert inside is None, f"{page}: a code block is never closed"
    return found


def untagged(page: str, text: str) -> list[str]:
    return [
        f"{page}:{block.line} block opens with {block.opening!r}; write LANGUAGE and run, soak or show: REASON"
        for block in blocks(page, text) if not block.tag
    ]


def dead_links(page: str, text: str, exists: set[str]) -> list[str]:
    """Relative links that lead to no file of the repository."""
    folder = pathlib.PurePosixPath(page).parent
    return [
        f"{page} links to {match['target']}, which does not exist"
        for match in LINKS.finditer(text)
        if "://" not in match["target"] and os.path.normpath(folder / match["target"]) not in exists
    ]


def interpreter(block: Block) -> list[str]:
    language = block.opening.split()[0]
    return {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}[language]


def execute(block: Block, folder: pathlib.Path) -> None:
    """Run one block in `folder` with this interpreter's commands on PATH; AssertionError tells what it printed."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PACKTRAIN_")}
    env = {**ours, "PATH": path, "HOME": str(folder), "PYTHONPATH": str(tree.ROOT)}
    done = subprocess.run(
        [*interpreter(block), block.text], cwd=folder, env=env, stdin=subprocess.DEVNULL,
        capture_output=True, text=True,
    )
    said = f"{block.page}:{block.line} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    assert done.returncode == 0, said
