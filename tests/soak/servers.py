"""Real object stores on loopback, started by the tests: SeaweedFS, moto, and rclone, which enforces nothing."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from packtrain.core.platform import LocalPlatform
from packtrain.core.stores import StoreConfig

BUCKET, LOCKED = "packs", "locked-packs"
ID, SECRET = "an-access-id", "a-secret-of-the-tests"
READY_S = 90.0


class Server(NamedTuple):
    kind: str
    endpoint: str
    process: subprocess.Popen[bytes]

    def config(self, prefix: str = "", bucket: str = BUCKET, **more: Any) -> StoreConfig:
        return StoreConfig(
            f"s3://{bucket}/{prefix}", endpoint=self.endpoint, region="us-east-1", key_id="env:TEST_STORE_ID",
            secret="env:TEST_STORE_SECRET", **more,
        )


def found(program: str) -> str | None:
    """Beside this interpreter, or on PATH."""
    return shutil.which(program, path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))


def free_ports(n: int) -> list[int]:
    """Ports below those the kernel hands out, so that nobody takes one before the server does."""
    sockets, ports = [], []
    start = 20000 + os.getpid() % 500 * 20
    for port in range(start, start + 2000):
        try:
            sockets.append(socket.create_server(("127.0.0.1", port)))
            ports.append(port)
        except OSError:
            continue
        if len(ports) == n:
            break
    for held in sockets:
        held.close()
    return ports


def _weed(folder: pathlib.Path, program: str) -> tuple[list[str], int]:
    names = ("master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "s3", "s3.grpc")
    ports = dict(zip(names, free_ports(len(names))))
    (folder / "data").mkdir(parents=True)
    identity = {"name": "tests", "credentials": [{"accessKey": ID, "secretKey": SECRET}], "actions": ["Admin"]}
    (folder / "identities.json").write_text(json.dumps({"identities": [identity]}))
    flags = [
        f"-{name}.port{'.grpc' if grpc else ''}={port}"
        for key, port in ports.items() for name, grpc in [(key.removesuffix(".grpc"), key.endswith(".grpc"))]
    ]
    return [
        program, "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-filer",
        f"-s3.config={folder / 'identities.json'}", "-volume.max=400", "-master.volumeSizeLimitMB=256",
        "-s3.port.iceberg=0", "-s3.port.lance=0", *flags,
    ], ports["s3"]


def _moto(folder: pathlib.Path, program: str) -> tuple[list[str], int]:
    (port,) = free_ports(1)
    folder.mkdir(parents=True)
    return [program, "-H", "127.0.0.1", "-p", str(port)], port


def _rclone(folder: pathlib.Path, program: str) -> tuple[list[str], int]:
    (port,) = free_ports(1)
    (folder / "data").mkdir(parents=True)
    return [
        program, "serve", "s3", str(folder / "data"), "--addr", f"127.0.0.1:{port}", "--auth-key", f"{ID},{SECRET}",
        "--config", str(folder / "none.conf"), "--vfs-cache-mode", "off",
    ], port


KINDS: dict[str, tuple[str, Callable[[pathlib.Path, str], tuple[list[str], int]]]] = {
    "seaweedfs": ("weed", _weed), "moto": ("moto_server", _moto), "rclone": ("rclone", _rclone),
}


@contextmanager
def running(kind: str, folder: pathlib.Path) -> Iterator[Server]:
    """One server with two empty buckets, the second with object lock where the server knows that."""
    program, command = KINDS[kind]
    path = found(program)
    assert path is not None
    argv, port = command(folder / kind, path)
    with open(folder / f"{kind}.log", "wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, cwd=folder, env={**os.environ, "HOME": str(folder)})
    server = Server(kind, f"http://127.0.0.1:{port}", process)
    try:
        _await_buckets(server, folder)
        yield server
    finally:
        process.kill()
        process.wait()


def client(server: Server) -> Any:
    import boto3

    return boto3.session.Session().client(
        "s3", endpoint_url=server.endpoint, region_name="us-east-1", aws_access_key_id=ID, aws_secret_access_key=SECRET
    )


def _await_buckets(server: Server, folder: pathlib.Path) -> None:
    """Ask for the buckets again and again, until the server answers."""
    from botocore.exceptions import BotoCoreError, ClientError

    platform = LocalPlatform()
    end_ns = platform.boot_ns() + int(READY_S * 1e9)
    while True:
        try:
            client(server).create_bucket(Bucket=BUCKET)
            break
        except (BotoCoreError, ClientError) as error:
            ended = server.process.poll() is not None or platform.boot_ns() > end_ns
            assert not ended, f"{error}\n{(folder / f'{server.kind}.log').read_text()[-3000:]}"
            platform.sleep(0.2)
    lock = {} if server.kind == "rclone" else {"ObjectLockEnabledForBucket": True}
    client(server).create_bucket(Bucket=LOCKED, **lock)
