"""Settings, options and per-request options: what is accepted, and what errors say."""

from __future__ import annotations

import pickle

import pytest
from pydantic import Field, PositiveInt, ValidationError

from specplug import Options, PluginManager, RequestOptions
from specplug.config import Settings, checked_k, describe, request_options, validate
from specplug.errors import OptionError
from specplug.proposers.ngram import LookupOptions, NgramOptions


class Model(Options):
    name: str
    size: PositiveInt = Field(4, description="How many.")
    parts: dict[str, int] = Field(default_factory=dict)


def refused(model, values):
    with pytest.raises(OptionError) as error:
        validate(model, values, "the section")
    assert "the section" in str(error.value)
    assert str(error.value).startswith("[bad-option]")
    return str(error.value)


def test_settings_have_defaults_and_are_frozen():
    settings = validate(Settings, {}, "here")
    assert settings == Settings()
    assert settings.options == {}
    with pytest.raises(ValidationError):
        settings.max_consecutive_faults = 3


def test_an_unknown_option_suggests_and_lists():
    text = refused(Settings, {"option": {}})
    assert "unknown option 'option'. Did you mean 'options'?" in text
    for name in Settings.model_fields:
        assert name in text.split("The options are:")[1]


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("max_consecutive_faults", 0, ["is 0", "default 10"]),
        ("max_consecutive_faults", "many", ["'many'", "integer", "default 10"]),
        ("max_consecutive_faults", 1.5, ["1.5", "int"]),
        ("log_interval_seconds", -1, ["is -1", "default 60.0", "float"]),
        ("allow_untested_engine", "perhaps", ["'perhaps'", "bool", "default False"]),
        ("options", [1], ["[1]", "dict"]),
    ],
)
def test_a_wrong_value_names_option_value_type_and_default(name, value, shown):
    text = refused(Settings, {name: value})
    for part in [f"option '{name}'", *shown]:
        assert part in text


def test_every_wrong_option_is_named_at_once():
    text = refused(Settings, {"max_consecutive_faults": 0, "nope": 1, "options": 5})
    for name in ("max_consecutive_faults", "nope", "options"):
        assert f"'{name}'" in text.split("The options are:")[0]


@pytest.mark.parametrize("values", [None, 5, "text", [("name", "x")], ["name"]])
def test_options_that_are_no_mapping_are_refused(values):
    assert f"not {type(values).__name__}" in refused(Model, values)


def test_names_that_are_no_text_are_refused():
    assert "must be text" in refused(Model, {1: 2})


def test_a_missing_option_is_named():
    assert "option 'name'" in refused(Model, {})


def test_a_model_without_options_says_so():
    assert "It takes no options." in refused(Options, {"x": 1})


def test_the_nearest_known_name_only_when_near():
    assert "Did you mean" not in refused(Model, {"name": "x", "zzzzzz": 1})


@pytest.mark.parametrize("given", [{"min_n": 7}, {"max_n": 1}, {"min_n": 4, "max_n": 3}])
@pytest.mark.parametrize("model", [LookupOptions, NgramOptions])
def test_min_n_above_max_n_is_refused_naming_both_values(model, given):
    text = refused(model, given)
    values = {"min_n": 2, "max_n": 5} | given
    assert f"min_n ({values['min_n']}) must not be above max_n ({values['max_n']})" in text


@pytest.mark.parametrize("given", [{"max_n": 9}, {"min_n": 1}, {"min_n": 5}, {"max_n": 2}, {}])
def test_one_lookup_option_given_alone(given):
    options = validate(NgramOptions, given, "here")
    assert (options.min_n, options.max_n) == tuple(({"min_n": 2, "max_n": 5} | given).values())


@pytest.mark.parametrize(
    "given", [{"min_n": 0}, {"max_n": -1}, {"prefer": "latest"}, {"prompt_lookup_min": 2}]
)
def test_lookup_values_out_of_range_are_refused(given):
    (name,) = given
    assert f"'{name}'" in refused(NgramOptions, given)


def test_describe_lists_name_type_default_and_description_in_order():
    name, size, parts = describe(Model)
    assert (name.name, name.type, name.default) == ("name", "str", "(required)")
    assert (size.default, size.description) == ("4", "How many.")
    assert "int" in size.type
    assert parts.default == "{}"
    assert str(parts).startswith("parts: dict[str, int] = {}")


def test_every_option_that_ships_is_described():
    ours = [registered.spec.options for registered in PluginManager()]
    for model in (Settings, *ours):
        assert all(option.description for option in describe(model))


def test_errors_survive_a_process_boundary():
    with pytest.raises(OptionError) as error:
        validate(Settings, {"x": 1}, "here")
    copy = pickle.loads(pickle.dumps(error.value))
    assert type(copy) is OptionError
    assert str(copy) == str(error.value)
    assert copy.hint == error.value.hint


# -- per request ----------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [None, {}, {"other": 1, "kv_transfer": {}, 5: 6}])
def test_arguments_that_are_not_ours_are_ignored(arguments):
    assert request_options(RequestOptions, arguments) == RequestOptions()


@pytest.mark.parametrize("value", [0, 3, 10_000, None])
def test_the_number_of_tokens_of_a_request(value):
    arguments = {"specplug_num_speculative_tokens": value, "other": "x"}
    assert request_options(RequestOptions, arguments).num_speculative_tokens == value


@pytest.mark.parametrize("value", [-1, True, False, "3", 1.0, 1.5, [], {}])
def test_a_wrong_number_of_tokens_is_refused(value):
    with pytest.raises(OptionError, match="num_speculative_tokens"):
        request_options(RequestOptions, {"specplug_num_speculative_tokens": value})


@pytest.mark.parametrize("key", ["specplug_", "specplug_x", "specplug_num_speculative_token"])
def test_an_unknown_key_of_ours_is_refused(key):
    with pytest.raises(OptionError, match="unknown option"):
        request_options(RequestOptions, {key: 1})


def test_a_misspelt_key_suggests():
    with pytest.raises(OptionError, match="Did you mean 'num_speculative_tokens'"):
        request_options(RequestOptions, {"specplug_num_spec_tokens": 1})


def test_a_proposer_may_take_more():
    class More(RequestOptions):
        prediction: str = ""

    options = request_options(
        More, {"specplug_prediction": "abc", "specplug_num_speculative_tokens": 2}
    )
    assert options == More(prediction="abc", num_speculative_tokens=2)
    with pytest.raises(OptionError, match="unknown option 'prediction'"):
        request_options(RequestOptions, {"specplug_prediction": "abc"})


@pytest.mark.parametrize(("k", "most"), [(1, 128), (128, 128), (5, 5), (4000, None)])
def test_a_k_that_is_one(k, most):
    assert checked_k(k, most) == k


@pytest.mark.parametrize("k", [0, -1, 129, 2.0, "4", None, True, float("nan")])
def test_a_k_that_is_none(k):
    with pytest.raises(OptionError) as caught:
        checked_k(k)
    words = f"num_speculative_tokens is {k!r}; it must be a whole number from 1 to 128."
    assert words in str(caught.value)
    assert "6 to 8" in str(caught.value)


def test_a_k_above_the_engines_own_limit():
    with pytest.raises(OptionError, match=r"is 40; it must be .* from 1 to 39") as error:
        checked_k(40, 39, "Ask for less.")
    assert error.value.hint == "Ask for less."
    with pytest.raises(OptionError, match=r"is 0; it must be a whole number from 1 on\."):
        checked_k(0, None)
