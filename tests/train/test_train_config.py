"""Numbers that cannot train are refused when the configuration is made, by name."""

from __future__ import annotations

import pytest

from packtrain.core.errors import Contradiction
from packtrain.train.config import GuardConfig, ModelConfig, OptimConfig, TrainConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [("learning_rate", -1.0), ("beta1", 1.0), ("beta2", 2.0), ("decay_fraction", 5.0), ("final_fraction", -3.0),
     ("epsilon", 0.0), ("weight_decay", -0.1), ("clip_norm", -1.0), ("warmup_steps", -1)],
)
def test_rates_out_of_range_are_refused(name: str, value: float) -> None:
    """The message names the key, the value and what is allowed."""
    with pytest.raises(Contradiction, match=f"{name} is .* outside") as refused:
        OptimConfig(**{name: value})
    assert refused.value.where == f"optim.{name}" and f"optim.{name}=" in refused.value.fix


def test_a_size_below_one_is_refused_by_name() -> None:
    """The first size that is none is named, with its value."""
    with pytest.raises(Contradiction, match="layers is -1") as refused:
        ModelConfig(layers=-1, heads=0)
    assert refused.value.where == "model.layers" and "model.layers=" in refused.value.fix


@pytest.mark.parametrize("name", ["eval_every_steps", "eval_rows_max", "sample_tokens", "sample_temperature"])
def test_counts_below_zero_are_refused(name: str) -> None:
    """Evaluations and samples cannot be fewer than none."""
    with pytest.raises(Contradiction, match="at least 0"):
        TrainConfig(**{name: -1})


@pytest.mark.parametrize("change", [{"spike_sigmas": -1.0}, {"warmup_updates": -1}, {"skips_in_a_row_max": 0}])
def test_a_guard_without_bounds_is_refused(change: dict[str, float]) -> None:
    """A guard that skips for ever, or judges by a negative deviation, is refused."""
    with pytest.raises(Contradiction, match="at least"):
        GuardConfig(**change)
