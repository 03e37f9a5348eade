"""Reads a Packtrain checkpoint without Packtrain, after docs/FORMAT.md: `python read_checkpoint.py RUN`.
`read(run)` gives {name: array} of the last save of the lineage; ValueError names what is damaged, before it is used.
"""

import hashlib
import json
import sys
from pathlib import Path

import ml_dtypes  # noqa: F401  makes bfloat16, float8_e4m3fn and float8_e5m2 known to numpy
import numpy as np


def expect(holds, what):
    if not holds:
        raise ValueError(what)


def crc32c(data, crc=0xFFFFFFFF):
    for bit in (byte >> i & 1 for byte in data for i in range(8)):
        crc = crc >> 1 ^ 0x82F63B78 * ((crc ^ bit) & 1)
    return crc ^ 0xFFFFFFFF


def record(run, number):
    body, _, crc = Path(run, "commits", f"{number:012d}").read_bytes().rpartition(b',"crc":"')
    expect(crc == b'%08x"}\n' % crc32c(body), f"record {number} is damaged")
    expect((found := json.loads(body + b"}"))["number"] == number, f"record {number} is another one")
    return found


def checked(path, digest):
    expect(hashlib.sha256(data := path.read_bytes()).hexdigest() == digest, f"{path} is damaged")
    return data


def read(run, number=1):
    while Path(run, "commits", f"{number + 1:012d}").exists():
        number += 1
    while (commit := record(run, number))["kind"] != "save":
        number = commit["parent"]
    expect((name := commit["folder"]).startswith("step-") and "/" not in name, "no checkpoint's folder")
    folder = Path(run if Path(run, "checkpoints", name).is_dir() else commit.get("place") or run, "checkpoints", name)
    manifest = json.loads(checked(folder / "manifest.json", commit["digest"]))
    expect(manifest["format"] == 1, f"format {manifest['format']} needs a later reader")
    arrays = {spec["name"]: np.empty(spec["shape"], spec["dtype"]) for spec in manifest["tensors"]}
    filled = {name: np.zeros(array.shape, np.uint8) for name, array in arrays.items()}
    for part in manifest["parts"]:
        image = checked(folder / f"part-{part['writer']}.safetensors", part["sha256"])
        for placed in json.loads(checked(folder / f"part-{part['writer']}.json", part["table_sha256"]))["boxes"]:
            name, box = placed["tensor"], tuple(slice(a, b) for a, b in placed["box"])
            raw = np.frombuffer(image, np.uint8, placed["bytes"], placed["offset"]).view(arrays[name].dtype)
            arrays[name][box] = raw.reshape([b - a for a, b in placed["box"]])
            filled[name][box] += 1
    expect(all((times == 1).all() for times in filled.values()), "boxes overlap, or some are missing")
    return arrays


if __name__ == "__main__":
    print("\n".join(f"{name} {array.dtype} {array.shape}" for name, array in read(sys.argv[1]).items()))
