from __future__ import annotations

import pathlib

import pytest

from packtrain.core.platform import LocalPlatform


@pytest.fixture
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty home for runs and stores."""
    monkeypatch.setenv("PACKTRAIN_HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small store of source text with a byte tokenizer."""
    from packtrain.data.build import BuildOptions, build

    folder = tmp_path_factory.mktemp("stores")
    text = folder / "text"
    text.mkdir()
    for n in range(40):
        (text / f"{n}.txt").write_text("".join(f"def f{n}_{k}(x):\n    return x + {n * k}\n" for k in range(30)))
    out = str(folder / "small")
    options = BuildOptions(tokenizer="byte", held_out_fraction=0.1, workers=1)
    build(LocalPlatform(), [str(text)], out, options, lambda stage, done, total: None)
    return out
