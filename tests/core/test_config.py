"""Strict configuration: what is wrong is named with the way out, and what is right survives the file."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.core.config import decode, difference, encode, override, read_section
from packtrain.core.errors import BadValue, Contradiction, PacktrainError, UnknownKey, UsageError
from packtrain.data.config import StoreUse
from packtrain.recipes.spec import RunSpec
from packtrain.train.config import ModelConfig, OptimConfig, TrainConfig

SPEC = RunSpec(recipe="first_light")


class Leaf(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    n: int = 0


class Tree(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One field of each shape that a room's config may use."""

    text: str = ""
    whole: int = 0
    real: float = 0.0
    flag: bool = False
    choice: Literal["one", "two", 3] = "one"
    perhaps: int | None = None
    either: int | str = 0
    texts: tuple[str, ...] = ()
    grid: tuple[tuple[int, ...], ...] = ()
    sizes: dict[str, int] = {}
    leaf: Leaf = Leaf(name="l")
    leaf_perhaps: Leaf | None = None
    leaves: tuple[Leaf, ...] = ()
    named: dict[str, Leaf] = {}


TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
LEAVES = st.builds(Leaf, name=TEXT, n=INT64)
TREES = st.builds(
    Tree, text=TEXT, whole=INT64, real=st.floats(allow_nan=False, allow_infinity=False), flag=st.booleans(),
    choice=st.sampled_from(["one", "two", 3]), perhaps=st.none() | INT64, either=INT64 | TEXT,
    texts=st.lists(TEXT, max_size=3).map(tuple),
    grid=st.lists(st.lists(INT64, max_size=2).map(tuple), max_size=2).map(tuple),
    sizes=st.dictionaries(TEXT, INT64, max_size=3), leaf=LEAVES, leaf_perhaps=st.none() | LEAVES,
    leaves=st.lists(LEAVES, max_size=3).map(tuple), named=st.dictionaries(TEXT, LEAVES, max_size=3),
)


# --- in and out --------------------------------------------------------------------------------------


@given(TREES)
def test_any_valid_struct_survives_the_file(tree: Tree) -> None:
    """decode(encode(x)) == x, whatever text, numbers and nesting it holds."""
    assert decode(encode(tree), Tree) == tree


@given(
    st.builds(
        RunSpec, recipe=TEXT, seed=INT64, overrides=st.lists(TEXT, max_size=2).map(tuple),
        model=st.builds(ModelConfig, vocab=st.integers(1, 99).map(lambda n: 128 * n), layers=st.integers(1, 64)),
        optim=st.builds(OptimConfig, learning_rate=st.floats(1e-9, 1.0), schedule=st.sampled_from(["wsd", "cosine"])),
        train=st.builds(TrainConfig, mesh=st.dictionaries(st.sampled_from(["fsdp", "tensor"]), st.integers(1, 512))),
    )
)
def test_a_run_spec_survives_the_file(spec: RunSpec) -> None:
    """What is written as spec/0001.toml is what the run resumes with."""
    assert decode(encode(spec), RunSpec) == spec


@pytest.mark.parametrize(
    "tree", [Tree(real=float("nan")), Tree(real=float("inf")), Tree(text="\udc80"), Tree(whole=1 << 63)]
)
def test_what_could_not_be_read_back_is_not_written(tree: Tree) -> None:
    """Not a number, infinity, text that is no UTF-8 and numbers beyond 64 bits are refused when writing too."""
    with pytest.raises(BadValue):
        encode(tree)


def test_a_whole_number_is_a_number() -> None:
    """`3` is accepted where a float is wanted, and becomes one."""
    tree = decode(b"real = 3", Tree)
    assert tree.real == 3.0 and isinstance(tree.real, float)


def test_a_section_is_read_alone_and_strictly() -> None:
    """A room reads its own section with full key names in errors, and does not judge the others."""
    data = b"[model]\nlayers = 7\n[nobody]\nx = 1"
    assert read_section(data, "model", ModelConfig).layers == 7
    assert read_section(data, "optim", OptimConfig) == OptimConfig()
    with pytest.raises(UnknownKey) as caught:
        read_section(b"[model]\nlayrs = 7", "model", ModelConfig, "spec/0001.toml")
    assert caught.value.where == "spec/0001.toml: model.layrs" and "did you mean model.layers?" in caught.value.fix
    with pytest.raises(Contradiction) as other:
        read_section(b"[model]\nvocab = 5", "model", ModelConfig, "spec/0001.toml")
    assert other.value.where == "spec/0001.toml: model.vocab"


