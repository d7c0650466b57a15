"""What the property-based tests share: how many examples, and what a user may be told.

`make test` takes a few examples of each, `make soak` LINGPT_PROPERTY_FACTOR times as many. What fails is
printed, with how to run it again.
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings

from lingpt.common.errors import UserError

T = TypeVar("T")


def examples(few: int) -> settings:
    """`few` examples, times LINGPT_PROPERTY_FACTOR."""
    return settings(
        max_examples=few * int(os.environ.get("LINGPT_PROPERTY_FACTOR", 1)),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        print_blob=True,
    )


def result_or_line(function: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
    """What `function` gives, or None where it raised a UserError of one line; other errors go through."""
    try:
        return function(*args, **kwargs)
    except UserError as error:
        assert str(error).strip() and "\n" not in str(error), repr(str(error))
        return None
