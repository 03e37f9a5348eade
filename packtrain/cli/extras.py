"""Which optional parts are installed, found without importing any of them."""

from __future__ import annotations

from importlib.util import find_spec

from packtrain.core.errors import MissingExtra

EXTRAS = {
    "data": ("tokenizers", "pyarrow", "zstandard"),
    "train": ("jax", "jaxlib", "optax"),
    "web": ("starlette", "uvicorn", "plotly"),
    "plan": ("scipy",),
}


def missing(extra: str) -> list[str]:
    """Modules of an extra that cannot be found; those of `data` belong to `train` too."""
    modules = EXTRAS["data"] + EXTRAS["train"] if extra == "train" else EXTRAS[extra]
    return [module for module in modules if find_spec(module) is None]


def require(extra: str) -> None:
    """Raises MissingExtra naming what to install."""
    absent = missing(extra)
    if absent:
        raise MissingExtra(
            f"this needs the extra {extra!r}, of which {', '.join(absent)} cannot be found",
            where="this Python environment", fix=f"pip install 'packtrain[{extra}]'",
        )
