"""Errors of some items among others, and messages of one line."""

import pytest

from lingpt.common.errors import UserError, check_known, first_line, one_line, skip_failing


def test_what_fails_is_left_out_and_told_once():
    """Guards: one run that cannot be read, and nothing is drawn. A bug is not left out."""

    def half(number: int) -> int:
        if number % 2:
            raise UserError(f"odd, as {number % 4}")
        return number // 2

    told: list[str] = []
    assert skip_failing(half, [1, 2, 5, 3, 4], told.append) == [1, 2] and told == ["odd, as 1", "odd, as 3"]
    with pytest.raises(UserError, match="odd, as 3"):
        skip_failing(half, [3, 1], told.append)
    assert skip_failing(half, []) == [] and len(told) == 2
    with pytest.raises(ZeroDivisionError):
        skip_failing(lambda number: 1 // number, [0, 1])


def test_a_message_is_one_short_line():
    """Guards: an IndexError of an error without a message; a page of a library's in one line."""
    assert first_line(ValueError("\n a\nb")) == "a" and one_line(ValueError("\n a\n  b")) == "a b"
    assert first_line(ValueError()) == one_line(ValueError("\n")) == "ValueError"
    assert len(first_line(ValueError("x" * 999))) == len(one_line(ValueError("x" * 999))) == 200


@pytest.mark.parametrize("name", ["", 3, "c"])
def test_any_name_that_is_not_known_is_a_line(name):
    with pytest.raises(UserError, match=r"unknown thing .*: use one of: a, b"):
        check_known("thing", ["a", name], ("a", "b"))
