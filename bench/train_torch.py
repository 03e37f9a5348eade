"""The peer of bench/train.py: the same model in torch, eager and compiled. Run by it, in an interpreter with torch.

In:  the sizes as JSON, then `eager` or `compile`, as arguments; a number of steps on each line of standard input.
Out: a line of JSON for each: {"seconds": [...], "processor": [...], "loss": ...}; before them one about itself:
version, parameters, peak.
Fused AdamW, scaled_dot_product_attention and cross_entropy: what torch is fastest with.
B rows, L length, D embed, H heads, K head, M mlp, V vocab.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F

Sizes = dict[str, int]


class Block(torch.nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        D, H, K, M = (sizes[name] for name in ("embed", "heads", "head", "mlp"))
        self.head = K
        self.attention_norm, self.mlp_norm = (torch.nn.RMSNorm(D, eps=1e-6) for _ in range(2))
        self.q, self.k, self.v = (torch.nn.Linear(D, H * K, bias=False) for _ in range(3))
        self.out = torch.nn.Linear(H * K, D, bias=False)
        self.gate, self.up = (torch.nn.Linear(D, M, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(M, D, bias=False)

    def forward(self, x_BLD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        normed_BLD = self.attention_norm(x_BLD)
        q, k, v = (self._heads(project(normed_BLD)) for project in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x_BLD = x_BLD + self.out(y.transpose(1, 2).flatten(2))
        normed_BLD = self.mlp_norm(x_BLD)
        return x_BLD + self.down(F.silu(self.gate(normed_BLD)) * self.up(normed_BLD))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[B, L, H K] -> [B, H, L, K]"""
        return x.unflatten(-1, (-1, self.head)).transpose(1, 2)


def rotate(x_BHLK: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x_BHLK.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Decoder(torch.nn.Module):
    """Returns the mean loss. Input and output embedding are one table."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(sizes["vocab"], sizes["embed"])
        torch.nn.init.normal_(self.embedding.weight, std=sizes["embed"] ** -0.5)
        self.blocks = torch.nn.ModuleList(Block(sizes) for _ in range(sizes["layers"]))
        self.norm = torch.nn.RMSNorm(sizes["embed"], eps=1e-6)
        K = sizes["head"]
        angles = torch.outer(torch.arange(sizes["length"]), 10_000.0 ** (-torch.arange(0, K, 2) / K))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens_BL: torch.Tensor, targets_BL: torch.Tensor) -> torch.Tensor:
        x_BLD = self.embedding(tokens_BL)
        for block in self.blocks:
            x_BLD = block(x_BLD, self.cos, self.sin)
        logits_BLV = F.linear(self.norm(x_BLD), self.embedding.weight)
        return F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten())


class Trainer:
    def __init__(self, sizes: Sizes, mode: str) -> None:
        torch.manual_seed(0)
        self.parts = sizes["parts"]
        self.model = Decoder(sizes)
        self.loss_of: Any = torch.compile(self.model) if mode == "compile" else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=True)
        text = torch.randint(0, sizes["vocab"], (sizes["rows"], sizes["length"] + 1))
        self.tokens, self.targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def step(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for tokens, targets in zip(self.tokens.chunk(self.parts), self.targets.chunk(self.parts)):
            loss = self.loss_of(tokens, targets) / self.parts
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return total


def peak_flops_per_s(size: int, tries: int = 5) -> float:
    """Best of a few square matmuls."""
    x, best_s = torch.full((size, size), 1 / size), float("inf")
    for _ in range(tries):
        begun_s = time.perf_counter()
        torch.mm(x, x)
        best_s = min(best_s, time.perf_counter() - begun_s)
    return 2 * size**3 / best_s


def main(sizes: Sizes, mode: str) -> None:
    trainer = Trainer(sizes, mode)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    about = {"version": f"torch {torch.__version__}", "parameters": parameters}
    print(json.dumps(about | {"peak": peak_flops_per_s(sizes["peak_size"])}), flush=True)
    for line in sys.stdin:
        seconds, processor, loss = [], [], 0.0
        for _ in range(int(line)):
            begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
            loss = trainer.step()
            seconds.append(time.perf_counter() - begun_s)
            processor.append(time.process_time() - begun_cpu_s)
        print(json.dumps({"seconds": seconds, "processor": processor, "loss": loss}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
