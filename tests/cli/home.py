"""Commands for tests: in this process, or as a person starts them."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from packtrain.cli.ending import end
from packtrain.cli.main import app
from tests.core.loopback import bad_server, hang

ROOT = pathlib.Path(__file__).parent.parent.parent
TINY = {
    "model.layers": "2", "model.embed": "64", "model.heads": "2", "model.kv_heads": "1", "model.head": "32",
    "model.mlp": "128", "data.length": "64", "data.batch_rows": "4", "train.sample_tokens": "8",
    "optim.warmup_steps": "2",
}


def sets(**more: str) -> list[str]:
    """--set options of a model that trains in seconds; keys with __ for a dot."""
    values = TINY | {key.replace("__", "."): value for key, value in more.items()}
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


def call(*arguments: str) -> int:
    """The command in this process; its exit code."""
    return end(lambda: app(list(arguments), standalone_mode=False))


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of a command in this process."""
    capsys.readouterr()
    code = call(*arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def environment(home: pathlib.Path) -> dict[str, str]:
    """Programs compiled by one test of a session serve the others."""
    return {
        **os.environ, "PYTHONPATH": str(ROOT), "PACKTRAIN_HOME": str(home), "COLUMNS": "80",
        "JAX_COMPILATION_CACHE_DIR": str(home.parent / "compiled"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def start(home: pathlib.Path, *arguments: str) -> subprocess.Popen[str]:
    """As from a terminal: these tests may run under nohup, whose children ignore that it goes away."""
    return subprocess.Popen(
        ["env", "--default-signal=HUP", sys.executable, "-m", "packtrain", *arguments], env=environment(home),
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=home,
    )


def packtrain(home: pathlib.Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of a command in a process of its own."""
    with start(home, *arguments) as process:
        out, errors = process.communicate()
    return process.returncode, out, errors


def interrupted(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    """The same for a command that asks a bucket, whose server never answers, and gets Ctrl-C while it waits."""
    monkeypatch.setenv("TEST_ID", "x")
    monkeypatch.setenv("TEST_SECRET", "y")
    with bad_server(hang) as server:
        process = start(
            home, *arguments, "--endpoint", server.url, "--region", "r", "--key-id", "env:TEST_ID", "--secret",
            "env:TEST_SECRET",
        )
        while not server.requests:
            assert process.poll() is None
            server.left.wait(0.02)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=20)
    return process.returncode, out, errors


def script(code: str, home: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code], env=environment(home), text=True, capture_output=True, check=False, cwd=home
    )
