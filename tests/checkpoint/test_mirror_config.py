"""Mirrors as a spec names them."""

from __future__ import annotations

import pytest

from packtrain.checkpoint.config import CheckpointConfig, Mirror
from packtrain.core.config import decode, encode, override
from packtrain.core.errors import BadValue, Contradiction

TWO = CheckpointConfig(mirrors=(
    Mirror(name="disk2", place="/mnt/two", every_s=600.0, bytes_per_s_max=1e8, deadline_s=60.0),
    Mirror(
        name="b2", place="s3://bucket/runs/small", lock_days=30, endpoint="https://s3.example.com", region="eu-1",
        key_id="env:B2_KEY", secret="file:/run/secrets/b2",
    ),
))


def test_a_spec_with_mirrors_survives_toml():
    """What is written as `[[checkpoint.mirrors]]` is read back equal, and a spec from before mirrors has none."""
    assert decode(encode(TWO), CheckpointConfig) == TWO
    assert b"[[mirrors]]" in encode(TWO)
    assert decode(b"keep_last = 2\n", CheckpointConfig).mirrors == ()


def test_mirrors_can_be_set_one_value_at_a_time():
    """The index after the last appends one, and what has no default must then be given."""
    settings = ["mirrors.0.name=b2", "mirrors.0.place=s3://bucket/x", "mirrors.0.every_s=0"]
    assert override(CheckpointConfig(), settings).mirrors == (Mirror(name="b2", place="s3://bucket/x", every_s=0),)
    assert override(TWO, ["mirrors.1.lock_days=0"]).mirrors[1].lock_days == 0
    with pytest.raises(BadValue, match=r"mirrors\.0\.place is missing"):
        override(CheckpointConfig(), settings[:1])


@pytest.mark.parametrize(
    "bad",
    [
        {"name": "B2"}, {"name": "a/b"}, {"place": "relative"}, {"place": "ftp://host"}, {"place": "s3://"},
        {"every_s": -1.0}, {"bytes_per_s_max": -1.0}, {"deadline_s": 0.0}, {"deadline_s": 1e9}, {"lock_days": -1},
        {"secret": "hunter2"}, {"key_id": "env:"},
    ],
)
def test_a_mirror_that_cannot_work_is_refused(bad):
    """Names, places, times and secrets that make no sense fail where they are written, and no secret is repeated."""
    with pytest.raises(Contradiction) as caught:
        Mirror(**{"name": "b2", "place": "s3://bucket", **bad})
    assert "hunter2" not in caught.value.render()


def test_two_mirrors_share_neither_name_nor_place():
    """One place written in two ways is one place."""
    disk, b2 = TWO.mirrors
    for other in (
        Mirror(name="disk2", place="s3://else"), Mirror(name="d", place="/mnt/two/"), Mirror(name="d", place="file:///mnt/two"),
    ):
        with pytest.raises(Contradiction, match="one name, or one place"):
            CheckpointConfig(mirrors=(disk, b2, other))
    with pytest.raises(Contradiction, match="16 mirrors at most"):
        CheckpointConfig(mirrors=tuple(Mirror(name=f"m{n}", place=f"/mnt/{n}") for n in range(17)))
