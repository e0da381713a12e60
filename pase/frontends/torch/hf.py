"""Builds models of the transformers library by name or configuration, on meta tensors. Nothing is downloaded.

A model that is given by its class has the defaults of its configuration class, which are those of a published model.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pase.errors import PaseError, did_you_mean, install_line
from pase.files.codec import read_json
from pase.files.json_values import JsonObject

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor
    from torch.nn import Module

__all__ = ["PREFIX", "build"]

PREFIX = "hf:"
_BATCH, _SEQUENCE = 8, 512
_HEADS = ("LM", "Classification", "Generation", "Answering", "LMHeadModel", "CTC", "MultipleChoice")
"""Endings of the names of classes that return a loss."""


def build(name: str) -> tuple[Module, tuple[dict[str, Tensor]]]:
    """(module, (batch,)) for ``hf:CLASS?setting=value&…``, with meta tensors: 405 B parameters need no memory.

    In place of CLASS there may be a configuration: a config.json, a folder that has one, or the name of a model whose
    config.json is in the cache of the Hugging Face Hub. It also gives the dtype, if it names one.

    A setting is a field of the class's configuration (``text_config.hidden_size=512`` for a nested one), or ``batch``,
    ``sequence`` or ``dtype``. ``sequence`` is by default as long as the model's positions allow, but at most 512. The
    batch has labels, so that the model returns its loss.
    """
    import torch

    try:
        import transformers
    except ModuleNotFoundError:
        raise PaseError(
            "reading it needs the transformers package", where=name, fix=f"run: {install_line('exports')}"
        ) from None
    class_name, _, query = name.removeprefix(PREFIX).partition("?")
    found = _configuration(name, class_name)
    made = _class(transformers, class_name if found is None else _architecture(name, found))
    settings = _settings(name, query)
    batch, sequence = (_size(name, settings, k) for k in ("batch", "sequence"))
    own = found or {}
    dtype = settings.pop("dtype", own.get("dtype") or own.get("torch_dtype") or "float32")
    known = getattr(torch, str(dtype), None)
    if not isinstance(known, torch.dtype) or not known.is_floating_point:
        raise PaseError(
            f"dtype={dtype} is not a dtype for parameters", where=name, fix="use float32, bfloat16 or float16"
        )
    before = torch.get_default_dtype()
    torch.set_default_dtype(known)
    try:
        config = _config(name, made.config_class, settings, own)
        with torch.device("meta"):
            module = made(config)
            example = _example(name, module, batch or _BATCH, sequence)
    except PaseError:
        raise
    except Exception as e:
        said = " ".join(str(e).split())
        raise PaseError(f"transformers cannot build it: {type(e).__name__}: {said}", where=name) from e
    finally:
        torch.set_default_dtype(before)
    return module, (example,)


def _configuration(name: str, text: str) -> JsonObject | None:
    """The contents of the config.json that a name refers to; None if the name is that of a class."""
    if text.isidentifier():
        return None
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    elif path.suffix != ".json":
        path = _cached(name, text)
    data = read_json(path, "a configuration", 16 << 20)
    if not isinstance(data, dict):
        raise PaseError("it is not a configuration, which is one JSON object", where=str(path))
    return data


def _cached(name: str, model: str) -> Path:
    """The config.json of a model of the Hub that was downloaded before."""
    from transformers.utils import cached_file

    try:
        found = cached_file(model, "config.json", local_files_only=True)
    except (OSError, ValueError):  # it is not in the cache, or is no name of a model
        found = None
    if not isinstance(found, str):
        raise PaseError(
            f"'{model}' is no class, no config.json, no folder that has one, and no model in the Hub's cache",
            where=name,
            fix=f"write hf:./config.json, or download the model's configuration: hf download {model} config.json",
        )
    return Path(found)


def _architecture(name: str, config: JsonObject) -> str:
    """The class of transformers that a configuration names."""
    named = config.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        raise PaseError(
            "it names no class in 'architectures'",
            where=name,
            fix='add "architectures": ["LlamaForCausalLM"], say',
        )
    return named[0]


def _class(transformers: ModuleType, name: str) -> Any:
    found = getattr(transformers, name, None) if name.isidentifier() else None
    if getattr(found, "config_class", None) is None:
        heads = (n for n in dir(transformers) if n.endswith(_HEADS))
        raise PaseError(
            f"transformers has no model class '{name}'{did_you_mean(name, heads)}",
            fix="write, for example, hf:LlamaForCausalLM?num_hidden_layers=2&batch=8&sequence=512",
        )
    return found


def _settings(name: str, query: str) -> JsonObject:
    """The ``key=value`` pairs of a name. Values are read as JSON, or else as strings."""
    out: JsonObject = {}
    for pair in query.split("&") if query else ():
        key, equals, text = pair.partition("=")
        if not equals or not key or key in out:
            raise PaseError(
                f"'{pair}' is not a setting, or is given twice",
                where=name,
                fix="write CLASS?key=value&key=value",
            )
        try:
            out[key] = json.loads(text)
        except ValueError:
            out[key] = {"True": True, "False": False, "None": None}.get(text, text)
    return out


def _size(name: str, settings: JsonObject, key: str) -> int | None:
    value = settings.pop(key, None)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise PaseError(f"{key}={value} is not a positive whole number", where=name)
    return value


def _config(name: str, kind: Any, settings: JsonObject, own: JsonObject) -> Any:
    """A configuration with the class's defaults, its own fields and these settings. The constructor derives other
    fields from them. own: the fields of a config.json."""
    plain = {k: v for k, v in settings.items() if "." not in k}
    config = kind.from_dict(own)
    for key in plain:
        _part(name, config, key)
    if hasattr(config, "use_cache"):
        plain = {"use_cache": False} | plain
    config = kind.from_dict({**own, **plain})
    for path in settings.keys() - plain.keys():
        part, key = _part(name, config, path)
        setattr(part, key, settings[path])
    if (
        getattr(config, "is_encoder_decoder", False)
        and getattr(config, "decoder_start_token_id", None) is None
    ):
        config.decoder_start_token_id = (
            0  # some classes have no default; the choice of the token does not affect the cost
        )
    return config


def _part(name: str, config: Any, path: str) -> tuple[Any, str]:
    """The part of the configuration that holds a setting, and the setting's name there."""
    *outer, key = path.split(".")
    for part in outer:
        config = getattr(config, part, None)
    if not hasattr(config, key):
        have = sorted(k for k in vars(config) if not k.startswith("_")) if config is not None else []
        raise PaseError(
            f"the model's configuration has no '{path}'{did_you_mean(key, have)}",
            where=name,
        )
    return config, key


