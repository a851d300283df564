"""An implementation that misbehaves in chosen cases, and is the reference in all others.

``HOSTILE`` in the environment maps the name of a case's function to what happens there when the case
makes its first optimizer: one of the functions below.
"""

import ctypes
import faulthandler
import functools
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
import unittest

import torch

from keyedopt.reference import *  # noqa: F403
from keyedopt.reference import KeyedOptimizer, KeyedOptimizerWrapper

PLAN = json.loads(os.environ.get("HOSTILE", "{}"))


class Unspeakable(Exception):  # noqa: N818 - not an error but a nuisance
    def __str__(self):
        raise RuntimeError("no")

    __repr__ = __str__


class Vicious(BaseException):
    def __str__(self):
        sys.exit(0)


class Text(str):
    __slots__ = ()

    def __str__(self):
        return "\udcff"

    def split(self, *_):
        raise RuntimeError("no")


def raise_(error):
    raise error


def segfault():
    ctypes.string_at(0)


def leave():
    os._exit(3)


def leave_with_success():
    os._exit(0)


def close_every_file():
    os.closerange(3, 4096)


def sleep():
    time.sleep(1000)


def hold_the_interpreter():
    ctypes.PyDLL(None).sleep(1000)


def sleep_unwatched():
    faulthandler.disable()
    signal.signal(signal.SIGABRT, signal.SIG_IGN)
    time.sleep(1000)


def linger():
    time.sleep(0.5)


def sys_exit():
    sys.exit(0)


def interrupt():
    raise KeyboardInterrupt


def generator_exit():
    raise GeneratorExit


def skip():
    import pytest

    pytest.skip("not today")


def skip_as_unittest():
    raise unittest.SkipTest("not today")


def expect_failure():
    import pytest

    pytest.xfail("known")


def end_the_session():
    import pytest

    pytest.exit("enough", returncode=0)


def no_text():
    raise Unspeakable


def vicious_text():
    raise Vicious


def text_of_a_stranger():
    raise RuntimeError(Text("odd"))


def control_characters():
    raise RuntimeError("\x00\x1b[31m\x07\x0b\r\nred \x9b \u2028 \ud800 \ufffe ]]> <b>&amp; \U000e0001")


def markup():
    raise RuntimeError(
        "[bold red]x[/] [link=https://example.com]y[/link] :smile: | `z` ![i](https://example.com)"
    )


def megabytes():
    raise RuntimeError("x" * 5_000_000)


def code_without_a_file():
    exec("raise TypeError(\"f.__init__() got an unexpected keyword argument 'x'\")", {})


def many_at_once():
    raise BaseExceptionGroup("several", [ValueError("one"), KeyboardInterrupt(), Unspeakable()])


def endless_recursion():
    endless_recursion()


def close_streams():
    sys.stdout.close()
    sys.stderr.close()
    os.close(1)
    os.close(2)


def noise():
    for _ in range(2000):
        print("noise" * 200)
        print("noise" * 200, file=sys.stderr)
        os.write(2, b"\xff" * 1000)
    logging.getLogger().error("noise")


def threads():
    for _ in range(3):
        threading.Thread(target=time.sleep, args=(1000,)).start()
    threading.Thread(target=raise_, args=(RuntimeError("in a thread"),)).start()


def fork():
    os.fork()


def settings():
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise RuntimeError("left a mess")


def look_around():
    with open(os.environ["NOTES"], "w") as notes:
        json.dump({"modules": sorted(sys.modules), "argv": sys.argv}, notes)


def trapped(init):
    """Make a constructor that first does what the plan has for the case that runs."""

    @functools.wraps(init)
    def trap(self, *args, **kwargs):
        functions = (frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._getframe()))
        case = next(filter(PLAN.__contains__, functions), None)
        if case:
            globals()[PLAN.pop(case)]()
        init(self, *args, **kwargs)

    return trap


for _kind in (KeyedOptimizer, KeyedOptimizerWrapper):
    _kind.__init__ = trapped(_kind.__init__)
