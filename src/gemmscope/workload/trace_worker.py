"""The process that imports torch: runs a module on the meta device and records its GEMMs.

`trace.py` starts this file as ``gemmscope.workload.trace_worker REQUEST ANSWER`` (two JSON files). The module is built on
the meta device, where tensors have shapes but no storage, so a 405B model needs no memory. One forward and one backward pass
then dispatch every operation that training would dispatch, and `recorder.py` records each GEMM.
"""

import contextlib
import importlib.util
import inspect
import io
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from gemmscope.errors import shown
from gemmscope.workload.confine import NetworkError, limit_memory, offline
from gemmscope.workload.ops import with_counts
from gemmscope.workload.recorder import record
from gemmscope.workload.scans import CausalConv, Scan
from gemmscope.workload.trace import ModuleTrace


class TraceError(Exception):
    """A problem that the user can solve; its text is shown unchanged."""


def trace(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModuleTrace:
    """Run forward and backward of `module` and return what was recorded."""
    with record(module) as recorder:
        output = module(*args, **kwargs)
        targets = [tensor for tensor in _differentiable(output) if tensor.requires_grad]
        if not targets:
            raise TraceError("nothing to trace backward: the forward pass returned no tensor that requires a gradient")
        torch.autograd.backward([tensor.sum() for tensor in targets])
    unique = {id(parameter): parameter.numel() for parameter in module.parameters()}
    return ModuleTrace(
        class_name=type(module).__name__,
        parameters=sum(unique.values()),
        gemms=with_counts(recorder.gemms),
        batched_gemms=with_counts(recorder.batched_gemms),
        remainder=with_counts(recorder.remainder),
        masks=recorder.masks,
        scans=tuple(op for op in with_counts(recorder.scans) if isinstance(op, Scan)),
        convolutions=tuple(op for op in with_counts(recorder.scans) if isinstance(op, CausalConv)),
    )


def _differentiable(output: Any) -> Iterator[torch.Tensor]:
    """The tensors from which a loss would be computed: the logits if there are any, else every float tensor."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor):
        yield logits
    elif isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, (Mapping, tuple, list)):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _differentiable(value)


def build_huggingface(config_dict: dict[str, Any], batch: int, sequence: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The training model of a `config.json` on the meta device, and its inputs."""
    _know_meta_tensors()
    module = huggingface_model(config_dict, "meta", torch.float32)
    for part in module.modules():
        if hasattr(part, "hc_sinkhorn_iters"):  # repeats elementwise work, which takes most of the time on the meta device
            part.hc_sinkhorn_iters = 1
    tokens = torch.zeros((batch, sequence), dtype=torch.long, device="meta")
    inputs = {"input_ids": tokens}
    if getattr(module.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens
    return module, inputs


def huggingface_model(config_dict: dict[str, Any], device: str, precision: torch.dtype) -> Any:
    """The training model of a `config.json`, with newly initialized weights. Nothing is downloaded."""
    with offline():
        try:
            import transformers
        except ImportError as error:
            raise TraceError("transformers is not installed: pip install transformers") from error
        model_type = config_dict.get("model_type")
        if model_type not in transformers.CONFIG_MAPPING:
            raise TraceError(f"transformers {transformers.__version__} does not know model_type {shown(model_type)}")
        settings = _without_storage(config_dict)
        try:
            config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
        except (KeyError, ValueError) as error:
            raise TraceError(f"transformers {transformers.__version__} cannot read this config: {_reason(error)}") from error
        config.use_cache = config.get_text_config().use_cache = False
        module = _instantiate(transformers, config, device, precision)
    module.train()
    return module


# Keys that belong to a stored checkpoint. For the shapes of training they have no meaning, or do harm (a quantizer or a kernel to
# import, code to run).
_STORAGE_ONLY_KEYS = frozenset(
    {"architectures", "torch_dtype", "dtype", "transformers_version", "quantization_config", "auto_map", "_name_or_path"}
    | {"attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"}
)


def _without_storage(config: Any) -> Any:
    """The config, and the configs inside it, without those keys."""
    if not isinstance(config, dict):
        return config
    return {key: _without_storage(value) for key, value in config.items() if key not in _STORAGE_ONLY_KEYS}


def _instantiate(transformers: Any, config: Any, device: str, precision: torch.dtype) -> torch.nn.Module:
    """The class that is trained with this config: a language model if there is one, else the bare model."""
    causal, masked, bare = transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM, transformers.AutoModel
    pairs = [transformers.AutoModelForSeq2SeqLM, transformers.AutoModelForSpeechSeq2Seq]
    if getattr(config, "is_encoder_decoder", False):
        order = [*pairs, causal, masked, bare]
    elif type(config) in masked._model_mapping and not getattr(config, "is_decoder", False):
        order = [masked, causal, bare]
    else:
        order = [causal, *pairs, masked, bare]
    known = [auto for auto in order if type(config) in auto._model_mapping]
    if not known:
        raise TraceError(f"transformers {transformers.__version__} has no model class for model_type {config.model_type!r}")
    errors = []
    for attention in ("sdpa", "eager"):
        try:
            with torch.device(device):
                module = known[0].from_config(config, attn_implementation=attention, dtype=precision)
        except (ValueError, ImportError) as error:  # "does not support SDPA", "requires the package …"
            errors.append(_reason(error))
            continue
        with contextlib.suppress(AttributeError, ValueError, KeyError):
            module.set_experts_implementation("grouped_mm")
        return module
    raise TraceError(f"transformers {transformers.__version__} cannot build this config: {errors[-1]}")


def _know_meta_tensors() -> None:
    """Make transformers treat meta tensors like fake tensors, whose values it does not read.

    Without this, its mask builders call `mask.all()` on a meta tensor, which raises. Positions on the meta device are those of
    whole sequences, not of packed ones: so attention is called as in training, with `is_causal` where possible.
    """
    from transformers.utils import import_utils

    _on_meta(import_utils, "is_fake_tensor", answer=True)
    with contextlib.suppress(ImportError):  # older versions have no such file
        from transformers import masking_utils

        _on_meta(masking_utils, "find_packed_sequence_indices", answer=None)


def _on_meta(module: Any, name: str, answer: Any) -> None:
    """Make a function of one tensor return this answer for a meta tensor."""
    original = getattr(module, name, None)
    if original is None or hasattr(original, "before_gemmscope"):
        return

    def replaced(tensor: Any) -> Any:
        is_meta = isinstance(tensor, torch.Tensor) and tensor.device.type == "meta"
        return answer if is_meta else original(tensor)

    replaced.before_gemmscope = original  # type: ignore[attr-defined]
    setattr(module, name, replaced)


def _causal(module: torch.nn.Module, masks: Mapping[str, int]) -> bool | None:
    """Whether the attention of a Hugging Face model is causal; None: not known.

    `masks` count how its attentions were called. Where a mask tensor or unfused attention hides this, attributes of the modules
    tell.
    """
    by_call = {kind == "causal" for kind in ("causal", "none") if masks.get(kind)}
    by_module = {bool(part.is_causal) for part in module.modules() if isinstance(getattr(part, "is_causal", None), bool)}
    causal = by_call or by_module
    return causal.pop() if len(causal) == 1 else None


_WINDOW_WITHOUT_KIND = frozenset({"minimax"})  # its layer_types call attention full, with a window too


def _windows(config: Any) -> tuple[int | None, ...] | None:
    """The sliding window or the chunk of each layer, from the configuration with its defaults.

    ModernBERT's window counts both sides, Gemma's one where its attention is not causal.
    """
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        return None
    window = _declared(config, "local_attention") or _declared(config, "sliding_window") or None
    kinds = _declared(config, "layer_types")
    if window and getattr(config, "is_causal", True) is False:
        window = (window - 1) * 2
    if kinds is None or config.model_type in _WINDOW_WITHOUT_KIND:  # a family with the window in every layer, or in none
        return (window,) * layers
    reach = {**dict.fromkeys(_WINDOWED, window), "chunked_attention": _declared(config, "attention_chunk_size")}
    return tuple(reach.get(kind) for kind in kinds)


_WINDOWED = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")


def _declared(config: Any, name: str) -> Any:
    """A setting that the configuration class knows. The file may have others, which the code does not read."""
    known = hasattr(type(config), name) or name in inspect.signature(type(config).__init__).parameters
    known = known or name in type(config).attribute_map
    return getattr(config, name, None) if known else None


def build_from_factory(reference: str, batch: int, sequence: int) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Call `factory` of `file.py:factory` under the meta device and return its module and inputs.

    The factory returns a module, which is then called with token ids of shape (micro-batch, sequence); or a pair of the
    module and its inputs, a tuple (positional) or a dict (by name). It may take `micro_batch_size` and `sequence_length`.
    """
    path_text, _, name = reference.rpartition(":")
    path = Path(path_text)
    if not path.is_file():
        raise TraceError(f"there is no file {path_text!r}")
    folder = path.resolve().parent
    sys.path.append(str(folder))  # last, because a file there may have the name of a module that torch imports
    taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    module_name = f"{path.stem}_traced" if taken else path.stem
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise TraceError(f"{path_text!r} is not a Python file")
    python_module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = python_module
    with _naming(f"importing {path_text}", folder):
        spec.loader.exec_module(python_module)
    factory = getattr(python_module, name, None)
    if not callable(factory):
        own = {key: value for key, value in vars(python_module).items() if getattr(value, "__module__", None) == module_name}
        callables = ", ".join(sorted(key for key, value in own.items() if callable(value)))
        defined = f"it defines {callables or 'no function'}"
        raise TraceError(f"{path_text} has no function {name!r}; {defined}")
    with _naming(f"{name}()", folder), torch.device("meta"):
        result = factory(**_accepted(factory, {"micro_batch_size": batch, "sequence_length": sequence}))
    module, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(module, torch.nn.Module):
        raise TraceError(f"{name}() returned {type(module).__name__}; it must return an nn.Module, or a pair (nn.Module, inputs)")
    if "transformers" in sys.modules:
        _know_meta_tensors()
    move_to_meta(module)
    module.train()
    if inputs is None:
        return module, (torch.zeros((batch, sequence), dtype=torch.long, device="meta"),), {}
    if isinstance(inputs, Mapping):
        return module, (), {key: _to_meta(value) for key, value in inputs.items()}
    positional = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    return module, tuple(_to_meta(value) for value in positional), {}


def move_to_meta(module: torch.nn.Module) -> None:
    """Drop the storage of a module that was built on another device. Unlike `module.to`, this keeps tied parameters tied."""
    moved: dict[int, Any] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in moved:
                    moved[id(parameter)] = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                part._parameters[name] = moved[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = moved.setdefault(id(buffer), buffer.to("meta"))


def _accepted(factory: Any, offered: dict[str, int]) -> dict[str, int]:
    try:
        wanted = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return {}
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in wanted.values()):
        return offered
    return {key: value for key, value in offered.items() if key in wanted}


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def _naming(what: str, folder: Path | None = None) -> Iterator[None]:
    """Turn any exception into one line that says where it came from: the user's own line, if there is one."""
    try:
        yield
    except TraceError:
        raise
    except (Exception, SystemExit) as error:
        if _needed_network(error):
            reason = "the config refers to a file of the hub (a backbone, for example), and configs are traced without network"
            raise TraceError(f"{what}: {reason}") from error
        raise TraceError(f"{what} raised {type(error).__name__}: {_reason(error)}{_place(error, folder)}") from error


def _needed_network(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, NetworkError) or type(error).__name__ == "OfflineModeIsEnabled":
            return True
        error = error.__cause__ or error.__context__
    return False


def _place(error: BaseException, folder: Path | None) -> str:
    """Where an exception came from: the last line that ran in `folder`, or, without a folder, the last line that ran."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" (line {error.lineno} of {error.filename})"
    ran = list(traceback.extract_tb(error.__traceback__))
    frames = ran if folder is None else [frame for frame in ran if _is_in(Path(frame.filename), folder)]
    return f" (line {frames[-1].lineno} of {frames[-1].filename})" if frames else ""


def _is_in(path: Path, folder: Path) -> bool:
    """Whether a file is in a folder or below it, but not in a Python environment inside it."""
    try:
        below = path.resolve().relative_to(folder)
    except (ValueError, OSError):
        return False
    return not {"site-packages", "dist-packages"} & set(below.parts)


LONGEST_REASON = 300


def _reason(error: BaseException) -> str:
    """The first line of an exception's text, and the next one where the first ends in a colon; never too long."""
    message = str(error.msg if isinstance(error, SyntaxError) else error)
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [type(error).__name__]
    reason = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return reason if len(reason) <= LONGEST_REASON else reason[: LONGEST_REASON - 1] + "…"


def answer(request: dict[str, Any]) -> ModuleTrace:
    """Trace the requested Hugging Face config or module factory."""
    result = _trace_config(request) if "config" in request else _trace_factory(request)
    libraries = [name for name in ("torch", "transformers") if name in sys.modules]
    return replace(result, versions={name: sys.modules[name].__version__ for name in libraries})


def _trace_config(request: dict[str, Any]) -> ModuleTrace:
    with offline():
        with _naming("building the model from its config"):
            module, kwargs = build_huggingface(request["config"], request["micro_batch"], request["sequence"])
        with _naming("running the model on the meta device"):
            result = trace(module, (), kwargs)
    return replace(result, windows=_windows(module.config), causal=_causal(module, result.masks))


def _trace_factory(request: dict[str, Any]) -> ModuleTrace:
    module, args, kwargs = build_from_factory(request["module"], request["micro_batch"], request["sequence"])
    with _naming("running the model on the meta device", Path(request["module"].rpartition(":")[0]).resolve().parent):
        return trace(module, args, kwargs)


def main() -> None:
    """Answer the request file. There is always an answer file, unless the process dies."""
    request_path, answer_path = sys.argv[1:3]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    if "config" in request:
        limit_memory()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # output of the user's module must not mix with ours
            result = TypeAdapter(ModuleTrace).dump_python(answer(request), mode="json", by_alias=True)
    except TraceError as failure:
        result = {"error": str(failure)}
    Path(answer_path).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
    os._exit(0)  # whatever threads the user's module has started
