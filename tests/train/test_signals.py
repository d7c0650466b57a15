"""Signals: the first one asks, the second one ends, and one that is ignored stays ignored."""

import os
import signal

import pytest

from lingpt.train import signals
from lingpt.train.signals import stop_signals


@pytest.mark.usefixtures("ctrl_c")
def test_the_first_asks_and_the_second_acts_as_ever(capsys, monkeypatch):
    monkeypatch.setattr(signals, "SAME_REQUEST", 0.0)
    with pytest.raises(KeyboardInterrupt), stop_signals() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested and not stop.agreed, "only a step agrees, with all ranks"
        assert "once more to leave at once" in capsys.readouterr().out
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_ignored_stays_ignored():
    """So it is for a script's background jobs: Ctrl-C is for the job in front."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_signals() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop.requested
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
