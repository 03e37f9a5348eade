"""first-light: a small decoder that learns real source text in minutes on two CPU cores.

Command:  packtrain first-light            (builds its store, chooses the number of steps, trains, reports)
          packtrain train first-light --data DIR      (the same model on your own text)
Hardware: 2 CPU cores, 4 GB of memory.
Time:     about 5 minutes of training; 6 at most.
Expect:   1.38 held-out bits per byte on Python 3.11's own sources (docs/PERFORMANCE.md); xz -9e takes 2.00 file
          by file and 1.60 as one stream.
"""

from __future__ import annotations

from packtrain.checkpoint.config import CheckpointConfig
from packtrain.data.config import DataConfig
from packtrain.recipes.spec import RunSpec
from packtrain.train.config import ModelConfig, OptimConfig, TrainConfig

MINUTES_MAX = 6.0
VOCAB = 4096


def first_light(vocab: int = VOCAB) -> RunSpec:
    """The complete configuration; `packtrain first-light` only adds the store and the number of steps."""
    return RunSpec(
        recipe="first-light",
        model=ModelConfig(vocab=vocab, layers=4, embed=256, heads=4, kv_heads=2, head=64, mlp=704),
        optim=OptimConfig(name="muon", learning_rate=0.012, warmup_steps=40, schedule="wsd", decay_fraction=0.5),
        # Four rows and 256 tokens of the loss at a time: what is in use fits the caches (docs/PERFORMANCE.md).
        train=TrainConfig(
            steps=1000, microbatches=2, loss_tokens=256, unroll=True, minutes_max=MINUTES_MAX, eval_every_steps=250,
            sample_prompts=("def ", "class ", "import "), sample_tokens=96,
        ),
        data=DataConfig(batch_rows=8, length=256),
        checkpoint=CheckpointConfig(every_s=60.0),
    )
