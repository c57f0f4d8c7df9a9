"""build.py: a value either has its declared type or is refused with its key (FAULTS D07)."""

from dataclasses import dataclass, field

import pytest
import yaml

from dstrain.config.build import all_keys, build, key_type, plain_of
from dstrain.config.errors import InputError
from dstrain.config.schema import ImportConfig, Segment, TrainConfig


@dataclass
class Inner:
    rate: float
    size: int = 4


@dataclass
class Outer:
    name: str
    inner: Inner
    rate: float = 1.0
    count: int = 2
    on: bool = False
    note: str | None = None
    limit: int | None = None
    weights: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    ramp: Inner | None = None


def made(**values) -> Outer:
    return build(Outer, {"name": "n", "inner": {"rate": 1.0}, **values})


def refusal(**values) -> str:
    with pytest.raises(InputError) as caught:
        made(**values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# The three spellings of FAULTS D07, read by a YAML 1.1 reader, which takes 1e-4 and 3e4 for text.
@pytest.mark.parametrize(("text", "right"), [("1e-4", 1e-4), ("3e4", 3e4), ('"1e-4"', 1e-4), ("7", 7.0)])
def test_float_key_takes_every_spelling_of_a_number(text, right):
    rate = made(rate=yaml.safe_load(text)).rate
    assert rate == right and type(rate) is float


@pytest.mark.parametrize("value", [30000, 3e4, "3e4", "30000"])
def test_integer_key_takes_a_number_without_fraction(value):
    count = made(count=value).count
    assert count == 30000 and type(count) is int


def test_integer_beyond_float_precision_stays_exact():
    assert made(count=2**60 + 1).count == 2**60 + 1


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("count", 2.5, "count: integer expected, got 2.5"),
        ("count", True, "count: integer expected, got true"),
        ("count", None, "count: integer expected, got null"),
        ("count", [1], "count: integer expected, got [1]"),
        ("rate", "fast", "rate: number expected, got 'fast'"),
        ("rate", False, "rate: number expected, got false"),
        ("rate", float("nan"), "rate: number expected, got nan"),
        ("rate", "inf", "rate: number expected, got 'inf'"),
        ("on", 1, "on: true or false expected, got 1"),
        ("on", "true", "on: true or false expected, got 'true'"),
        ("limit", "many", "limit: integer or null expected, got 'many'"),
        ("weights", 0.5, "weights: list of number expected, got 0.5"),
        ("weights", [0.5, "x"], "weights.1: number expected, got 'x'"),
        ("inner", 3, "inner: a group of keys is expected, got 3"),
        ("inner", {"rate": "x"}, "inner.rate: number expected, got 'x'"),
        ("name", None, "name: text expected, got null"),
    ],
)
def test_value_of_another_type_is_refused_with_key_value_and_type(key, value, expected):
    assert refusal(**{key: value}) == expected


@pytest.mark.parametrize("value", [100000.0, 7, True])
@pytest.mark.parametrize("key", ["name", "note"])
def test_text_key_given_a_number_asks_for_quotes(key, value):
    """YAML has turned an id like 1e5 into 100000.0 before anyone can look at it."""
    message = refusal(**{key: value})
    assert message.startswith(f"{key}: text expected") and "quotes" in message


def test_null_where_null_is_declared():
    config = made(note=None, limit=None, ramp=None)
    assert (config.note, config.limit, config.ramp) == (None, None, None)


def test_nested_groups_and_lists_of_groups_become_dataclasses():
    segments = [{"until": "2%", "value": "1e-4"}, {"until": 3, "value": 1, "shape": "linear"}]
    config = made(ramp={"rate": 2}, segments=segments)
    assert config.ramp == Inner(2.0, 4)
    assert config.segments == [Segment("2%", 1e-4), Segment(3.0, 1.0, "linear")]


def test_number_spelled_as_text_is_a_number_where_both_are_declared():
    assert made(segments=[{"until": "1e9", "value": 1}]).segments[0].until == 1e9


def test_unknown_key_is_refused_with_its_full_name_and_the_nearest():
    assert refusal(inner={"rate": 1, "sise": 3}) == "unknown key 'inner.sise' (did you mean 'inner.size'?)"
    assert refusal(segments=[{"until": 1, "value": 1, "form": "x"}]).startswith("unknown key 'segments.0.form'")


def test_missing_key_is_named():
    with pytest.raises(InputError, match=r"missing key 'inner.rate' \(number\)"):
        build(Outer, {"name": "n", "inner": {}})
    with pytest.raises(InputError, match="missing key 'name'"):
        build(Outer, {"inner": {"rate": 1}})


def test_defaults_are_not_shared_between_instances():
    assert made().weights is not made().weights


def test_type_of_a_dotted_key():
    assert key_type(TrainConfig, "run.steps") == int | None
    assert key_type(TrainConfig, "schedule.learning_rate.0.value") is float
    assert key_type(TrainConfig, "model.rope_scaling.factor") is float
    assert key_type(TrainConfig, "model.mtp_depth_weights.3") is float


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("run.step", "did you mean 'run.steps'"),
        ("model.sequence_length", "did you mean 'data.sequence_length'"),  # the right name in the wrong group
        ("model.rope_scaling.facto", "did you mean 'model.rope_scaling.factor'"),
        ("run.steps.x", "run.steps is integer or null and has no keys below it"),
        ("schedule.learning_rate.first.value", "its items are 0, 1, 2"),
    ],
)
def test_unknown_dotted_key_is_refused_with_a_hint(key, hint):
    with pytest.raises(InputError) as caught:
        key_type(TrainConfig, key)
    assert repr(key) in str(caught.value) and hint in str(caught.value)


def test_all_keys_lists_groups_and_leaves():
    keys = all_keys(TrainConfig)
    assert {"run", "run.steps", "batch.ramp.until", "model.rope_scaling.factor", "schedule.learning_rate"} <= set(keys)


def test_a_trailing_underscore_of_a_field_is_not_part_of_its_key():
    made = build(ImportConfig, {"from": "x", "out": "y"})
    assert made.from_ == "x" and plain_of(made) == {"from": "x", "out": "y"}
    assert all_keys(ImportConfig) == ["from", "out"] and key_type(ImportConfig, "from") is str
    with pytest.raises(InputError, match="unknown key 'from_'"):
        build(ImportConfig, {"from_": "x", "out": "y"})
    with pytest.raises(InputError, match="missing key 'from'"):
        build(ImportConfig, {"out": "y"})
