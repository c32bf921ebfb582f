"""Limits for a process that builds a model: time, and from a config no network and no more memory than models on the meta device
need.

A config may name a backbone, a kernel or a tokenizer on the hub, which transformers would look up. Only a hub ID that the user
asks for is downloaded, by `model/hub.py`.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from gemmscope.errors import UserError, shown

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
LOOKUPS = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")
SENDING = ("socket.connect", "socket.sendto", "socket.sendmsg")
MOST_MEMORY = 8 * 2**30  # bytes, torch included
MODULE_SECONDS, MODULE_VARIABLE, AGAIN_S = 120.0, "GEMMSCOPE_MODULE_SECONDS", 1.0
LONGEST_MODULE_S = 1e6

_depth = 0
_hooked = False


class NetworkError(ConnectionError):
    """Something tried to use the network inside `offline`."""


@contextmanager
def offline() -> Iterator[None]:
    """Fail instead of using the network. Libraries of Hugging Face are told, and do not try, if they are imported inside."""
    global _depth, _hooked
    os.environ.update(OFFLINE)
    if not _hooked:
        sys.addaudithook(_refuse)  # hooks cannot be removed: this one does nothing outside
        _hooked = True
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if _depth and (event in LOOKUPS or (event in SENDING and not isinstance(arguments[1], (str, bytes)))):  # text: a local socket
        raise NetworkError("the network is not used to build a model from a config")


class TooSlowError(Exception):
    """The user's module took longer than `module_seconds`."""


def module_seconds() -> float:
    """How long a module of the user may take to be built, and again to run once: two minutes, or what the environment says."""
    text = os.environ.get(MODULE_VARIABLE, "")
    with suppress(ValueError):
        if 0 < (seconds := float(text or MODULE_SECONDS)) <= LONGEST_MODULE_S:
            return seconds
    raise UserError(f"{MODULE_VARIABLE} must be a number of seconds, not {shown(text)}", f"for example {MODULE_VARIABLE}=600")


@contextmanager
def limited_time() -> Iterator[None]:
    """For the main thread of a worker: raise a `TooSlowError` after `module_seconds`, and again each second after that."""
    seconds = module_seconds()

    def stop(*_: object) -> None:
        raise TooSlowError(f"it took longer than {seconds:g} s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def limited_memory() -> Iterator[None]:
    """Limit the memory of this process, so that building an enormous model raises a MemoryError. Linux only."""
    before = _limit_memory(MOST_MEMORY)
    try:
        yield
    finally:
        if before is not None:
            _limit_memory(before)


def _limit_memory(most: int) -> int | None:
    """Set the limit and return the one before; None where limits are not supported."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limits = [limit for limit in (most, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits, default=resource.RLIM_INFINITY), hard))
        return soft
    return None
