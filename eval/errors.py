"""The one error class of `lingpt.eval`."""


class EvalError(ValueError):
    """An evaluation that cannot run as asked; the message is one line and says how to mend it."""
