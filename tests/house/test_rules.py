"""Each house rule can fail: it is fed one snippet that breaks it and one that does not."""

from __future__ import annotations

import pytest

from tests.house import rules

LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 70
LONG_FILE = "x = 1\n" * 601


def effect(source: str) -> list[str]:
    return rules.undeclared("a.py", source, {})


def local(text: str) -> list[str]:
    return rules.local_names("a.md", text, frozenset({rules.fingerprint("secretplace")}))


CASES = [
    (lambda s: rules.too_long("a.py", s), LONG_FUNCTION, LONG_FUNCTION.replace("    x = 1\n", "", 1)),
    (lambda s: rules.too_long("a.py", s), LONG_FILE, LONG_FILE.replace("x = 1\n", "", 1)),
    (effect, "import time\n", "import timeit\n"),
    (effect, "from time import sleep\n", "from datetime import timedelta\n"),
    (effect, "def f():\n    import subprocess\n", "import os\nos.path.join('a', 'b')\n"),
    (effect, "import random\n", "import jax\njax.random.key(0)\n"),
    (effect, "import os\nos.unlink('x')\n", "import os\nos.link('x', 'y')\n"),
    (effect, "from os import remove\n", "names = []\nnames.remove('x')\n"),
    (effect, "platform.unlink('x')\n", "platform.link('x', 'y')\n"),
    (effect, "import shutil\nshutil.rmtree('x')\n", "import shutil\nshutil.disk_usage('x')\n"),
    (effect, "import datetime\ndatetime.datetime.now()\n", "import datetime\ndatetime.datetime.fromtimestamp(0)\n"),
    (effect, "import numpy as np\nnp.random.shuffle(x)\n", "import numpy as np\nnp.random.Philox(1)\n"),
    (effect, "import numpy as np\nnp.random.default_rng()\n", "import numpy as np\nnp.random.default_rng(1)\n"),
    (lambda s: rules.beyond_standard_library("a.py", s), "import numpy\n", "import json\n"),
    (lambda s: rules.beyond_configs("r.py", s), "from packtrain.data.store import Store\n",
     "from packtrain.data.config import DataConfig\n"),
    (lambda s: rules.untold("test_a.py", s), "def test_a(): pass\n", "def test_a():\n    'It holds.'\n"),
    (lambda s: rules.patched("test_a.py", s), "from unittest.mock import patch\n", "import unittest\n"),
    (lambda s: rules.patched("test_a.py", s), "monkeypatch.setattr(a, 'b', 1)\n", "monkeypatch.setenv('a', 'b')\n"),
    (lambda s: rules.sleeps("test_a.py", s, {}), "import time\ntime.sleep(1)\n", "platform.sleep(1)\n"),
    (lambda s: rules.debts("a.py", s, ""), "# TO" "DO finish\n", "# to do is not a mark\n"),
    (lambda s: rules.debts("a.py", s, "plan-9: later"), "# TO" "DO(other) x\n", "# TO" "DO(plan-9) x\n"),
    (local, "see /home/" "ada/x\n", "see docs/home/x\n"),
    (local, "cd /ro" "ot\n", "the root of the tree, tree/root\n"),
    (local, "at secretplace\n", "at some place\n"),
    (lambda s: rules.recipe_header("r.py", s), '"""Command: x Hardware: y Time: z"""\n',
     '"""Command: x Hardware: y Time: z Expect: not measured"""\n'),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[1][:40].strip())
def test_rule_can_fail(case: tuple) -> None:
    """The rule finds something in the bad snippet and nothing in the good one."""
    rule, bad, good = case
    assert rule(bad)
    assert not rule(good)


def test_ratchet_only_tightens() -> None:
    """One line more in the median or the 90th percentile is a finding, one less is not."""
    recorded = {"median": 7, "p90": 30}
    assert rules.worse(recorded, {"median": 8, "p90": 30}) and rules.worse(recorded, {"median": 7, "p90": 31})
    assert not rules.worse(recorded, {"median": 6, "p90": 30})
    assert rules.spread(range(1, 102)) == {"median": 51, "p90": 91}


def test_an_allowance_must_be_needed() -> None:
    """An allowance for an effect the file does not have, or for a file that is gone, is a finding."""
    sources = {"a.py": "import time\n"}
    assert rules.undeclared("a.py", sources["a.py"], {("a.py", "clock"): "why"}) == []
    assert rules.stale(sources, {("a.py", "clock"): "why"}) == []
    assert rules.stale(sources, {("a.py", "chance"): "why"}) and rules.stale(sources, {("b.py", "clock"): "why"})
