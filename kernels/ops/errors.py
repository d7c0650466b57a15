"""The error that a caller of the operators can mend."""


class KernelError(ValueError):
    """An operator was called with something that it cannot take; the message is one line and says what."""
