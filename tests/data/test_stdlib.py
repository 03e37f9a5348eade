"""The corpus of first-light: the standard library without its tests, filled up only where it is small."""

from __future__ import annotations

import pathlib

from packtrain.data.stdlib import ENOUGH_BYTES, standard_library


def folder_of(root: pathlib.Path, names: list[str]) -> str:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x = 1\n" * 10)
    return str(root)


LIBRARY = [
    "a.py", "b/c.py", "b/test/t.py", "b/tests/t.py", "test/t.py", "idlelib/idle_test/t.py", "site-packages/p.py",
    "dist-packages/p.py", "b/__pycache__/c.py", "data.txt",
]


def test_tests_and_packages_are_left_out(tmp_path: pathlib.Path) -> None:
    """Only sources of the library itself are taken, in sorted order; one that is not UTF-8 is left out."""
    library = folder_of(tmp_path / "lib", LIBRARY)
    (tmp_path / "lib" / "latin.py").write_bytes(b"# \xe9\n")
    sources = standard_library(library, str(tmp_path / "none"), enough_bytes=1)
    assert [pathlib.Path(f).relative_to(library).as_posix() for f in sources.files] == ["a.py", "b/c.py"]
    assert (sources.bytes, sources.installed_files) == (120, 0)


def test_a_small_library_is_filled_up(tmp_path: pathlib.Path) -> None:
    """Where the library is smaller than asked for, installed packages follow it, and it says how many files they
    are."""
    library = folder_of(tmp_path / "lib", LIBRARY)
    installed = folder_of(tmp_path / "site", ["numbers/a.py", "numbers/tests/t.py", "zebra.py"])
    sources = standard_library(library, installed, enough_bytes=121)
    assert sources.installed_files == 2 and sources.bytes == 240
    assert [pathlib.Path(f).name for f in sources.files] == ["a.py", "c.py", "zebra.py", "a.py"]


def test_this_python_has_enough() -> None:
    """The running Python's sources, with what had to be added, are enough text, each of them there."""
    sources = standard_library()
    assert sources.bytes >= ENOUGH_BYTES or sources.installed_files
    assert sources.bytes == sum(pathlib.Path(f).stat().st_size for f in sources.files)
    assert not [f for f in sources.files if "/test/" in f or "/tests/" in f]
