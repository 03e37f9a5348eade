"""What the long tests share: one small store, one compile cache, one undisturbed run to compare with."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from tests.soak.trial import trial

STEPS = 400


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A few hundred short documents, built by the command a person would give."""
    folder = tmp_path_factory.mktemp("store")
    (folder / "texts").mkdir()
    for i in range(300):
        lines = (f"mule {i * j % 997} carries {i + j} loaves over ridge {i ^ j} by noon" for j in range(1, 30))
        (folder / "texts" / f"{i}.txt").write_text("\n".join(lines))
    subprocess.run(
        [sys.executable, "-m", "packtrain.cli.main", "data", "build", str(folder / "texts"), "--out",
         str(folder / "built")],
        check=True, capture_output=True,
    )
    return folder / "built"


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, store: pathlib.Path, cache: pathlib.Path
) -> dict[str, bytes]:
    """The final state of a run of STEPS steps that nobody touched."""
    with trial(tmp_path_factory.mktemp("undisturbed"), store, cache, STEPS) as run:
        run.start()
        assert run.finish(600) == 0, run.said()
        return run.final()
