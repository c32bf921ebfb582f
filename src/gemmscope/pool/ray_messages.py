"""Messages about Ray: checks of addresses, and Ray's errors and logs as one line each."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from gemmscope.errors import UserError, in_a_line, option, shown

INSTALL = 'pip install "gemmscope[ray]"'
EXAMPLES = "auto (a cluster that this machine is part of), ray://HOST:10001 (any cluster), HOST:6379 or local"

TOKENS_SINCE = "2.52"
LONGEST_LINE = 120  # of a log that is quoted

_CLIENT = "ray://"
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+"
_LOG_PREFIX = re.compile(rf"^(?:\[{_TIME}[^\]]*\]|{_TIME}\s+[A-Z]+)\s*(?:\([^)]*\))?\s*(?:[\w./]+:\d+:?)?\s*(?:--\s*)?")
_NOISE = re.compile(r"^(@\s+0x|\*\*\*|PC: |StackTrace|/|\[0x|File \"|Traceback|~+\^*|\^+$|-+$|$)")


class NotRayError(OSError):
    """Something accepts connections at an address, and it is not Ray."""


class NoTokensError(Exception):
    """This version of Ray runs the code of every process that knows its address."""


REASONS: dict[type[OSError], str] = {
    NotRayError: "something else listens at that port",
    ConnectionRefusedError: "connection refused",
    TimeoutError: "no answer in time",
}


def ray_address(text: str) -> str:
    """The address of a cluster, checked; a `UserError` if it cannot be one.

    >>> ray_address("ray://head:10001"), ray_address("Local")
    ('ray://head:10001', 'local')
    """
    address = text.strip()
    if address.lower() in ("local", "auto"):
        return address.lower()
    if host_and_port(address) is None:
        raise UserError(f"{option('ray')} must be the address of a Ray cluster, got {shown(text)}", f"for example {EXAMPLES}")
    return address


def host_and_port(address: str) -> tuple[str, int] | None:
    """Where a cluster listens; None for an address that only Ray can look up, and for one without a port.

    >>> host_and_port("ray://[::1]:10001"), host_and_port("head:6379"), host_and_port("auto")
    (('::1', 10001), ('head', 6379), None)
    """
    if address in ("local", "auto"):
        return None
    host, _, port = address.removeprefix(_CLIENT).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not re.fullmatch(r"[\w.%:-]+", host) or not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) < 1 << 16:
        return None
    return host, int(port)


def check_installed() -> None:
    """A `UserError` if Ray is not installed here."""
    spec = find_spec("ray")
    if spec is None or spec.origin is None:  # without an origin it is just a folder of that name
        raise UserError(f"{option('ray')} needs Ray, which is not installed", INSTALL)


def nobody_answers(address: str, reason: str = "") -> tuple[str, str]:
    """Message and hint for an address at which there is no cluster."""
    asked = option("ray", address)
    because = f" ({reason})" if reason else ""
    if address == "auto":
        return f"{asked}: no Ray cluster answers on this machine{because}", f"give its address: {EXAMPLES}"
    if address == "local":
        return f"{asked}: Ray does not start on this machine{because}", f"measure without {option('ray')}"
    hint = (
        "is the cluster running? Ray listens at HOST:6379 for its nodes, and at ray://HOST:10001 for clients elsewhere; "
        "if it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here, too"
    )
    return f"{asked}: no Ray cluster answers there{because}", hint


def why_no_connection(address: str, error: BaseException) -> tuple[str, str]:
    """What kept this machine from connecting: message and hint."""
    text = " ".join(str(error).split())
    asked = option("ray", address)
    if isinstance(error, ImportError):
        return f"{asked}: Ray cannot be imported here ({in_a_line(error)})", INSTALL
    if isinstance(error, NoTokensError):
        problem = f"{asked}: Ray {text} cannot ask for a token, so other users of this machine could run code as you"
        return problem, f'pip install "ray[client]>={TOKENS_SINCE}", or measure without {option("ray")}'
    if "AF_UNIX path length" in text:
        return (
            f"{asked}: the path of the folder for temporary files is too long for Ray",
            "set TMPDIR to a shorter one, such as /tmp",
        )
    if "ray[client]" in text:
        return f"{asked} needs Ray's client, which is not installed", INSTALL
    if match := re.search(r"cluster was started with: Ray: (\S+) Python: (\S+)", text):
        return _other_versions(asked, match[1], match[2])
    if re.search(r"expects this IP address|Can't find a `?node_ip_address|node with (the )?IP|No node info", text, re.IGNORECASE):
        return f"{asked}: this machine is not a node of that cluster", "connect as a client: ray://HOST:10001"
    if re.search(r"not find any running Ray|No existing Ray cluster", text, re.IGNORECASE):
        return nobody_answers(address)
    for kind, reason in REASONS.items():
        if isinstance(error, kind):
            return nobody_answers(address, reason)
    known = isinstance(error, OSError) and not isinstance(error, ConnectionError) and error.strerror
    return nobody_answers(address, str(known or in_a_line(error)[:200]))


def _other_versions(asked: str, ray: str, python: str) -> tuple[str, str]:
    try:
        own_ray = version("ray")
    except PackageNotFoundError:
        own_ray = "another version"
    own_python = platform.python_version()
    why = f"{asked}: that cluster runs Ray {ray} with Python {python}; this machine has Ray {own_ray} with Python {own_python}"
    if python.split(".")[:2] == own_python.split(".")[:2]:
        return why, f'pip install "ray=={ray}"'
    return why, f"run gemmscope with Python {'.'.join(python.split('.')[:2])} and Ray {ray}, for example on a node of the cluster"


def last_useful_line(log: str) -> str:
    """The last useful line of a Ray log, without its prefix; empty if there is none.

    >>> last_useful_line("[2026-01-02 03:04:05,678 E 12 34] (gcs) client.cc:1: GCS is gone.\\n    @ 0x55 main\\n")
    'GCS is gone.'
    """
    for line in reversed(_COLORS.sub("", log).splitlines()):
        text = _LOG_PREFIX.sub("", line.strip()).strip()
        if not _NOISE.match(text):
            return text if len(text) <= LONGEST_LINE else text[:LONGEST_LINE].rpartition(". ")[0] or text[:LONGEST_LINE]
    return ""
