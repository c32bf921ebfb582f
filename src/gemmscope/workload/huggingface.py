"""Builds the training model of a Hugging Face config, and its inputs. Imports torch: only worker processes import this file."""

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gemmscope.errors import option, shown
from gemmscope.workload.confine import offline
from gemmscope.workload.factory import Built, know_meta_tensors
from gemmscope.workload.failures import TraceError, naming, reason

BUILDING = "building the model from its config"
USUAL_IMAGE = 224  # pixels, where a config says nothing of images
USUAL_SOUND = 160_000  # samples, where no length is given: ten seconds at 16 kHz


def build_huggingface(
    config_dict: dict[str, Any], batch: int, sequence: int | None, precision: torch.dtype = torch.float32
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The training model of a `config.json` on the meta device, and its inputs."""
    know_meta_tensors()
    module = huggingface_model(config_dict, "meta", precision)
    for part in module.modules():
        if hasattr(part, "hc_sinkhorn_iters"):  # repeats elementwise work, which takes most of the time on the meta device
            part.hc_sinkhorn_iters = 1
    if module.config.model_type == "phimoe":  # its rotary positions read the largest position, to scale them
        module.config.rope_parameters["rope_type"] = "default"
    return module, _inputs(module, batch, sequence, precision)


def built_huggingface(config_dict: dict[str, Any], batch: int, sequence: int | None) -> Iterator[Built]:
    """The model as it is trained: in BF16 and with labels; then, where that fails, in FP32 and with neither."""
    with naming(BUILDING):
        module, inputs = build_huggingface(config_dict, batch, sequence, torch.bfloat16)
        if (labels := _labels(module, inputs)) is not None:
            yield as_built(module, {**inputs, "labels": labels})
        yield as_built(module, inputs)
        yield as_built(*build_huggingface(config_dict, batch, sequence))


def huggingface_with_values(config_dict: dict[str, Any], batch: int, sequence: int | None) -> Iterator[Built]:
    """The model on the CPU in FP32, with random inputs: with labels; then, where that fails, without."""
    torch.manual_seed(0)
    with naming(BUILDING):
        module = huggingface_model(config_dict, "cpu", torch.float32)
        inputs = training_inputs(module, batch, sequence, "cpu", torch.float32)
        yield as_built(module, inputs)
        if inputs.pop("labels", None) is not None:
            yield as_built(module, inputs)


def as_built(module: torch.nn.Module, inputs: dict[str, Any]) -> Built:
    """A model with its inputs: token ids come first, unless it reads something else."""
    return Built(module, (), inputs, own_inputs=next(iter(inputs)) != "input_ids")


def _inputs(module: Any, batch: int, sequence: int | None, precision: torch.dtype) -> dict[str, Any]:
    """What the model is called with: images or sound as its config describes them, else token ids; both if it compares them."""
    config, name = module.config, getattr(module, "main_input_name", "input_ids")
    accepted = inspect.signature(module.forward).parameters
    if _compares(accepted):
        images, texts = _images(config, batch, precision), _ids(batch, _given(sequence))
        return {"pixel_values": images, "input_ids": texts, "return_loss": True}
    match name:
        case "pixel_values":
            inputs = {name: _images(config, batch, precision)}
        case "input_features" if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
            inputs = {name: _floats((batch, config.num_mel_bins, 2 * config.max_source_positions), precision)}
        case "input_values" if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
            inputs = {name: _floats((batch, config.max_length, config.num_mel_bins), precision)}
        case "input_values" if not hasattr(config, "num_mel_bins"):  # sound as it was recorded
            inputs = {name: _floats((batch, sequence or USUAL_SOUND), precision)}
        case "input_ids" | "decoder_input_ids":
            inputs = {"input_ids": _ids(batch, _given(sequence))}
        case _:
            raise TraceError(f"{type(module).__name__} reads {shown(name)}, whose sizes are not in its config")
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        longest = getattr(config, "max_target_positions", None)
        inputs["decoder_input_ids"] = _ids(batch, longest if sequence is None and longest else _given(sequence))
    required = accepted.get("input_ids")
    if required is not None and required.default is inspect.Parameter.empty and "input_ids" not in inputs:
        inputs["input_ids"] = _ids(batch, _given(sequence))
    return inputs


def _compares(accepted: Mapping[str, Any]) -> bool:
    """Whether a forward pass with these arguments compares images with texts, as CLIP does."""
    return {"pixel_values", "input_ids", "return_loss"} <= accepted.keys()


def _images(config: Any, batch: int, precision: torch.dtype) -> torch.Tensor:
    vision = getattr(config, "vision_config", None) or config
    image = getattr(vision, "image_size", None) or USUAL_IMAGE
    height, width = image if isinstance(image, (list, tuple)) else (image, image)
    frames = (vision.num_frames,) if isinstance(getattr(vision, "num_frames", None), int) else ()
    return _floats((batch, *frames, getattr(vision, "num_channels", 3), height, width), precision)


def training_inputs(module: Any, batch: int, sequence: int | None, device: str, precision: torch.dtype) -> dict[str, Any]:
    """Random inputs on the device of a model, with labels where it computes its own loss."""
    inputs = _inputs(module, batch, sequence, precision)
    filled = {
        name: _filled(value, module, device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
    }
    if (labels := _labels(module, inputs)) is None:
        return filled
    same = next((name for name, tensor in inputs.items() if tensor is labels), None)
    return {**filled, "labels": filled[same] if same is not None else _filled(labels, module, device)}


def _filled(tensor: torch.Tensor, module: Any, device: str) -> torch.Tensor:
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, dtype=tensor.dtype, device=device)
    known = getattr(module.config.get_text_config(), "vocab_size", None) if tensor.dim() > 1 else module.config.num_labels
    return torch.randint(int(known or 1), tensor.shape, device=device)


def _given(sequence: int | None) -> int:
    if sequence is None:
        raise TraceError(
            f"the model reads sequences, but {option('sequence_length')} is not given", f"add {option('sequence_length', 'N')}"
        )
    return sequence


def _floats(sizes: tuple[int, ...], precision: torch.dtype) -> torch.Tensor:
    return torch.empty(sizes, dtype=precision, device="meta")


def _ids(batch: int, length: int) -> torch.Tensor:
    return torch.zeros((batch, length), dtype=torch.long, device="meta")


def _labels(module: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Labels from which the model computes its own loss; None where their form is not known."""
    if "labels" not in inspect.signature(module.forward).parameters:
        return None
    ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    if ids is not None:
        return ids
    return torch.zeros(len(inputs["pixel_values"]), dtype=torch.long, device="meta") if "pixel_values" in inputs else None


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
            raise TraceError(f"transformers {transformers.__version__} cannot read this config: {reason(error)}") from error
        config.use_cache = config.get_text_config().use_cache = False
        if device == "meta":  # the loss that balances experts counts tokens, which have no values there
            config.get_text_config().output_router_logits = False
        config.architectures = []  # not None: where a type has several classes, transformers looks them up there
        for part in (config, config.get_text_config()):
            for name in _RANDOM:
                if value := getattr(part, name, None):
                    setattr(part, name, type(value)(0))
        module = _instantiate(transformers, config, device, precision)
    module.train()
    return module


_RANDOM = ("apply_spec_augment", "layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""Settings that mask at random places, which have no values on the meta device, or leave out layers at random."""

# Keys that belong to a stored checkpoint. For the shapes of training they have no meaning, or do harm (a quantizer or a kernel to
# import, code to run).
_STORAGE_ONLY_KEYS = frozenset(
    {"architectures", "torch_dtype", "dtype", "transformers_version", "quantization_config", "auto_map", "_name_or_path"}
    | {"attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"}
)


def _without_storage(config: Any) -> Any:
    """The config, and the configs inside it, without those keys. transformers writes infinity as {"__float__": "Infinity"}."""
    if isinstance(config, list):
        return [_without_storage(value) for value in config]
    if not isinstance(config, dict):
        return config
    if config.keys() == {"__float__"}:
        with contextlib.suppress(TypeError, ValueError):
            return float(config["__float__"])
    return {key: _without_storage(value) for key, value in config.items() if key not in _STORAGE_ONLY_KEYS}


def _instantiate(transformers: Any, config: Any, device: str, precision: torch.dtype) -> torch.nn.Module:
    """The class that is trained with this config: a language model if there is one, else the bare model."""
    causal, masked, bare = transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM, transformers.AutoModel
    pairs = [transformers.AutoModelForSeq2SeqLM, transformers.AutoModelForSpeechSeq2Seq]
    # Older versions do not have all of them.
    mixed = [getattr(transformers, f"AutoModelFor{kind}", None) for kind in ("ImageTextToText", "MultimodalLM")]
    senses = [transformers.AutoModelForImageClassification, transformers.AutoModelForAudioClassification]
    if getattr(config, "is_encoder_decoder", False):
        order = [*pairs, causal, *mixed, masked, bare]
    elif type(config) in masked._model_mapping and not getattr(config, "is_decoder", False):
        order = [masked, causal, bare]
    else:
        forward = getattr(bare._model_mapping.get(type(config), None), "forward", None)  # None: no class, or several
        compares = forward is not None and _compares(inspect.signature(forward).parameters)
        order = [causal, *pairs, *mixed, masked, *([] if compares else senses), bare]
    known = [auto for auto in order if auto is not None and type(config) in auto._model_mapping]
    if not known:
        raise TraceError(f"transformers {transformers.__version__} has no model class for model_type {config.model_type!r}")
    errors = []
    for attention in ("sdpa", "eager"):
        try:
            with torch.device(device):
                module = known[0].from_config(config, attn_implementation=attention, dtype=precision)
        except (ValueError, ImportError) as error:  # "does not support SDPA", "requires the package …"
            errors.append(reason(error))
            continue
        with contextlib.suppress(AttributeError, ValueError, KeyError):
            module.set_experts_implementation("grouped_mm")
        return module
    raise TraceError(f"transformers {transformers.__version__} cannot build this config: {errors[-1]}")


def causal(module: torch.nn.Module, masks: Mapping[str, int]) -> bool | None:
    """Whether the attention of a Hugging Face model is causal; None: not known.

    `masks` count how its attentions were called. Where a mask tensor or unfused attention hides this, attributes of the modules
    tell.
    """
    by_call = {kind == "causal" for kind in ("causal", "none") if masks.get(kind)}
    by_module = {bool(part.is_causal) for part in module.modules() if isinstance(getattr(part, "is_causal", None), bool)}
    causal = by_call or by_module
    return causal.pop() if len(causal) == 1 else None


_WINDOW_WITHOUT_KIND = frozenset({"minimax"})  # its layer_types call attention full, with a window too
_WINDOWED = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")


def windows(config: Any) -> tuple[int | None, ...] | None:
    """The sliding window or the chunk of each layer, from the configuration with its defaults.

    ModernBERT's window counts both sides, Gemma's one where its attention is not causal.
    """
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        return None
    window = _declared(config, "local_attention") or _declared(config, "sliding_window") or None
    kinds = _declared(config, "layer_types")
    if window and (getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", None) is True):
        window = (window - 1) * 2
    if kinds is None or config.model_type in _WINDOW_WITHOUT_KIND:  # a family with the window in every layer, or in none
        return (window,) * layers
    reach = {**dict.fromkeys(_WINDOWED, window), "chunked_attention": _declared(config, "attention_chunk_size")}
    return tuple(reach.get(kind) for kind in kinds)


def _declared(config: Any, name: str) -> Any:
    """A setting that the configuration class knows. The file may have others, which the code does not read."""
    known = hasattr(type(config), name) or name in inspect.signature(type(config).__init__).parameters
    known = known or name in type(config).attribute_map
    return getattr(config, name, None) if known else None
