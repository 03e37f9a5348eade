"""The peer of bench/recovery.py under torchft: two replica groups of one rank, each started again when it dies.

In:  a folder.      Out: steps<R>.csv of each replica in it, as examples/ddp.py writes them.
Run without RANK it is the launcher: a lighthouse, and a process for each replica, whose RANK is its number. A replica
that lives goes on with the next quorum; one that comes back gets the state from it.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

REPLICAS = 2
STEP_S = 0.02


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def launch(out: str) -> None:
    port = free_port()
    lighthouse = (
        str(Path(sys.executable).parent / "torchft_lighthouse"), "--min_replicas", "1", "--bind", f"127.0.0.1:{port}",
        "--join_timeout_ms", "1000", "--quorum_tick_ms", "50",
    )
    env = {**os.environ, "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
    children = [subprocess.Popen(lighthouse)]
    try:
        replicas = [replica(out, n, env) for n in range(REPLICAS)]
        children += replicas
        while True:
            for n, process in enumerate(replicas):
                if process.poll() is not None:
                    replicas[n] = replica(out, n, env)
                    children.append(replicas[n])
            pause(0.05)
    finally:
        for child in children:
            child.kill()


def pause(seconds: float) -> None:
    select.select([], [], [], seconds)


def replica(out: str, n: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, out], env={**env, "RANK": str(n)})


def train(out: str, rank: int) -> None:
    import torch
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(), min_replica_size=1, load_state_dict=load, rank=0, world_size=1, replica_id=f"r{rank}_",
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()}, hostname="127.0.0.1",
        store_addr="127.0.0.1", store_port=store.port,
    )
    parallel, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    while True:
        step = manager.current_step()
        torch.manual_seed(step * 1000 + rank)
        x = torch.randn(32, 64)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(parallel(x), torch.sin(x.sum(1, keepdim=True)))
        loss.backward()
        optimizer.step()
        pause(STEP_S)
        if manager.current_step() > step:
            with open(f"{out}/steps{rank}.csv", "a") as file:
                now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
                file.write(f"{step + 1},{now_s:.6f},{loss.item():.6f},{os.getpid()}\n")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(sys.argv[1], int(os.environ["RANK"]))
    else:
        launch(sys.argv[1])