# --- errors, as a person sees them -------------------------------------------------------------------

MODEL_KEYS = (
    "vocab, layers, embed, heads, kv_heads, head, mlp, rope_theta, norm_epsilon, qk_norm, tied, window, logit_softcap"
)
IN_FILE = {
    "unknown key, near a right one": (
        "[model]\nlayrs = 3",
        "[config.unknown_key] no key is called model.layrs\n"
        "  where: a.toml: model.layrs\n"
        f"  next:  did you mean model.layers? allowed in model: {MODEL_KEYS}",
    ),
    "unknown key, near nothing": (
        "[model]\nzzz = 3",
        "[config.unknown_key] no key is called model.zzz\n"
        "  where: a.toml: model.zzz\n"
        f"  next:  allowed in model: {MODEL_KEYS}",
    ),
    "unknown key inside a list": (
        "[[data.stores]]\npath = 'a'\nwieght = 1",
        "[config.unknown_key] no key is called data.stores.0.wieght\n"
        "  where: a.toml: data.stores.0.wieght\n"
        "  next:  did you mean data.stores.0.weight? allowed in data.stores.0: path, weight",
    ),
    "text for a number": (
        "[model]\nlayers = 'x'",
        '[config.bad_value] model.layers is "x"; allowed: a whole number\n'
        "  where: a.toml: model.layers\n"
        "  next:  for example model.layers = 8",
    ),
    "a choice, misspelt": (
        "[optim]\nschedule = 'cosin'",
        '[config.bad_value] optim.schedule is "cosin"; allowed: "constant", "cosine", "wsd"\n'
        "  where: a.toml: optim.schedule\n"
        '  next:  did you mean "cosine"?',
    ),
    "a choice, of nothing": (
        "[optim]\nschedule = 7",
        '[config.bad_value] optim.schedule is 7; allowed: "constant", "cosine", "wsd"\n'
        "  where: a.toml: optim.schedule\n"
        '  next:  for example optim.schedule = "constant"',
    ),
    "not a number": (
        "[optim]\nbeta1 = nan",
        "[config.bad_value] optim.beta1 is nan; allowed: a finite number\n"
        "  where: a.toml: optim.beta1\n"
        "  next:  for example optim.beta1 = 0.5",
    ),
    "a contradiction": (
        "[model]\nvocab = 500",
        "[config.contradiction] vocab 500 is not a multiple of 128\n"
        "  where: a.toml: model.vocab\n"
        "  next:  set model.vocab=512",
    ),
    "a value for a table": (
        "model = 3",
        "[config.bad_value] model is 3; allowed: a table\n"
        "  where: a.toml: model\n"
        "  next:  for example model = {...}",
    ),
    "a missing path": (
        "[[data.stores]]\nweight = 1",
        "[config.bad_value] data.stores.0.path is missing; it has no default\n"
        "  where: a.toml: data.stores.0.path\n"
        '  next:  add it, for example data.stores.0.path = "text"',
    ),
    "not TOML": (
        "[model]\nlayers =",
        "[config.bad_value] this is not TOML: Invalid value (at end of document)\n"
        "  where: a.toml\n"
        "  next:  see toml.io for the form of a value",
    ),
}


@pytest.mark.parametrize("case", IN_FILE)
def test_an_error_in_a_file_names_key_file_and_way_out(case: str) -> None:
    """Each mistake in a file is one message: what, where, next."""
    text, expected = IN_FILE[case]
    with pytest.raises(PacktrainError) as caught:
        decode(f"recipe = 'r'\n{text}".encode(), RunSpec, "a.toml")
    assert caught.value.render() == expected and caught.value.exit_code == 78


SECTIONS = "recipe, overrides, chosen, seed, model, optim, guard, train, data, checkpoint, supervise"
ON_COMMAND_LINE = {
    "layers=3": (
        "[config.unknown_key] no key is called layers\n"
        "  where: --set: layers\n"
        f"  next:  did you mean model.layers? allowed here: {SECTIONS}"
    ),
    "model.layers=3.5": (
        "[config.bad_value] model.layers is 3.5; allowed: a whole number\n"
        "  where: --set: model.layers\n"
        "  next:  for example --set model.layers=8"
    ),
    "model.layers.x=3": (
        "[config.unknown_key] model.layers is a whole number; it has no key x\n"
        "  where: --set: model.layers.x\n"
        "  next:  set it whole: --set model.layers=8"
    ),
    "data.held_out=a,b": (
        '[config.bad_value] data.held_out is "a,b"; allowed: a list, each entry text\n'
        "  where: --set: data.held_out\n"
        '  next:  for example --set data.held_out=["text"]'
    ),
    "data.stores.2.weight=1": (
        "[config.bad_value] data.stores has 0 entries; 2 is none of them\n"
        "  where: --set: data.stores.2\n"
        "  next:  use 0 to append"
    ),
    "train.mesh.fspd=8": (
        "[config.contradiction] no mesh axis is called 'fspd'\n"
        "  where: --set: train.mesh\n"
        "  next:  use one of replica, fsdp, tensor, context, expert, stage"
    ),
}


