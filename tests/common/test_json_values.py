"""What is wrong with a value that was read from JSON is named with its place in it."""

import pytest

from lingpt.common.json_values import is_positive_int, what_is_wrong

RUN = {
    "name": str,
    "seed": int | None,
    "data": {"tokens": is_positive_int},
    "groups": [{"loss": int | float}],
}
GOOD = {"name": "a", "data": {"tokens": 3, "more": None}, "groups": [{"loss": 1.5}, {"loss": 1}], "more": 1}


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        (GOOD, None),
        (GOOD | {"groups": []}, None),
        (GOOD | {"seed": "0"}, "seed is '0'"),
        (GOOD | {"name": None}, "name is missing"),
        (GOOD | {"data": [3]}, "data is [3]"),
        (GOOD | {"data": {"tokens": 0}}, "data.tokens is 0"),
        (GOOD | {"data": {"tokens": True}}, "data.tokens is True"),
        (GOOD | {"groups": {"loss": 1}}, "groups is {'loss': 1}"),
        (GOOD | {"groups": [{"loss": 1}, {"loss": "x" * 99}]}, "groups[1].loss is '" + "x" * 59),
        ([], "it is []"),
        (None, "it is missing"),
    ],
)
def test_the_first_wrong_part_is_named(value, wrong):
    assert what_is_wrong(value, RUN) == wrong


def test_of_a_partial_value_anything_may_be_missing():
    assert what_is_wrong({"data": {}, "groups": [None]}, RUN, partial=True) is None
    assert what_is_wrong({"data": {"tokens": 0}}, RUN, "run", partial=True) == "run.data.tokens is 0"
