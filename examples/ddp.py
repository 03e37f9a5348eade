"""An ordinary DDP script: written for torchrun, knows nothing of Packtrain, resumes from a checkpoint of its own.

    torchrun --nproc-per-node 2 --max-restarts 3 ddp.py OUT --steps 200
    packtrain run --procs-per-node 2 -- python ddp.py OUT --steps 200

Writes OUT/state.pt every few steps, and a line `step,seconds since boot,loss,pid` for each step to OUT/steps.csv. Every
batch follows from step and rank, so a run that was interrupted ends with the same bits as one that was not; their hash
is the last line it prints.
"""

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--step-s", type=float, default=0.0, help="sleep so long in each step, as if it were larger")
    return parser.parse_args()


def batch(step, rank):
    torch.manual_seed(step * 1000 + rank)
    x = torch.randn(32, 64)
    return x, torch.sin(x.sum(1, keepdim=True))


def save(path, step, model, optimizer):
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, f"{path}.new")
    os.replace(f"{path}.new", path)


def main(after_step=lambda step, save_now: None):
    """`after_step`: called by every rank at the end of each step, for whoever wants to know (see ddp_beats.py)."""
    args = arguments()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    path, step = args.out / "state.pt", 0
    if path.exists():
        state = torch.load(path)
        step = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    print(f"rank {rank} of {dist.get_world_size()} starts at step {step}", flush=True)
    parallel = DistributedDataParallel(model)

    def save_now():
        if rank == 0:
            save(path, step, model, optimizer)
        dist.barrier()

    while step < args.steps:
        x, y = batch(step, rank)
        loss = torch.nn.functional.mse_loss(parallel(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(args.step_s)
        step += 1
        if rank == 0:
            with open(args.out / "steps.csv", "a") as file:
                file.write(f"{step},{time.clock_gettime(time.CLOCK_BOOTTIME):.6f},{loss.item():.6f},{os.getpid()}\n")
        if step % args.save_every == 0:
            save_now()
        after_step(step, save_now)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(f"rank {rank} done: {hashlib.sha256(weights).hexdigest()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
