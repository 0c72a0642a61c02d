"""The option table agrees with itself; every name the binding knows is honoured, or refused with a reason."""

from __future__ import annotations

import ctypes
import math
import warnings
from typing import Any

import pytest

from transformers_llamacpp.errors import (
    OptionError,
    OptionTypeError,
    UnknownOptionError,
    UnsupportedFeatureError,
)
from transformers_llamacpp.native import params
from transformers_llamacpp.native.params import (
    ALIASES,
    NOT_APPLICABLE,
    REFUSED,
    accepted_names,
    build,
    check_option,
    struct_fields,
)
from transformers_llamacpp.options import OPTIONS, OWN_OPTIONS, option, options_in
from unit.params_table import ATTRIBUTES, CALLBACKS, FIELDS, POINTED_TO, field_value

pytestmark = pytest.mark.once

GROUPS = (
    "context", "model", "method", "sampling", "cutting", "penalties", "ending", "inspection", "chat", "contrastive", "guidance",
    "speculation", "beams", "other", "adapter",
)  # fmt: skip
DESIGNED = {  # DESIGN 1.2
    "n_ctx": 4096, "n_cells": None, "n_seq_max": None, "host_cache_bytes": 1 << 30, "prefix_reuse": True,
    "n_sink": None, "reuse_min_chunk": 0, "state_dir": None, "state_dir_bytes": 10 << 30,
}  # fmt: skip


# -- the table ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", OPTIONS, ids=lambda entry: entry.name)
def test_an_option_agrees_with_itself(entry: Any) -> None:
    assert entry.check(entry.default) is None
    assert entry.default is None or entry.has_type(entry.default)
    assert entry.help.endswith(".") and entry.help[0].isupper() and entry.label and entry.group in GROUPS
    assert entry.kind in (int, float, bool, str)
    if entry.minimum is not None and entry.maximum is not None:
        assert entry.minimum < entry.maximum
    if entry.kind in (bool, str):
        assert entry.minimum is entry.maximum is entry.step is None and not entry.unit
    else:
        assert entry.minimum is not None and entry.step and not entry.choices
    if entry.choices:
        assert entry.default in entry.choices and len(set(entry.choices)) == len(entry.choices)
    assert option(entry.name) is entry


def test_the_table_as_a_whole() -> None:
    names = [entry.name for entry in OPTIONS]
    labels = [entry.label for entry in OPTIONS]
    assert len(set(names)) == len(names) and len(set(labels)) == len(labels)
    assert [entry for group in GROUPS for entry in options_in(group)] == list(OPTIONS)
    assert {name: entry.default for name, entry in OWN_OPTIONS.items()} == DESIGNED
    with pytest.raises(KeyError):
        option("nothing")


LOADING = ("context", "model", "adapter")


@pytest.mark.parametrize("entry", [e for e in OPTIONS if e.group in LOADING], ids=lambda entry: entry.name)
def test_the_loader_takes_what_the_table_shows(entry: Any) -> None:
    assert entry.name in accepted_names()
    for value in (entry.default, entry.minimum, *entry.choices):
        if value is not None:
            build({entry.name: check_option(entry.name, value)})


@pytest.mark.parametrize("entry", [e for e in OPTIONS if e.minimum is not None], ids=lambda entry: entry.name)
def test_ranges(entry: Any) -> None:
    assert "below its minimum" in str(entry.check(entry.minimum - 1))
    if entry.maximum is not None:
        assert "above its maximum" in str(entry.check(entry.maximum + 1))
        assert entry.check(entry.kind(entry.maximum)) is None
    assert f"takes {entry.kind.__name__}, not str" in str(entry.check("1"))
    assert f"takes {entry.kind.__name__}, not bool" in str(entry.check(True))


def test_an_int_does_for_a_float_and_not_the_other_way_round() -> None:
    assert option("temperature").check(1) is None
    assert option("n_ctx").check(1.0) is not None
    assert option("prefix_reuse").check(1) is not None
    assert option("temperature").check(math.nan) is not None
    assert option("type_k").check("q3_k") is not None


