"""The files of `examples/fleet`: scripts run with stand-ins for the cluster, YAML has the fields that Kubernetes knows."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from gemmscope.cli.main import app
from support.stand_ins import JOB, Cluster

ROOT = Path(__file__).parent.parent.parent
FILES = ROOT / "examples" / "fleet"
SCRIPTS = sorted([*FILES.glob("*.sh"), *FILES.glob("*.sbatch")])
TINY = "--device cpu --shapes 16 --recipes bf16 --pre-quantize --num-iters 6 --num-warmup 0".split()
SBATCH = {"job-name", "nodes", "gpus-per-node", "ntasks-per-node", "cpus-per-task", "exclusive", "time", "output"}


def parsed(call: list[str]) -> str:
    """The name of a command whose options all exist."""
    name, *arguments = call
    command = typer.main.get_command(app).get_command(None, name)  # type: ignore[attr-defined, arg-type]
    assert command is not None, f"there is no command {name}"
    return str(command.make_context(name, arguments).command.name)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--shell=bash", str(script)], check=True)
    options = re.findall(r"^#SBATCH --([\w-]+)", script.read_text(), flags=re.MULTILINE)
    assert set(options) <= SBATCH
    assert bool(options) == (script.suffix == ".sbatch")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_commands_in_the_comments_exist(script: Path) -> None:
    """The arguments that the head of a script shows are options of the command that it runs."""
    lines = re.findall(rf"^# .*?{re.escape(script.name)}((?: [^#\n&]+)?)", script.read_text(), flags=re.MULTILINE)
    assert lines
    for line in lines:
        arguments = shlex.split(line)
        if script.name != "slurm-ray.sbatch":
            assert parsed(["fleet", *arguments]) == "fleet"
        elif arguments:
            assert parsed([*arguments, "--ray", "auto"]) == arguments[0]


@pytest.mark.parametrize(
    ("script", "calls"),
    [
        ("slurm.sbatch", 3),  # two processes, and the one that gathers
        ("slurm-ray.sbatch", 2),
        ("torchrun.sh", 2),
        ("ray-job.sh", 1),
        ("health-check.sh", 1),
    ],
)
def test_what_the_scripts_call_exists(script: str, calls: int, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, recorded=True)
    ended = cluster.run(FILES / script, **(JOB if script.endswith(".sbatch") else {}))
    assert ended.returncode == 0, ended.stderr
    recorded_calls = cluster.calls()
    assert len(recorded_calls) == calls
    for arguments in recorded_calls:
        parsed(arguments)


def test_the_batch_script_measures_and_gathers(tmp_path: Path) -> None:
    """End to end: two processes as srun starts them measure on the CPU, each writes its file, and the files become one result."""
    pytest.importorskip("torch", reason="measuring needs torch")
    cluster = Cluster(tmp_path, recorded=False)
    ended = cluster.run(FILES / "slurm.sbatch", *TINY, **JOB)
    assert ended.returncode == 0, ended.stderr
    runs = sorted(path.name for path in (tmp_path / "gemmscope-fleet-4711").iterdir())
    assert [name.partition("-")[0] for name in runs] == ["node00", "node01"]
    assert "2 of 2 GPUs were measured" in ended.stdout
    fleet = json.loads((tmp_path / "gemmscope-fleet-4711.json").read_text())
    assert [(gpu["node"], gpu["failure"]) for gpu in fleet["gpus"]] == [("node00", ""), ("node01", "")]


@pytest.mark.parametrize(("gathered", "code"), [(0, 0), (3, 3), (1, 1)])
def test_the_exit_code_of_the_batch_script(gathered: int, code: int, tmp_path: Path) -> None:
    ended = Cluster(tmp_path, recorded=True).run(FILES / "slurm.sbatch", **JOB, GATHERED=str(gathered))
    assert ended.returncode == code


def test_the_batch_script_notices_gpus_that_were_not_measured(tmp_path: Path) -> None:
    ended = Cluster(tmp_path, recorded=True).run(FILES / "slurm.sbatch", **{**JOB, "SLURM_NTASKS": "3"})
    assert ended.returncode == 3
    assert "2 of 3 GPUs were measured" in ended.stdout


def test_the_batch_script_if_no_gpu_was_measured(tmp_path: Path) -> None:
    """Its options are wrong: one message of each process, and the exit code that the docs give."""
    ended = Cluster(tmp_path, recorded=False).run(FILES / "slurm.sbatch", "--shapes", "8y", **JOB)
    assert ended.returncode == 3
    assert "0 of 2 GPUs were measured" in ended.stdout
    assert "find:" not in ended.stderr


@pytest.mark.parametrize(("gathered", "code", "message"), [(0, 0, ""), (3, 1, "a GPU is slow"), (2, 1, "could not be checked")])
def test_the_health_check(gathered: int, code: int, message: str, tmp_path: Path) -> None:
    ended = Cluster(tmp_path, recorded=True).run(FILES / "health-check.sh", GATHERED=str(gathered))
    assert ended.returncode == code
    assert message in ended.stderr


# The fields of each object, those that must be there first. From the reference of the Kubernetes API (batch/v1, core/v1) and of
# KubeRay (ray.io/v1, docs/reference/api.md).
OBJECT = ({"apiVersion", "kind", "metadata", "spec"}, set[str]())
JOB_SPEC = (
    {"template"},
    {"completionMode", "completions", "parallelism", "backoffLimit", "backoffLimitPerIndex", "maxFailedIndexes"}
    | {
        "ttlSecondsAfterFinished",
        "activeDeadlineSeconds",
        "suspend",
        "podFailurePolicy",
        "podReplacementPolicy",
        "successPolicy",
    },
)
POD_SPEC = (
    {"containers"},
    {"restartPolicy", "affinity", "volumes", "initContainers", "nodeSelector", "tolerations", "hostIPC", "serviceAccountName"},
)
CONTAINER = (
    {"name", "image"},
    {"command", "args", "env", "resources", "volumeMounts", "ports", "lifecycle", "imagePullPolicy", "workingDir"},
)
RAY_JOB = (
    {"entrypoint", "rayClusterSpec"},
    {"shutdownAfterJobFinishes", "activeDeadlineSeconds", "backoffLimit", "ttlSecondsAfterFinished", "runtimeEnvYAML"}
    | {"submissionMode", "submitterPodTemplate", "submitterConfig", "suspend"},
)
RAY_CLUSTER = ({"headGroupSpec"}, {"rayVersion", "workerGroupSpecs", "enableInTreeAutoscaling", "autoscalerOptions"})
HEAD = ({"template", "rayStartParams"}, {"serviceType", "enableIngress"})
WORKERS = ({"groupName", "minReplicas", "maxReplicas", "template", "rayStartParams"}, {"replicas", "numOfHosts"})


def check(value: dict[str, Any], fields: tuple[set[str], set[str]]) -> None:
    needed, possible = fields
    assert needed <= set(value), f"{needed - set(value)} is missing"
    assert set(value) <= needed | possible, f"{set(value) - needed - possible} does not exist"


def check_pod(template: dict[str, Any]) -> Iterator[list[str]]:
    """Check a pod; yields the commands of its containers."""
    pod = template["spec"]
    check(pod, POD_SPEC)
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    assert all(len(volume) == 2 for volume in pod.get("volumes", []))  # its name and one source
    for container in pod["containers"]:
        check(container, CONTAINER)
        assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
        assert all(isinstance(word, str) for word in container.get("command", []))
        for variable in container.get("env", []):
            assert set(variable) in ({"name", "value"}, {"name", "valueFrom"})
        assert set(container.get("resources", {})) <= {"limits", "requests"}
        yield container.get("command", [])


def objects(name: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers and ray")
    loaded: list[dict[str, Any]] = list(yaml.safe_load_all((FILES / name).read_text()))
    for resource in loaded:
        check(resource, OBJECT)
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", resource["metadata"]["name"])  # the name of a pod's label, too
    return loaded


def test_the_indexed_job() -> None:
    claim, job = objects("kubernetes-job.yaml")
    assert (claim["apiVersion"], claim["kind"], job["apiVersion"], job["kind"]) == (
        *("v1", "PersistentVolumeClaim"),
        *("batch/v1", "Job"),
    )
    spec = job["spec"]
    check(spec, JOB_SPEC)
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]  # all nodes at the same time: each node gets one pod
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # as backoffLimitPerIndex needs
    (command,) = check_pod(spec["template"])
    assert command[0] == "gemmscope"
    assert parsed(command[1:]) == "fleet"
    (anti,) = spec["template"]["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert anti["labelSelector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    volume = next(volume for volume in spec["template"]["spec"]["volumes"] if "persistentVolumeClaim" in volume)
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_the_gathering_job_reads_what_the_indexed_job_writes() -> None:
    (gather,) = objects("kubernetes-gather.yaml")
    *_, job = objects("kubernetes-job.yaml")
    check(gather["spec"], JOB_SPEC)
    (measuring,), (gathering,) = (list(check_pod(manifest["spec"]["template"])) for manifest in (job, gather))
    assert parsed(gathering[1:]) == "fleet"
    folder = measuring[measuring.index("--folder") + 1]
    assert gathering[2] == folder
    written = gathering[gathering.index("--json") + 1]
    assert not written.startswith(f"{folder}/")  # otherwise it would be gathered next time
    mounts = [manifest["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0] for manifest in (job, gather)]
    assert mounts[0] == mounts[1]
    assert folder.startswith(mounts[0]["mountPath"])


def test_the_ray_job() -> None:
    (job,) = objects("kuberay-rayjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    check(job["spec"], RAY_JOB)
    program, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert (program, parsed(arguments)) == ("gemmscope", "fleet")
    cluster = job["spec"]["rayClusterSpec"]
    check(cluster, RAY_CLUSTER)
    check(cluster["headGroupSpec"], HEAD)
    assert all(isinstance(value, str) for value in cluster["headGroupSpec"]["rayStartParams"].values())
    images = set()
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert list(check_pod(group["template"])) == [[]]  # KubeRay sets the command
        images.add(group["template"]["spec"]["containers"][0]["image"])
    assert len(images) == 1
    for group in cluster["workerGroupSpecs"]:
        check(group, WORKERS)
        assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] > 0


def test_every_file_is_on_a_page() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "how-to").glob("*.md"))
    assert all(f"examples/fleet/{path.name}" in pages for path in FILES.iterdir())
