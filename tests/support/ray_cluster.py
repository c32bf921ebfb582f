"""A real Ray cluster on this machine: a head without CPUs for actors, and nodes that can be added and killed.

It lives in a process of its own (this file as a script), which imports Ray and keeps what Ray prints. Health checks are quick.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

QUICK = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_timeout_ms": 5000}
QUICK["health_check_failure_threshold"] = 5  # a node on a busy machine answers late, and is not dead
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # it would end actors where others need the memory
    "RAY_local_fs_capacity_threshold": "1",  # nor does a disk that is nearly full matter
}
STORE_BYTES = 80 << 20
READY = "cluster: "  # before the lines that are answers: Ray prints too


class RayCluster:
    """The cluster. `address`: for drivers on this machine; `client`: for clients, where asked for."""

    def __init__(self, nodes: int, marker: dict[str, str] | None = None, *, client: bool = False, **resources: float) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short: Ray's sockets have paths of at most 107 bytes
        (self._folder / "ray").mkdir()
        self.environment = {"RAY_TMPDIR": str(self._folder)}
        """With which `auto` finds this cluster."""
        self.log = (self._folder / "log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(client)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, **self.environment, **ENVIRONMENT, **(marker or {})},
            start_new_session=True,
        )
        self.nodes: list[str] = []
        try:
            answer = self._ask()
            self.address, self.client = str(answer["address"]), str(answer["client"])
            for _ in range(nodes):
                self.add(**resources)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with suppress(BrokenPipeError, RuntimeError):  # it has ended already
                self._ask("end")
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self.log.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, **resources: float) -> str:
        """Add a node. Returns its name here."""
        node = str(self._ask("add", json.dumps(resources or {"num_cpus": 1}))["node"])
        self.nodes.append(node)
        return node

    def kill(self, node: str) -> None:
        """SIGKILL to every process of a node."""
        self._ask("kill", node)
        self.nodes.remove(node)

    def freeze(self, node: str) -> None:
        """SIGSTOP to the actors of a node: they are silent, and nothing closes their connections."""
        self._ask("freeze", node)

    def _ask(self, *command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if command:
            self._process.stdin.write(" ".join(command) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(READY):
                answer: dict[str, Any] = json.loads(line.removeprefix(READY))
                return answer
        raise RuntimeError(f"the cluster's process ended: {Path(self.log.name).read_text()[-2000:]}")


def _serve(client: bool) -> None:
    """The process of the cluster: obeys lines of its standard input."""
    import ray
    from ray.cluster_utils import Cluster

    same = {"object_store_memory": STORE_BYTES, "include_dashboard": False, "include_log_monitor": False}
    head = {**same, "num_cpus": 0, "num_gpus": 0, "_system_config": QUICK, "no_monitor": True}
    if client:
        head["ray_client_server_port"] = _free_port()
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes: dict[str, Any] = {}
    started = 0

    def answer(**content: Any) -> None:
        sys.stdout.write(READY + json.dumps(content) + "\n")
        sys.stdout.flush()

    host = cluster.address.rpartition(":")[0]
    answer(address=cluster.address, client=f"ray://{host}:{head['ray_client_server_port']}" if client else "")
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "add":
            node = cluster.add_node(**{**same, "num_gpus": 0, **json.loads(argument)})
            started += 1
            nodes[str(started)] = node
            answer(node=str(started))
            continue
        if command == "kill":
            cluster.remove_node(nodes.pop(argument), allow_graceful=False)
        elif command == "freeze":
            for pid in _tree(nodes[argument]):
                if b"PlaceActor" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGSTOP)
        elif command == "end":
            for node in nodes.values():
                for pid in _tree(node):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
            cluster.shutdown()
            ray.shutdown()
            answer()
            return
        answer()


def _tree(node: Any) -> list[int]:
    """The raylet of a node and every process below it."""
    pids: list[int] = []
    waiting = [info.process.pid for infos in node.all_processes.values() for info in infos]
    while waiting:
        pid = waiting.pop()
        pids.append(pid)
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                waiting += map(int, task.read_text().split())
            except OSError:
                continue
    return pids


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
