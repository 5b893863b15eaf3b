"""Progress and Ctrl-C of long work on the command line."""

import math
import signal
import sys
import threading

import pytest
import torch
from torch import nn

from ldlt.certificates import Problem, minimise
from ldlt.certificates.command import _Progress
from ldlt.graph.trace import trace
from ldlt.watch import Watch


@pytest.fixture
def lost(monkeypatch):
    """Exceptions that Python dropped."""
    found = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: found.append(unraisable.exc_type))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield found
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


class Noisy:
    """Ctrl-C in a destructor: Python prints what it raises, and goes on."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def test_an_interruption_that_got_lost_is_raised_again(lost):
    watch = Watch(show=False)
    with watch:
        watch.tell("one")
        assert not watch.interrupted
        Noisy()
        assert lost == [KeyboardInterrupt]
        with pytest.raises(KeyboardInterrupt):
            watch.tell("two")
    assert watch.interrupted


def test_a_search_ends_when_its_interruption_got_lost(lost):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    progress, steps = _Progress(show=False), []

    def report(step):
        steps.append(step)
        if len(steps) == 2:
            Noisy()
        progress(step)

    with progress:
        found = minimise(Problem.build(trace(net, (4,)), net), progress=report, tolerance=1e-9)
    assert lost == [KeyboardInterrupt]
    assert (found.reason, len(steps), progress.last) == ("interrupted", 2, steps[-1])
    assert math.isfinite(found.bound)
    assert progress.seconds > 0


def test_the_line_and_what_ctrl_c_does(lost, capfd):
    with Watch(show=True) as _, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    watch = Watch(show=True)
    with watch:
        watch.tell("half")
    assert capfd.readouterr().err == "\nldlt: stopping; once more to give up\n\rhalf" + 66 * " " + "\n"
    assert not watch.interrupted


def test_another_thread_has_no_ctrl_c(lost):
    found = []

    def work():
        with Watch(show=False):
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
