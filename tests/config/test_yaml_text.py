"""Texts of configs: libyaml reads what PyYAML's own parser reads."""

import pytest

from cfl_ray.config.yaml_text import _FastLoader, _Loader, parse_yaml
from cfl_ray.errors import ConfigError


@pytest.mark.parametrize(
    "text, value",
    [
        (
            "a: &x {b: 1, c: [yes, null, ~]}\nd: {<<: *x, c: 3}",
            {"a": {"b": 1, "c": [True, None, None]}, "d": {"b": 1, "c": 3}},
        ),
        (
            "a: 1e-3\nb: 1.5\nc: 0x1F\nd: 1_000\ne: '1'\nf: 1:30",
            {"a": "1e-3", "b": 1.5, "c": 31, "d": 1000, "e": "1", "f": 90},
        ),
        ("a: |\n  x\n  y\nb: >-\n  x\n  y", {"a": "x\ny\n", "b": "x y"}),
        (
            "# é\na: 'it''s # no comment'\nb: \"\\u00e9\\n\"  # one\nc: x.py:Name",
            {"a": "it's # no comment", "b": "é\n", "c": "x.py:Name"},
        ),
        ("- [1, {a: }]\n-\n- 2020-01-02 x", [[1, {"a": None}], None, "2020-01-02 x"]),
        ("", None),
    ],
)
def test_both_parsers_give_the_value(text, value):
    assert _FastLoader(text).get_single_data() == _Loader(text).get_single_data() == parse_yaml(text, "x") == value


@pytest.mark.parametrize("text", ["a: [{c: 1, c: 2}]", "a: {<<: {b: 1, b: 2}}", "a: &x {b: {c: 1, c: 2}}\nd: *x"])
def test_a_repeated_key_at_any_depth_is_refused_by_both(text):
    for loader in (_FastLoader, _Loader):
        with pytest.raises(ValueError, match=r"key '[bc]' is given twice, in line 1; leave one out"):
            loader(text).get_single_data()


def test_what_libyaml_reads_in_another_way_is_left_to_the_other():
    with pytest.raises(ConfigError, match="indent with spaces, not with tabs"):
        parse_yaml("a: 1\n\t\nb: 2", "x")
    text = "# a\n\ufeff# b\n"
    assert parse_yaml(text, "x") == "\ufeff# b" != _FastLoader(text).get_single_data()
