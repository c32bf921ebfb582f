"""The process that talks to Ray for the driver: it connects, keeps one actor for each GPU, passes lines on and watches nodes.

Ray writes its logs to standard output, and ends the process that uses it when the head node is gone. Both stay in here. One JSON
object per line, on standard input and on the pipe to the driver. An actor is a *slot*, with a number of its own:
one that replaces another has a new number, so that nothing is mistaken for something of its predecessor.

From the driver: a request first, then `send` (slot, line), `abandon` (slot); the end of the input means stop. To the driver:
`answered`, `connected` or `unusable`; `slot` (an actor is being started), `line`, `lost`, `refused`, `held` (GPUs of other jobs);
`census` (once, when the first slots are known); `alive` every few seconds.

Nodes run place workers from one zip file with gemmscope and its requirements, as they are installed here. `code/` has
gemmscope, which comes first on the import path of place workers: every node runs the driver's version. `packages/` has its
requirements, which come last: what a node has installed is used, so that the frameworks there find the versions they know.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import io
import json
import os
import re
import socket
import sys
import tempfile
import time
import zipfile
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from gemmscope.pool import ray_actor
from gemmscope.pool.place_messages import RESTART_S, START_S
from gemmscope.pool.ray_messages import NoTokensError, NotRayError, host_and_port, why_no_connection
from gemmscope.process import messages_to_parent

REQUIREMENTS = ("jinja2", "nvidia-ml-py", "platformdirs", "pydantic", "pyyaml", "tomli")
"""What place workers import of gemmscope's requirements."""
OF_THE_NODE = ("numpy",)
"""Large, and wherever PyTorch is."""

_SAME_TIME = (1980, 1, 1, 0, 0, 0)  # the same files make the same bundle