# -- names ----------------------------------------------------------------------------------------------


def test_every_name_was_thought_of() -> None:
    """A new binding with a new name fails here: give it a value in `params_table` or a reason in `params`."""
    covered = [FIELDS, POINTED_TO, CALLBACKS, ATTRIBUTES, NOT_APPLICABLE, REFUSED, OWN_OPTIONS]
    names = [name for table in covered for name in table]
    assert sorted(names) == sorted(set(names)), "a name is on two lists"
    assert sorted(accepted_names() - set(names)) == [], "names nobody thought of"
    model, context = struct_fields()
    old = {name for name in names if name not in accepted_names()}
    assert old <= {"use_mmap", "use_mlock", "load_mode"} | set(NOT_APPLICABLE) | set(REFUSED)
    assert set(ALIASES) == set(ATTRIBUTES) & accepted_names() - model.keys() - context.keys()


@pytest.mark.parametrize("reasons", [NOT_APPLICABLE, REFUSED], ids=["changes nothing", "refused"])
def test_reasons_are_sentences(reasons: dict[str, str]) -> None:
    for name, reason in reasons.items():
        assert len(reason.split()) > 4 and not reason.endswith("."), name


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_a_field_is_set(name: str) -> None:
    value, expected = FIELDS[name]
    assert field_value(build({}), name) != pytest.approx(expected), "the value must not be the default"
    assert field_value(build({name: check_option(name, value)}), name) == pytest.approx(expected)


@pytest.mark.parametrize("name", sorted(ATTRIBUTES))
def test_an_argument_of_llama_is_honoured(name: str) -> None:
    value, read, expected = ATTRIBUTES[name]
    assert read(build({})) != expected
    assert read(build({name: check_option(name, value)})) == expected


@pytest.mark.parametrize("name", sorted(POINTED_TO))
def test_an_array_is_passed(name: str) -> None:
    value, read, expected = POINTED_TO[name]
    assert not field_value(build({}), name)
    assert read(build({name: check_option(name, value)})) == expected


@pytest.mark.parametrize("name", sorted(CALLBACKS))
def test_a_callback_is_passed(name: str) -> None:
    function, arguments, expected = CALLBACKS[name]
    assert not field_value(build({}), name)
    assert field_value(build({name: check_option(name, function)}), name)(*arguments) == expected
    kind = dict(
        params.llama_cpp.llama_model_params._fields_ + params.llama_cpp.llama_context_params._fields_
    )[name]
    native = kind(function)  # a ctypes callback is taken as it is
    assert field_value(build({name: check_option(name, native)}), name)(*arguments) == expected


@pytest.mark.parametrize("name", sorted(NOT_APPLICABLE))
def test_what_changes_nothing_says_so(name: str) -> None:
    value: Any = {"chat_format": "llama-2", "lora_base": "base.gguf"}.get(name, 7)
    with pytest.warns(UserWarning, match=f"{name}=.* changes nothing: "):
        assert check_option(name, value) == value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_option(name, None) is None
    assert bytes(build({name: value}).context) == bytes(build({}).context)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_refused_says_what_to_do(name: str) -> None:
    value: Any = False if name == "kv_unified" else "x.gguf" if name == "model_path" else 1
    with pytest.raises(UnsupportedFeatureError, match=f"{name} cannot be set: ") as caught:
        check_option(name, value)
    assert caught.value.feature == name
    assert check_option(name, None) is None


def test_the_buffer_is_always_unified() -> None:
    assert check_option("kv_unified", True) is True
    assert build({"kv_unified": True}).context.kv_unified and build({}).context.kv_unified


@pytest.mark.parametrize("name", sorted(OWN_OPTIONS))
def test_our_own_options_are_checked_by_the_table(name: str) -> None:
    entry = OWN_OPTIONS[name]
    assert check_option(name, entry.default) == entry.default
    with pytest.raises(OptionTypeError, match=f"{name} takes {entry.kind.__name__}, not list"):
        check_option(name, [])
    if entry.minimum is not None:
        with pytest.raises(OptionError, match="below its minimum") as caught:
            check_option(name, int(entry.minimum) - 1)
        assert caught.value.option == name