@pytest.mark.parametrize("setting", ON_COMMAND_LINE)
def test_an_error_on_the_command_line_shows_the_right_command(setting: str) -> None:
    """Each mistake in --set is one message whose way out can be typed."""
    with pytest.raises(PacktrainError) as caught:
        override(SPEC, [setting])
    assert caught.value.render() == ON_COMMAND_LINE[setting]


@pytest.mark.parametrize("setting", ["model.layers", "=3", "model..layers=3", "", "recipe=\udc80"])
def test_what_is_not_key_value_is_a_usage_error(setting: str) -> None:
    """The command line itself is wrong: exit code 2, with an example."""
    with pytest.raises(UsageError, match="is not key=value") as caught:
        override(SPEC, [setting])
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (b"flag = 1", "flag"), (b"flag = 'true'", "flag"), (b"whole = true", "whole"), (b"whole = 1.0", "whole"),
        (b"whole = 9223372036854775808", "whole"), (b"real = inf", "real"), (b"real = '1'", "real"),
        (b"text = 5", "text"), (b"text = 2024-01-01", "text"), (b"choice = true", "choice"),
        (b"choice = 3.0", "choice"), (b"perhaps = 'x'", "perhaps"), (b"either = 1.5", "either"),
        (b"texts = 'a'", "texts"), (b"texts = ['a', 1]", "texts.1"),
        (b"grid = [[1], [2, 'x']]", "grid.1.1"), (b"sizes = []", "sizes"),
        (b"sizes = {a = 'b'}", "sizes.a"), (b"sizes = {'a b' = 'c'}", 'sizes."a b"'), (b"leaf = {n = 1}", "leaf.name"),
        (b"leaf_perhaps = {}", "leaf_perhaps.name"), (b"leaves = {}", "leaves"), (b"leaves = [1]", "leaves.0"),
        (b"[named.a]\nname = 1", "named.a.name"), (b"leaf = {name = 'x', nam = 1}", "leaf.nam"),
    ],
)
def test_every_shape_of_value_is_checked_and_its_key_is_named(text: bytes, key: str) -> None:
    """Nothing is converted in silence, and the full dotted key is where the error is."""
    with pytest.raises((BadValue, UnknownKey)) as caught:
        decode(text, Tree, "a.toml")
    assert caught.value.where == f"a.toml: {key}"
    assert any(ours in caught.value.what for ours in (f"{key} is", f"called {key}")), "said by us, not by the decoder"


@pytest.mark.parametrize("data", [b"\xff", b"a = [" + b"[" * 5000, b"a = 1\na = 2", b"\x00"])
def test_what_is_no_toml_is_one_clear_error(data: bytes) -> None:
    """Any bytes at all end in a message about the file, never in a traceback."""
    with pytest.raises(BadValue, match="this is not TOML") as caught:
        decode(data, Tree, "a.toml")
    assert caught.value.where == "a.toml"


def test_an_error_never_repeats_a_long_or_hostile_value() -> None:
    """What a file says is shown cut short and with control characters escaped."""
    with pytest.raises(BadValue) as caught:
        decode(b'whole = "\\u001b[31m' + b"x" * 5000 + b'"', Tree)
    assert len(caught.value.what) < 200 and "\x1b" not in caught.value.what


# --- --set -------------------------------------------------------------------------------------------