def _example(name: str, module: Any, batch: int, sequence: int | None) -> dict[str, Tensor]:
    """An example batch: inputs in the form that the model's main input needs, and labels for its head."""
    import torch

    config = module.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = ("max_position_embeddings", "n_positions", "max_target_positions")
    most = next((m for n in names if (m := getattr(text, n, None))), _SEQUENCE)
    length = sequence or min(_SEQUENCE, most)
    ids = torch.zeros(batch, length, dtype=torch.int64)
    main = module.main_input_name
    example = {main: ids}
    if main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        side = getattr(vision, "image_size", 224)
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        example = {
            main: torch.zeros(batch, getattr(vision, "num_channels", 3), height, width, dtype=module.dtype)
        }
    elif main == "input_features":
        bins, frames = config.num_mel_bins, 2 * config.max_source_positions
        example = {main: torch.zeros(batch, bins, frames, dtype=module.dtype)}
    elif main != "input_ids":
        raise PaseError(
            f"pase cannot make an example of the input '{main}'",
            where=name,
            fix="build the module in Python and give it to pase with a batch",
        )
    taken = inspect.signature(module.forward).parameters
    if (
        "labels" not in taken and {"start_positions", "end_positions"} <= taken.keys()
    ):  # a question-answering head, whose labels are the ends of the answer
        return {
            **example,
            **{k: torch.zeros(batch, dtype=torch.int64) for k in ("start_positions", "end_positions")},
        }
    if "labels" not in taken:
        raise PaseError(
            "the model takes no labels, and therefore returns no loss",
            where=name,
            fix="name a class with a head (…ForCausalLM)",
        )
    kind = type(module).__name__
    one = kind.endswith(("SequenceClassification", "ImageClassification", "MultipleChoice"))
    return {**example, "labels": torch.zeros(batch, dtype=torch.int64) if one else ids}
