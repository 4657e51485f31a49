"""What a rank does: join the world, then run one call after the other, each from a clean state, and answer."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.world.frameworks import FRAMEWORKS, Framework
from tests.world.messages import Answer, Call, Raised, Ready, Returned, Setup, Skipped

STACK_SIGNAL = signal.SIGUSR1


def serve(connection_file: int, output_file: int, stacks_file: int) -> None:
    """Be a rank until the connection closes; does not come back.

    All that is printed, from C too, goes to the output file. The Python stacks of all threads go to the stacks file on
    STACK_SIGNAL and on a crash, also while the rank is blocked in a collective.
    """
    _redirect(output_file)
    faulthandler.enable(stacks_file)
    faulthandler.register(STACK_SIGNAL, stacks_file, all_threads=True)
    connection = Connection(connection_file)
    setup: Setup = pickle.loads(connection.recv_bytes())
    framework = FRAMEWORKS[setup.framework]
    _answer(connection, _join, framework, setup)
    gc.freeze()  # What was loaded so far is not looked at by the collection after each call.
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            _answer(connection, _run, framework, connection.recv_bytes())
    # A forked rank must not go back into the nursery's frames, so the interpreter does not get to its own end. What
    # tests registered for the end has to run all the same, and there is no public function for that.
    atexit._run_exitfuncs()
    os._exit(0)


def _redirect(output_file: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output_file, 1), (output_file, 2)):
        os.dup2(source, target)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - open as long as the process lives
    sys.stdout, sys.stderr = (open(file, "w", buffering=1, closefd=False) for file in (1, 2))  # noqa: SIM115


def _answer(connection: Connection, step: Callable[..., Answer], *arguments: object) -> None:
    """Send the step's answer, or what it raised: nothing that a test raises, SystemExit included, ends the rank."""
    try:
        answer = step(*arguments)
    except pytest.skip.Exception as skip:
        answer = Skipped(str(skip))
    except BaseException as error:
        answer = _describe(error)
    connection.send_bytes(pickle.dumps(answer))


def _join(framework: Framework, setup: Setup) -> Ready:
    sys.path[:] = setup.import_path
    os.chdir(setup.directory)
    os.environ.update(
        RANK=str(setup.rank),
        LOCAL_RANK=str(setup.rank),
        WORLD_SIZE=str(setup.world_size),
        LOCAL_WORLD_SIZE=str(setup.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(setup.port),
        GLOO_SOCKET_IFNAME="lo0" if sys.platform == "darwin" else "lo",
    )
    framework.reset(0)
    if setup.world_size:
        framework.join_world(setup.rank, setup.world_size, setup.port)
    return Ready()


def _run(framework: Framework, request: bytes) -> Returned:
    call: Call = pickle.loads(request)
    sys.path[:] = call.import_path
    function = _find(call.module, call.qualname)
    with _clean_state(framework, call.seed):
        if call.num_threads:
            value = _threads(call.num_threads).run(_call, function, call.arguments)
        else:
            value = _call(function, call.arguments)
    try:
        return Returned(pickle.dumps(value))
    except Exception as error:
        raise TypeError(
            f"{call.qualname} returned a {type(value).__name__} that cannot be sent to the pytest process: {error}. "
            "Return numbers, strings, arrays, tensors or containers of them."
        ) from None


def _call(function: Callable, arguments: bytes) -> Any:
    args, kwargs = pickle.loads(arguments)
    return function(*args, **kwargs)


@functools.cache
def _threads(num_ranks: int) -> Any:
    from hyper_parallel.testing import threads

    return threads(num_ranks)


def _find(module: str, qualname: str) -> Callable:
    function = importlib.import_module(module)
    for name in qualname.split("."):
        function = getattr(function, name)
    return getattr(function, "_body_on_ranks", function)


@contextlib.contextmanager
def _clean_state(framework: Framework, seed: int) -> Iterator[None]:
    """The same state for every call: seeds and settings are set before, environment and directory restored after."""
    environment, directory = dict(os.environ), os.getcwd()
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    framework.reset(seed)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
        os.chdir(directory)
        gc.collect()


def _describe(error: BaseException) -> Raised:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    described = traceback.TracebackException(type(error), error, trace)
    message = "".join(described.format_exception_only())
    frames = "".join(described.format()).removesuffix(message)
    return Raised(frames if trace is not None else "", message.rstrip("\n"), type(error).__name__)
