"""Texts in nested values."""

from cfl_ray.system.nested import each_text, texts_of

VALUES = {"a": ["b", ("c", 1)], "d": {"e": None, "f": "g"}, 2: True}


def test_texts_of_keys_and_values_at_every_depth():
    assert list(texts_of(VALUES)) == ["a", "b", "c", "d", "e", "f", "g"]
    assert list(texts_of("a")) == ["a"] and list(texts_of(3)) == []


def test_each_text_is_changed_and_nothing_else():
    assert each_text(VALUES, str.upper) == {"A": ["B", ["C", 1]], "D": {"E": None, "F": "G"}, 2: True}