# -- wrong values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("n_gpu_layer", "n_gpu_layers"),
        ("nctx", "n_ctx"),
        ("flash_attention", "flash_attn"),
        ("typek", "type_k"),
    ],
)
def test_an_unknown_name_gives_the_nearest_ones(wrong: str, nearest: str) -> None:
    with pytest.raises(
        UnknownOptionError, match=f"{wrong!r} is not an option .*Did you mean.*{nearest}"
    ) as caught:
        check_option(wrong, 1)
    assert nearest in caught.value.nearest and caught.value.option == wrong
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, OptionError)


def test_a_name_that_looks_like_nothing_has_no_suggestions() -> None:
    with pytest.raises(UnknownOptionError) as caught:
        check_option("zzzzzzzz", 1)
    assert caught.value.nearest == () and "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(accepted_names() - NOT_APPLICABLE.keys() - REFUSED.keys()))
def test_a_wrong_type_is_both_errors(name: str) -> None:
    with pytest.raises(OptionError, match=name) as caught:
        check_option(name, object())
    assert isinstance(caught.value, TypeError) and caught.value.option == name


@pytest.mark.parametrize(
    "name", [n for fields in struct_fields() for n, kind in fields.items() if kind in params._INTEGERS]
)
def test_integers_fit_their_field(name: str) -> None:
    if name in REFUSED or name in OWN_OPTIONS:
        return
    for wrong in (True, 1.0, "1"):
        if not (isinstance(wrong, str) and name in ("type_k", "type_v")):
            with pytest.raises(OptionTypeError):
                check_option(name, wrong)
    with pytest.raises(OptionError, match=name):
        check_option(name, 2**64)
    kind = {**struct_fields()[0], **struct_fields()[1]}[name]
    if kind in (ctypes.c_uint32, ctypes.c_size_t):
        with pytest.raises(OptionError, match=f"{name}=-1"):
            check_option(name, -1)


@pytest.mark.parametrize("name", ["n_batch", "n_threads", "n_threads_batch"])
def test_none_of_these_can_be_zero(name: str) -> None:
    with pytest.raises(OptionError, match="below its minimum 1"):
        check_option(name, 0)


@pytest.mark.parametrize("name", ["n_threads", "n_threads_batch"])
def test_llama_cpp_dies_of_more_than_512_threads(name: str) -> None:
    with pytest.raises(OptionError, match="above its maximum 512"):
        check_option(name, 513)


@pytest.mark.parametrize("name", ["type_k", "type_v"])
@pytest.mark.parametrize("value", ["q2_k", "nothing", 99, -1])
def test_an_unknown_cache_type_lists_the_known(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"{name}=.*f16"):
        check_option(name, value)


def test_cache_types_by_name_and_number() -> None:
    number = params.KV_TYPES["q8_0"]
    assert check_option("type_k", "Q8_0") == check_option("type_k", number) == number


def test_gpu_layers() -> None:
    with pytest.raises(OptionError, match="n_gpu_layers=-2"):
        build({"n_gpu_layers": check_option("n_gpu_layers", -2)})


@pytest.mark.parametrize(
    "value", [{"key": [1]}, {"k" * 128: 1}, {1: 1}, {"key": "v" * 128}, {"key": 2**63}, {"key": None}]
)
def test_metadata_overrides_that_do_not_fit(value: Any) -> None:
    with pytest.raises(OptionError, match="kv_overrides"):
        check_option("kv_overrides", value)


def test_a_tensor_split_for_more_devices_than_there_can_be() -> None:
    with pytest.raises(OptionError, match="tensor_split has 1000 entries"):
        check_option("tensor_split", [1.0] * 1000)
    with pytest.raises(OptionTypeError):
        check_option("tensor_split", ["1"])


def test_n_threads_batch_follows_n_threads() -> None:
    assert build({"n_threads": 3}).context.n_threads_batch == 3
    assert build({"n_threads": 3, "n_threads_batch": 5}).context.n_threads == 3
    assert build({}).context.n_threads >= 1