def pack_code() -> bytes:
    """A zip file of gemmscope and what place workers need."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, path in sorted(_files()):
            archive.writestr(zipfile.ZipInfo(name, _SAME_TIME), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def _files() -> Iterator[tuple[str, Path]]:
    """The names in the bundle, and the files."""
    package = Path(__file__).resolve().parents[1]
    for path in package.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield f"code/{path.relative_to(package.parent).as_posix()}", path
    for needed in _closure(REQUIREMENTS):
        for file in needed.files or ():
            path = Path(str(file.locate()))
            if ".." not in file.parts and "__pycache__" not in file.parts and path.is_file():
                yield f"packages/{file.as_posix()}", path


def _closure(names: Iterable[str]) -> list[Distribution]:
    """Those of the packages that are installed, and what they require in turn."""
    waiting, taken = list(names), dict[str, Distribution]()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in taken or name in OF_THE_NODE:
            continue
        try:
            taken[name] = distribution(name)
        except PackageNotFoundError:  # for another version of Python, or another system
            continue
        required = [text for text in taken[name].requires or () if "extra" not in text.partition(";")[2]]
        waiting += [match[0] for text in required if (match := re.match(r"[\w.-]+", text))]
    return list(taken.values())


NODES_S = 1.0  # between two checks of the nodes of the cluster
HEAD_S = 60.0  # a head node that does not answer for this long is gone
POLL_S, POLLS_PER_S = 1.0, 500.0  # how long an actor waits for lines; longer where there are many, for so many calls per second
HELLO_S = 120.0  # the same for its place worker
FREE_S = 30.0  # time limit for the list of free GPUs
MOST_RESTARTS = 3  # of one slot without an outcome in between
STOP_S = 5.0  # time limit for place workers to end
HTTP2_SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # an empty frame; the fourth byte is its type
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HTTP2_SETTINGS
STORE_BYTES = 100 << 20  # of a Ray that this process starts: only the bundle is in it


@dataclass
class Slot:
    """One actor and its place worker."""

    number: int
    node: str
    host: str
    restarts: int = 0
    known: bool = False
    """It replaces an actor whose place the driver knows."""
    actor: Any = None
    started: bool = False
    greeted: bool = False
    over: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)


@dataclass
class Node:
    """A node of the cluster. `occupied`: its GPUs that other jobs use; `refused`: its GPUs that nothing can be measured on."""

    host: str
    seen: float
    occupied: int = 0
    refused: int = 0


class Bridge:
    """Everything between the driver's pipes and the actors."""

    def __init__(self, ray: Any, request: dict[str, Any], outgoing: Outgoing, bundle: bytes) -> None:
        self.ray, self.request, self.outgoing = ray, request, outgoing
        self.slots: dict[int, Slot] = {}
        self.nodes: dict[str, Node] = {}
        self._gone = (ray.exceptions.RayError, asyncio.TimeoutError, OSError)  # an actor, a node or the connection
        self._numbers = 0
        self._own = ray.get_runtime_context().get_node_id()  # through which this process is connected; a client's is the head
        ray.cloudpickle.register_pickle_by_value(ray_actor)
        self._actor_class = ray.remote(ray_actor.PlaceActor)
        self._bundle, self._digest = ray.put(bundle), hashlib.sha256(bundle).hexdigest()[:16]
        self._work: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the driver closes the input."""
        stopped = asyncio.Event()
        loop = self.outgoing.loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1 << 30)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        tasks = [asyncio.create_task(work) for work in (self._watch(), self._sign_of_life(), self._obey(reader, stopped))]
        waiting = asyncio.create_task(stopped.wait())
        done, _ = await asyncio.wait([*tasks, waiting], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {waiting}:
            task.result()  # its exception, if it has one
        await self._stop()

    # -- the driver ----------------------------------------------------------------------------------------------------------

    async def _obey(self, reader: asyncio.StreamReader, stopped: asyncio.Event) -> None:
        while line := await reader.readline():
            order = json.loads(line)
            slot = self.slots.get(order["slot"])
            if slot is None or slot.over:
                continue
            self._do(self._send(slot, order["line"]) if order["type"] == "send" else self._abandon(slot))
        stopped.set()

    async def _sign_of_life(self) -> None:
        while True:
            self.outgoing.put(type="alive")
            await asyncio.sleep(self.request["alive_s"])

    # -- nodes ---------------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Start actors on nodes that appear, and give up those on nodes that vanish."""
        census_due = time.monotonic() + self.request["held_s"]
        told = False
        while True:
            nodes = await self._nodes()
            alive = {node["NodeID"]: node for node in nodes if node["Alive"]}
            if self._own in self.nodes and self._own not in alive:  # its jobs end with it: a new bridge must connect elsewhere
                raise ConnectionError("the Ray node of this machine is gone")
            for gone in set(self.nodes) - set(alive):
                del self.nodes[gone]
                for slot in [slot for slot in self.slots.values() if slot.node == gone]:
                    self._lose(slot, "its node left the Ray cluster", again=False)
            without = await self._take_in(alive)
            if not told and (
                self.slots or time.monotonic() >= census_due or not any(node.occupied for node in self.nodes.values())
            ):
                told = True
                occupied = sum(node.occupied for node in self.nodes.values())
                self.outgoing.put(type="census", nodes=len(alive), slots=len(self.slots), held=occupied, without=without)
            self._report_occupied()
            await asyncio.sleep(NODES_S)

    async def _nodes(self) -> list[dict[str, Any]]:
        """The nodes of the cluster. A head node that restarts is waited for: actors work without it."""
        until = time.monotonic() + HEAD_S
        while True:
            try:
                nodes: list[dict[str, Any]] = await asyncio.to_thread(self.ray.nodes)
            except Exception:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(NODES_S)
            else:
                return nodes

    async def _take_in(self, alive: dict[str, dict[str, Any]]) -> list[str]:
        """Start what can be started now. Returns the names of new nodes that have nothing to measure on."""
        new = [node for node in alive if node not in self.nodes]
        for node in new:
            self.nodes[node] = Node(str(alive[node].get("NodeManagerHostname") or node[:8]), time.monotonic())
        without = []
        some = not self.request["cpu"] and (new or any(node.occupied for node in self.nodes.values()))
        free = await self._free() if some else None
        for node, facts in self.nodes.items():
            resources = alive[node].get("Resources", {})
            total = int(resources.get("CPU", 0) >= 1 if self.request["cpu"] else resources.get("GPU", 0))
            if node in new and total == 0:
                without.append(facts.host)
            wanted = total if node in new else facts.occupied
            ours = facts.refused + sum(slot.node == node and not slot.started for slot in self.slots.values())
            usable = wanted if free is None else max(0, min(wanted, int(free.get(node, 0.0)) - ours))
            for _ in range(usable):
                self._start(node)
            facts.occupied = wanted - usable
        return without

    async def _free(self) -> dict[str, float] | None:
        """The free GPUs of each node; None where Ray does not report them. Asked from inside the cluster: a Ray client cannot see
        them."""
        free: dict[str, float] | None = None
        with suppress(*self._gone):  # the node that was asked may be leaving; actors wait for their GPUs, too
            free = await self._reply(self.ray.remote(ray_actor.free_gpus).options(num_cpus=0).remote(), FREE_S)
        return free

    def _report_occupied(self) -> None:
        """Report GPUs that other jobs still use after a while, and stop waiting for them."""
        for facts in self.nodes.values():
            if facts.occupied and time.monotonic() - facts.seen >= self.request["held_s"]:
                self.outgoing.put(type="held", host=facts.host, gpus=facts.occupied)
                facts.occupied = 0

    # -- actors --------------------------------------------------------------------------------------------------------------

    def _start(self, node: str, restarts: int = 0, *, known: bool = False, delay_s: float = 0.0) -> None:
        self._numbers += 1
        slot = Slot(self._numbers, node, self.nodes[node].host, restarts, known)
        self.slots[slot.number] = slot
        self.outgoing.put(type="slot", slot=slot.number, host=slot.host, known=known)
        slot.task = asyncio.create_task(self._serve(slot, delay_s))

    async def _serve(self, slot: Slot, delay_s: float) -> None:
        """Start the actor, and forward the lines of its place worker, until one of them ends."""
        await asyncio.sleep(delay_s)
        if slot.over:  # an actor that nobody ends would keep its GPU
            return
        began = time.monotonic()
        try:
            slot.actor = self._actor(slot.node)
            while not slot.over:
                wait_s = max(POLL_S, len(self.slots) / POLLS_PER_S)
                limit_s = self.request["silence_s"] if slot.started else START_S
                lines, ended = await self._reply(slot.actor.poll.remote(wait_s), wait_s + limit_s)
                slot.started = True
                self._pass_on(slot, lines)
                if ended is not None:
                    self._worker_ended(slot, ended)
                elif not slot.greeted and time.monotonic() - began > HELLO_S:
                    self._refuse(slot, f"its process did not start within {HELLO_S:.0f} s")
        except asyncio.TimeoutError:
            if slot.started:
                self._lose(slot, f"it sent nothing for {self.request['silence_s']:.0f} s", again=True)
            else:
                self._refuse(slot, f"Ray did not start an actor there within {START_S:.0f} s")
        except Exception as error:  # of Ray: the actor or its node died, or could not start
            self._actor_failed(slot, error)

    def _actor(self, node: str) -> Any:
        strategy = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_cpus": 0, "num_gpus": 0 if self.request["cpu"] else 1, "max_restarts": 0, "max_concurrency": 4}
        create = self._actor_class.options(scheduling_strategy=strategy, **options).remote
        return create(self._bundle, self._digest, self.request["module"], self.request["begin"])

    def _pass_on(self, slot: Slot, lines: list[str]) -> None:
        for line in lines:
            match ray_actor.type_of(line):
                case "hello":
                    slot.greeted = True
                case "refused" if not slot.over:
                    self._retire(slot, refused=True)
                case "outcome":
                    slot.restarts = 0
            self.outgoing.put(type="line", slot=slot.number, line=line)

    def _worker_ended(self, slot: Slot, ended: str) -> None:
        killed = ended.startswith("signal") and slot.restarts < MOST_RESTARTS  # its node may be leaving
        if slot.greeted or killed:
            self._lose(slot, f"its process died ({ended})", again=True)
        else:
            self._refuse(slot, f"its process did not start there ({ended})")

    def _actor_failed(self, slot: Slot, error: Exception) -> None:
        """An actor that dies is lost, as is one that does not start: its node may be leaving. One that never does is refused."""
        if slot.greeted or slot.restarts < MOST_RESTARTS:
            self._lose(slot, "its Ray actor or its node died", again=True)
        else:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
            self._refuse(slot, f"its process did not start there ({lines[-1][:300]})")

    def _lose(self, slot: Slot, why: str, *, again: bool) -> None:
        """Report it as lost, and start another one if its node is there."""
        if not slot.over:
            self._retire(slot)
            self._replace(slot, why, again=again)

    def _replace(self, slot: Slot, why: str, *, again: bool) -> None:
        left = slot.node not in self.nodes
        again = again and not left and slot.restarts < MOST_RESTARTS
        self.outgoing.put(type="lost", slot=slot.number, why=why, again=again, left=left)
        if again:
            self._start(slot.node, slot.restarts + 1, known=slot.known or slot.greeted, delay_s=RESTART_S * 2**slot.restarts)

    def _refuse(self, slot: Slot, why: str) -> None:
        if not slot.over:
            self._retire(slot, refused=True)
            self.outgoing.put(type="refused", slot=slot.number, host=slot.host, why=why)

    def _retire(self, slot: Slot, *, refused: bool = False) -> None:
        """Forget a slot: its later messages are ignored."""
        slot.over = True
        self.slots.pop(slot.number, None)
        if refused and slot.node in self.nodes:
            self.nodes[slot.node].refused += 1
        self._do(self._end(slot))

    async def _abandon(self, slot: Slot) -> None:
        """End its place worker before another one is started, so that the GPU is free."""
        slot.over = True
        self.slots.pop(slot.number, None)
        await self._end(slot)
        self._replace(slot, "gemmscope stopped it", again=True)

    async def _end(self, slot: Slot) -> None:
        """End the place worker, remove what it unpacked, end the actor; whatever state they are in."""
        if slot.actor is not None:
            with suppress(Exception):  # of Ray, whatever it is: another one is started where this one ended
                await self._reply(slot.actor.stop.remote(), STOP_S if slot.started else 0.0)
            with suppress(Exception):
                self.ray.kill(slot.actor)

    async def _send(self, slot: Slot, line: str) -> None:
        with suppress(*self._gone):  # `_serve` sees the same, and reports it
            await slot.actor.send.remote(line)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background."""
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _stop(self) -> None:
        """End every actor."""
        for slot in list(self.slots.values()):
            self._retire(slot)
        await asyncio.wait([*self._work, asyncio.ensure_future(asyncio.sleep(0))], timeout=2 * STOP_S)

    async def _reply(self, reference: Any, limit_s: float) -> Any:
        """What an actor or task returns; a `TimeoutError` after a while. The call itself is not cancelled."""
        call = asyncio.ensure_future(reference)
        call.add_done_callback(lambda late: late.cancelled() or late.exception())  # nothing may wait for it any more
        return await asyncio.wait_for(asyncio.shield(call), limit_s)


class Outgoing:
    """Lines to the driver. Writing never waits: the driver may be busy, and messages of the actors must be read meanwhile."""

    def __init__(self, number: int) -> None:
        self._number, self._waiting = number, bytearray()
        self.loop: asyncio.AbstractEventLoop | None = None

    def put(self, **content: Any) -> None:
        self._waiting += json.dumps(content).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: os.write(self._number, self._waiting)]
        except BlockingIOError:
            if self.loop is not None:
                self.loop.add_writer(self._number, self._write)
            return
        except BrokenPipeError:  # the driver is gone, and this process ends with it
            self._waiting.clear()
        if self.loop is not None:
            self.loop.remove_writer(self._number)


def _must_answer(place: tuple[str, int], limit_s: float) -> None:
    """An `OSError` unless a gRPC server answers, as Ray's do: Ray itself would try for a minute."""
    until = time.monotonic() + limit_s
    with socket.create_connection(place, timeout=limit_s) as connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return
        connection.sendall(HTTP2_PREFACE)
        answer = b""
        while len(answer) < len(HTTP2_SETTINGS):
            connection.settimeout(max(0.1, until - time.monotonic()))
            piece = connection.recv(64)
            if not piece:
                break
            answer += piece
    if answer[3:4] != HTTP2_SETTINGS[3:4]:
        raise NotRayError


