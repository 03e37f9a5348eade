"""The files of this repository, as git sees them: tracked, and untracked ones that are not ignored."""

from __future__ import annotations

import pathlib
import subprocess

ROOT = pathlib.Path(__file__).parents[2]


def files(*folders: str, suffix: str = "") -> dict[str, str]:
    """Path relative to the root -> text, of every text file under `folders` that ends in `suffix`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *folders],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split("\0")
    texts = {}
    for name in sorted(filter(None, listed)):
        path = ROOT / name
        if name.endswith(suffix) and path.is_file() and b"\0" not in (data := path.read_bytes()):
            texts[name] = data.decode()
    return texts