def set_tree(*settings: str) -> Any:
    return override(Tree(), list(settings))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["whole=12"], Tree(whole=12)),
        (["real=3"], Tree(real=3.0)),
        (["real=1e-3"], Tree(real=1e-3)),
        (["flag=true"], Tree(flag=True)),
        (["text=plain words"], Tree(text="plain words")),
        (["text=12"], Tree(text="12")),
        (["text=true"], Tree(text="true")),
        (["text=2024-01-01"], Tree(text="2024-01-01")),
        (["text="], Tree(text="")),
        (['text="12"'], Tree(text="12")),
        (["text=a=b"], Tree(text="a=b")),
        (['text="a"\nwhole = 3'], Tree(text='"a"\nwhole = 3')),
        ([" text = x "], Tree(text="x")),
        (["choice=two"], Tree(choice="two")),
        (["choice=3"], Tree(choice=3)),
        (["either=5"], Tree(either=5)),
        (["either=five"], Tree(either="five")),
        (["perhaps=5"], Tree(perhaps=5)),
        (['texts=["a", "b"]'], Tree(texts=("a", "b"))),
        (["texts.0=a", "texts.1=b", "texts.0=c"], Tree(texts=("c", "b"))),
        (["grid.0.0=5"], Tree(grid=((5,),))),
        (["sizes.fsdp=8"], Tree(sizes={"fsdp": 8})),
        (["sizes={fsdp=8}", "sizes.tensor=2"], Tree(sizes={"fsdp": 8, "tensor": 2})),
        (["sizes.fsdp=8", "sizes={tensor=2}"], Tree(sizes={"tensor": 2})),
        (["leaf.n=4"], Tree(leaf=Leaf(name="l", n=4))),
        (["leaf_perhaps.name=x"], Tree(leaf_perhaps=Leaf(name="x"))),
        (["leaves.0.n=2", "leaves.0.name=x"], Tree(leaves=(Leaf(name="x", n=2),))),
        (["named.a.name=x"], Tree(named={"a": Leaf(name="x")})),
        (["whole=1", "whole=2"], Tree(whole=2)),
        ([], Tree()),
    ],
)
def test_a_setting_reaches_every_shape(settings: list[str], expected: Tree) -> None:
    """--set parses TOML, takes bare text where text is wanted, and reaches into tables and lists."""
    assert set_tree(*settings) == expected


def test_settings_change_entries_that_are_there() -> None:
    """A list entry keeps what is not set."""
    spec = msgspec.structs.replace(
        SPEC, data=msgspec.structs.replace(SPEC.data, stores=(StoreUse(path="a"), StoreUse(path="b")))
    )
    changed = override(spec, ["data.stores.1.weight=2"])
    assert changed.data.stores == (StoreUse(path="a"), StoreUse(path="b", weight=2.0))
    assert spec.data.stores[1].weight == 1.0, "the struct handed in is not touched"


def test_contradictions_are_judged_after_the_last_setting() -> None:
    """Two settings that only agree together can be given in any order."""
    assert override(SPEC, ["model.heads=6", "model.kv_heads=3"]).model.kv_heads == 3
    with pytest.raises(Contradiction) as caught:
        override(SPEC, ["model.heads=6"])
    assert caught.value.where == "--set: model.kv_heads"


# --- difference --------------------------------------------------------------------------------------


def test_difference_names_every_value_that_differs() -> None:
    """One line a value, through sections, tables and lists, in the order of the struct."""
    old = override(SPEC, ["train.mesh={fsdp=4, tensor=2}", "data.stores.0.path=a", "data.held_out=['h', 'i']"])
    new = override(old, ["model.layers=12", "optim.schedule=cosine", "train.mesh={fsdp=8}", "data.stores.0.weight=2"])
    assert difference(old, override(new, ["data.stores.1.path=b", "data.held_out=['h']"])) == [
        "model.layers: 4 -> 12",
        'optim.schedule: "wsd" -> "cosine"',
        "train.mesh.fsdp: 4 -> 8",
        "train.mesh.tensor: 2 -> (absent)",
        "data.stores.0.weight: 1.0 -> 2.0",
        'data.stores.1: (absent) -> {"path": "b", "weight": 1.0}',
        'data.held_out.1: "i" -> (absent)',
    ]


@given(TREES, TREES)
def test_difference_is_empty_exactly_between_equals(one: Tree, two: Tree) -> None:
    """No difference is invented and none is missed."""
    assert difference(one, one) == []
    assert (difference(one, two) == []) == (one == two)


def test_difference_runs_both_ways() -> None:
    """What only one side has is absent on the other."""
    more = override(SPEC, ["train.mesh.fsdp=8"])
    assert difference(SPEC, more) == ["train.mesh.fsdp: (absent) -> 8"]
    assert difference(more, SPEC) == ["train.mesh.fsdp: 8 -> (absent)"]


def test_true_is_not_one() -> None:
    """A flag and a number differ even where Python calls them equal."""
    assert difference({"a": True}, {"a": 1}) == ["a: true -> 1"]
