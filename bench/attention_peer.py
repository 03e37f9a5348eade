"""One contender of bench/attention.py, as a process: torch, tokamax or JAX's own attention. Imports nothing of ours.

In:  its kind as argument; on each line of its input a mask and a length as JSON.
Out: a line of JSON about itself, then for each line seconds of one run, after the first of its shape, by the clock and
of all cores together; or why not.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

HEADS, HEAD = 8, 64
DOCUMENTS = (4, 3, 3, 3, 3)
"""Of `quarter`, in sixteenths of the row: causal inside, a quarter of causal's pairs of 512 queries by 256 keys at
8,192."""


def intervals(mask: str, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Key intervals [start, end), i32 [length] each."""
    at = np.arange(length, dtype=np.int32)
    if mask == "encoder":
        return 0 * at, 0 * at + length
    if mask == "prefix":
        return 0 * at, np.maximum(at + 1, length // 2)
    if mask == "quarter":
        firsts = np.cumsum([0, *DOCUMENTS]) * length // 16
        return firsts[np.searchsorted(firsts, at, "right") - 1].astype(np.int32), at + 1
    return at // (length // 4) * (length // 4) if mask == "packed" else 0 * at, at + 1


def operands(length: int) -> list[np.ndarray]:
    """q, k, v and a gradient of the result: f32 [1, length, HEADS, HEAD]."""
    draw = np.random.default_rng(0)
    return [draw.standard_normal((1, length, HEADS, HEAD), np.float32) for _ in range(4)]


Run = Callable[[], None]


def in_jax(attention: Callable[..., Any], mask: str, length: int) -> Run:
    """Value and gradients of `attention(q, k, v, starts, ends)`, compiled."""
    import jax

    starts, ends = (jax.numpy.asarray(x)[None] for x in intervals(mask, length))

    @jax.jit
    def both(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, starts, ends), q, k, v)
        return out, pull(d_out)

    given = [jax.numpy.asarray(x) for x in operands(length)]
    return lambda: jax.block_until_ready(both(*given))


def seen(starts: Any, ends: Any, at: Any) -> Any:
    """The dense mask [..., length, length]."""
    return (at >= starts[..., None]) & (at < ends[..., None])


def jax_nn(mask: str, length: int) -> Run:
    import jax

    at = jax.numpy.arange(length)

    def attention(q: Any, k: Any, v: Any, starts: Any, ends: Any) -> Any:
        if mask == "causal":
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return jax.nn.dot_product_attention(q, k, v, mask=seen(starts, ends, at)[:, None])

    return in_jax(attention, mask, length)


def tokamax(mask: str, length: int) -> Run:
    """What tokamax chooses on CPU, with key intervals where its implementation takes them."""
    from tokamax._src.ops.attention import api, base

    def attention(q: Any, k: Any, v: Any, starts: Any, ends: Any) -> Any:
        return api.IMPLEMENTATIONS["xla"](q, k, v, mask=base.Mask(k_start=starts[:, None], k_end=ends[:, None]))

    return in_jax(attention, mask, length)


def torch_sdpa(mask: str, length: int) -> Run:
    import torch

    q, k, v, d_out = (torch.from_numpy(x).transpose(1, 2).contiguous() for x in operands(length))
    given = [x.requires_grad_() for x in (q, k, v)]
    dense = torch.from_numpy(seen(*intervals(mask, length), np.arange(length)))[None, None]
    how = {"is_causal": True} if mask == "causal" else {} if mask == "encoder" else {"attn_mask": dense}

    def run() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(*given, **how)
        torch.autograd.grad(out, given, d_out)

    return run


@functools.cache
def flex_compiled() -> Any:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def torch_flex(mask: str, length: int) -> Run:
    """FlexAttention, forward only: it has no backward on CPU."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v, _ = (torch.from_numpy(x).transpose(1, 2).contiguous() for x in operands(length))
    starts, ends = (torch.from_numpy(x) for x in intervals(mask, length))
    blocks = create_block_mask(
        lambda b, h, i, j: (j >= starts[i]) & (j < ends[i]), None, None, length, length, device="cpu"
    )

    def run() -> None:
        with torch.no_grad():
            flex_compiled()(q, k, v, block_mask=blocks)

    return run


KINDS = {"jax.nn": jax_nn, "tokamax": tokamax, "torch SDPA": torch_sdpa, "torch Flex": torch_flex}


def about(kind: str) -> str:
    """Name and version of the library."""
    module = __import__(kind.split()[0].split(".")[0])
    return f"{module.__name__} {getattr(module, '__version__', '')}"


def serve(prepare: Callable[[str, int], Run], version: str) -> None:
    """Answers each line of the input; a shape is prepared and run once before it is timed."""
    print(json.dumps({"version": version}), flush=True)
    ready: dict[str, Run] = {}
    for line in sys.stdin:
        try:
            if line not in ready:
                ready[line] = prepare(**json.loads(line))
                ready[line]()
            begun_s, busy_s = time.perf_counter(), time.process_time()
            ready[line]()
            taken = {"seconds": time.perf_counter() - begun_s, "busy_s": time.process_time() - busy_s}
            print(json.dumps(taken), flush=True)
        except Exception as error:
            print(json.dumps({"failed": f"{type(error).__name__}: {error}"[:200]}), flush=True)


if __name__ == "__main__":
    serve(KINDS[sys.argv[1]], about(sys.argv[1]))
