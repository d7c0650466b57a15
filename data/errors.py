"""The one error class of data preparation."""


class DataError(ValueError):
    """Something about the data that the user can mend; the message is one line: what, and how to mend it."""
