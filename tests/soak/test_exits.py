"""A program that has used a bucket ends as it wants to: the bucket's client aborted 4 of 150 at their very end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from tests.core.loopback import bad_server, hang
from tests.house import tree

RUNS = 80
USES = """
import sys
import threading
from packtrain.core.platform import LocalPlatform
from packtrain.core.stores import StoreConfig, open_store
store = open_store(LocalPlatform(), StoreConfig("memory://"))
store.create("a/b", b"x")
assert list(store.list_all("a")) == [("a/b", 1)] and not store.exists("gone")
"""
LEAVES = """
import sys, threading
from packtrain.core.platform import LocalPlatform
from packtrain.core.stores import StoreConfig, open_store
config = StoreConfig("s3://b", endpoint=sys.argv[1], region="r", key_id="env:TEST_ID", secret="env:TEST_ID")
store = open_store(LocalPlatform(), config)
for _ in range(4):
    threading.Thread(target=store.size, args=("a",), daemon=True).start()
sys.stdin.readline()
"""
pytestmark = pytest.mark.soak


def test_programs_end_with_their_own_code() -> None:
    """Of 80 short programs that use a store every one ends with 0 and without a word."""
    for _ in range(RUNS):
        done = subprocess.run([sys.executable, "-c", USES], cwd=tree.ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_programs_may_leave_while_a_store_hangs() -> None:
    """A program that ends while its threads wait for a store that hangs does not wait for them, and says nothing."""
    for _ in range(5):
        with bad_server(hang) as server:
            process = subprocess.Popen(
                [sys.executable, "-c", LEAVES, server.url], cwd=tree.ROOT, env={**os.environ, "TEST_ID": "x"},
                stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            while len(server.requests) < 4:
                assert process.poll() is None
                threading.Event().wait(0.01)
            assert process.communicate("\n", timeout=20)[1] == ""
            assert process.returncode == 0
