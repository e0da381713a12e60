"""Reads the model that a ``.keras`` file describes. No weight is read, and no code but Keras's own is run."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.files.codec import parse_json
from pase.files.json_values import Json
from pase.frontends.tf.sources import short

if TYPE_CHECKING:
    from keras import Model as KerasModel

__all__ = ["keras_model"]

_CONFIG = "config.json"
_MOST_BYTES = 64 << 20
_OWN = "keras"


def keras_model(path: Path) -> KerasModel:
    """The model in a file, with newly initialized weights and with the loss that it was compiled with.

    Raises PaseError if it is no Keras file, or if it names a custom class, which would have to be imported.
    """
    config = parse_json(_config(path), f"{path}, {_CONFIG}")
    for module in _modules(config):
        if module != _OWN and not module.startswith(f"{_OWN}."):
            raise PaseError(
                f"it contains an object of '{module}', which is not part of Keras, and pase imports no modules that a "
                f"file names",
                where=str(path),
                fix="load the model yourself and give it to pase.compile",
            )
    import keras

    try:
        return keras.saving.deserialize_keras_object(config, safe_mode=True)
    except (
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        IndexError,
        NotImplementedError,
        ImportError,
        RecursionError,
    ) as e:
        raise PaseError(f"Keras cannot build the model: {short(e)}", where=str(path)) from e


def _config(path: Path) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            size = archive.getinfo(_CONFIG).file_size
            if size > _MOST_BYTES:
                raise PaseError(
                    f"its {_CONFIG} has {size} bytes, but pase reads at most {_MOST_BYTES}", where=str(path)
                )
            with archive.open(_CONFIG) as f:
                return f.read(_MOST_BYTES + 1)
    except KeyError as e:
        raise PaseError(f"it is not a Keras file: it does not contain {_CONFIG}", where=str(path)) from e
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError) as e:  # damaged, or encrypted
        raise PaseError(f"it is not a Keras file, or cannot be read: {short(e)}", where=str(path)) from e
    except OSError as e:
        raise PaseError(f"cannot read it: {e.strerror or e}", where=str(path)) from e


def _modules(config: Json) -> Iterator[str]:
    """The modules of all objects that a configuration names, including nested ones."""
    left = [config]
    while left:
        at = left.pop()
        if isinstance(at, dict):
            module = at.get("module")
            if "class_name" in at and module is not None:
                yield module if isinstance(module, str) else json.dumps(module)
            left += at.values()
        elif isinstance(at, list):
            left += at
