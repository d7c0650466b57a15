"""Numbers as a person writes them."""

from lingpt.common.format import duration, join_distinct, scaled, with_error


def test_numbers_are_as_a_person_writes_them():
    """Guards: `6.14e-06 B tokens`, `0.00108 k tokens/s`, `about 0.0 GB`."""
    assert scaled(6144, " tokens", "B") == "6.14 k tokens" and scaled(3e9, " tokens", "B") == "3 B tokens"
    assert scaled(1.08, " tokens/s") == "1.08 tokens/s" and scaled(999_900, " tokens/s") == "1 M tokens/s"
    assert scaled(47.4e6, "B") == "47.4 MB" and scaled(141.6e9, "B") == "142 GB" and scaled(0, "B") == "0 B"


def test_a_rough_estimate_has_one_digit():
    """Guards: a guess of how long a CPU takes, to the second."""
    times = [duration(seconds, rough=True) for seconds in (7.4, 83, 575, 9000, 30 * 3600.0)]
    assert times == ["7 s", "80 s", "10 min", "2 h", "30 h"] and duration(575) == "9.6 min"


def test_a_list_as_a_person_writes_it():
    """Guards: `512 and 1,024 and 2,048 tokens` under a figure."""
    found = [join_distinct(values) for values in ([], [None, 512], [512, 512, 1024], ["a", "b", 2048])]
    assert found == ["", "512", "512 and 1,024", "a, b and 2,048"]


def test_a_value_and_its_error():
    """Guards: the sign of a value before its error, a hyphen for a minus, `± None`."""
    assert with_error(4.5121, 0.0309, ".3f") == "4.512 ± 0.031" and with_error(1, None, ".2f") == "1.00"
    assert with_error(0.044, 0.003, "+.3f") == "+0.044 ± 0.003" and with_error(-1, 0, "+.1f") == "−1.0 ± 0.0"
    assert with_error(12.345, 0.1234, ".3g", ".2g") == "12.3 ± 0.12"
