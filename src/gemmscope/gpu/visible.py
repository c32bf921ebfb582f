"""Which of a machine's GPUs a measurement may use: those that CUDA_VISIBLE_DEVICES lets through, unless others use them."""

from gemmscope.errors import UserError, option
from gemmscope.gpu.environment import Environment, GpuFacts


def visible_gpu(machine: Environment) -> GpuFacts | None:
    """The GPU to measure on: the first that CUDA_VISIBLE_DEVICES lets through, by number or UUID."""
    return next(iter(visible_gpus(machine)), None)


def visible_gpus(machine: Environment) -> list[GpuFacts]:
    """The GPUs that CUDA_VISIBLE_DEVICES lets through, in its order; all without it. As in CUDA, the list ends at the first entry
    that names no GPU."""
    if machine.visible_devices is None:
        return list(machine.gpus)
    gpus: list[GpuFacts] = []
    for part in map(str.strip, machine.visible_devices.split(",")):
        gpu = _named_gpu(part, machine)
        if gpu is None:
            break
        if gpu not in gpus:
            gpus.append(gpu)
    return gpus


def _named_gpu(name: str, machine: Environment) -> GpuFacts | None:
    """The GPU of one entry of CUDA_VISIBLE_DEVICES."""
    if name.startswith("GPU-"):
        return next((gpu for gpu in machine.gpus if gpu.uuid and gpu.uuid.startswith(name)), None)
    if name in ("", "-1"):
        return None
    index = int(name) if name.isascii() and name.isdigit() and len(name) < 4 else 0
    return machine.gpus[index] if index < len(machine.gpus) else None


def some_gpus(machine: Environment, where: str = "here", instead: str = "") -> list[GpuFacts]:
    """The visible GPUs; a `UserError` if there is none. `instead`: what else can be done, besides measuring on the CPU."""
    visible = visible_gpus(machine)
    if not visible:
        hidden = f" (CUDA_VISIBLE_DEVICES is {machine.visible_devices!r})" if machine.gpus else ""
        raise UserError(
            f"there is no NVIDIA GPU {where} to measure on{hidden}",
            f"{instead}{option('device', 'cpu')} tries out the command, but does not show how fast a GPU is",
        )
    return visible


def usable_gpu(machine: Environment, *, share: bool) -> GpuFacts:
    """The GPU to measure on; a `UserError` if there is none, or if others use it."""
    gpu = some_gpus(machine, instead="gemmscope forecast estimates GPUs that you do not have; ")[0]
    if (gpu.processes or (gpu.utilization or 0) > 10) and not share:
        plural = "es" if len(gpu.processes) > 1 else ""
        in_use = f"in use by process{plural} {', '.join(map(str, gpu.processes))}"
        state = in_use if gpu.processes else f"{gpu.utilization}% busy with other work"
        raise UserError(f"the GPU is {state}, which would distort the times", f"wait, or add {option('share_gpu')}")
    return gpu