def _current_cluster() -> tuple[str, int] | None:
    """Where the cluster of this machine should listen: Ray remembers one that was killed, too. None if that is not known."""
    with suppress(ImportError, AttributeError, TypeError, ValueError):
        from ray._private.services import get_ray_address_from_environment

        return host_and_port(get_ray_address_from_environment("auto", None))
    return None


def connect(request: dict[str, Any], outgoing: Outgoing) -> Any:
    """The module `ray`, connected; None if that is not possible, which is reported to the driver."""
    address: str = request["address"]
    try:
        if place := host_and_port(address):
            _must_answer(place, request["answer_s"])
        outgoing.put(type="answered")
        import ray
        import ray.util.scheduling_strategies  # of which `ray` alone does not import all

        own: dict[str, Any] = {}
        if address == "local":
            if importlib.util.find_spec("ray._private.authentication") is None:
                raise NoTokensError(ray.__version__)  # noqa: TRY301
            folder = f"{request['folder']}/r"  # which Ray opens to everyone, inside of one that is closed
            own = {"include_dashboard": False, "object_store_memory": STORE_BYTES, "_temp_dir": folder}
        elif address == "auto" and (place := _current_cluster()):
            _must_answer(place, request["answer_s"])
        ray.init(address=address, log_to_driver=False, namespace="gemmscope", **own)
    except Exception as error:
        why, hint = why_no_connection(address, error)
        outgoing.put(type="unusable", why=why, hint=hint)
        return None
    outgoing.put(type="connected", ray=ray.__version__)
    return ray


def main() -> None:
    """Serve one driver."""
    os.dup2(2, 1)  # Ray logs to both
    with messages_to_parent() as messages, open(0, "rb", buffering=0, closefd=False) as unbuffered:
        os.set_blocking(messages.fileno(), False)
        outgoing = Outgoing(messages.fileno())
        request = json.loads(unbuffered.readline())  # what follows is read by `Bridge`
        ray = connect(request, outgoing)
        if ray is not None:
            asyncio.run(Bridge(ray, request, outgoing, pack_code()).run())
            ray.shutdown()
            ray_actor.remove_abandoned(Path(tempfile.gettempdir()))  # of actors on this machine that had no time to


if __name__ == "__main__":
    main()
