"""The pages tell the truth: every block is tagged, every command marked `run` runs, every verb has its section."""

from __future__ import annotations

import pathlib

import pytest
import typer

from tests.house import pages, tree

PAGES = tree.files("README.md", "docs", suffix=".md")
EVERY_FILE = set(tree.files("."))
RUN = [path for path, text in PAGES.items() if any(block.tag == "run" for block in pages.blocks(path, text))]
SOAK = [path for path, text in PAGES.items() if any(block.tag == "soak" for block in pages.blocks(path, text))]


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_tagged(page: str) -> None:
    """Every code block says whether it is run, run in the soak, or only shown and why."""
    assert not pages.untagged(page, PAGES[page])


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Every relative link leads to a file of this repository."""
    folders = {str(parent) for path in EVERY_FILE for parent in pathlib.PurePosixPath(path).parents}
    assert not pages.dead_links(page, PAGES[page], EVERY_FILE | folders)


@pytest.mark.parametrize("page", RUN)
def test_run_blocks(page: str, tmp_path: pathlib.Path) -> None:
    """The blocks of a page marked `run`, one after the other in one empty folder, all succeed."""
    for block in pages.blocks(page, PAGES[page]):
        if block.tag == "run":
            pages.execute(block, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", SOAK)
def test_soak_blocks(page: str, tmp_path: pathlib.Path) -> None:
    """The blocks of a page marked `soak`, one after the other in one empty folder, all succeed."""
    for block in pages.blocks(page, PAGES[page]):
        if block.tag in ("run", "soak"):
            pages.execute(block, tmp_path)


def verbs(command: typer.core.TyperGroup, prefix: str = "packtrain") -> list[str]:
    """Every full command of the tool, groups opened."""
    found = []
    for name, child in command.commands.items():
        full = f"{prefix} {name}"
        found += verbs(child, full) if hasattr(child, "commands") else [full]
    return found


def test_verbs_are_documented() -> None:
    """Every verb of the command line has its own section in docs/cli.md, and no section is left of one that is gone."""
    from packtrain.cli import main

    headings = [line[3:].strip("` ") for line in PAGES["docs/cli.md"].splitlines() if line.startswith("## ")]
    documented = {heading for heading in headings if heading.startswith("packtrain ")}
    assert documented == set(verbs(typer.main.get_command(main.app)))


def test_a_block_without_a_tag_is_found() -> None:
    """The tag rule can fail: a bare block, an unknown tag and `show` without a reason are findings, good tags not."""
    for opening in ("", "bash", "bash rnu", "bash show", "bash show:"):
        assert pages.untagged("a.md", f"```{opening}\nls\n```\n")
    for opening in ("bash run", "bash soak", "text show: what it prints"):
        assert not pages.untagged("a.md", f"```{opening}\nls\n```\n")


def test_a_failing_block_is_found(tmp_path: pathlib.Path) -> None:
    """The run rule can fail: a block whose first command fails does not pass, though its last one succeeds."""
    with pytest.raises(AssertionError, match="ended with 1"):
        pages.execute(pages.Block("a.md", 3, "bash run", "false\ntrue\n"), tmp_path)
    pages.execute(pages.Block("a.md", 3, "python run", "print(1)\n"), tmp_path)


def test_a_dead_link_is_found() -> None:
    """The link rule can fail: a missing target is a finding, an existing one and a web address are not."""
    assert pages.dead_links("docs/a.md", "[x](b.md)", {"b.md"})
    assert not pages.dead_links("docs/a.md", "[x](../b.md#part) [y](https://example.org/z)", {"b.md"})
