"""Record the function lengths of packtrain/ where they have become shorter. `python -m tests.house.ratchet`"""

from __future__ import annotations

import json
import pathlib

from tests.house import rules, tree

RECORD = pathlib.Path(__file__).with_name("ratchet.json")


def measure() -> dict[str, int]:
    sources = tree.files("packtrain", suffix=".py").values()
    return rules.spread(length for source in sources for _, _, length in rules.functions(source))


def recorded() -> dict[str, int]:
    return json.loads(RECORD.read_text())


if __name__ == "__main__":
    measured = measure()
    best = {key: min(value, recorded()[key]) for key, value in measured.items()}
    RECORD.write_text(json.dumps(best) + "\n")
    print(f"measured {measured}, recorded {best}")
