"""Reads a model's sizes from words, a config file in the form of Hugging Face, or a script that builds the model."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdkit.optional_import import optional_import
from hvdkit_planner.errors import PlanError
from hvdkit_planner.layout import Transformer

# A size -> its names in configurations of Llama and Mistral, GPT-2, GPT-NeoX, OPT, BLOOM, Falcon, MPT.
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model", "hidden_dim", "n_embed"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "sequence": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
    "vocabulary": ("vocab_size",),
    "feedforward": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
}
_GATED = ("llama", "mistral", "qwen", "gemma", "phi3", "olmo", "granite", "starcoder3")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def read_model(text: str, sizes: Mapping[str, int]) -> Transformer:
    """Read a model: `hidden=4096,layers=32,heads=32`, a config.json or its folder, or `train.py:build`.

    sizes: sizes from options, which replace the model's own. Raises PlanError for a model that cannot be read.
    """
    path, _, function = text.partition(":")
    if path.endswith(".py"):
        return _from_script(Path(path), function or "build_model", sizes)
    if "=" in text:
        return _from_words(text, sizes)
    file = Path(text) / "config.json" if Path(text).is_dir() else Path(text)
    try:
        document = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise PlanError(
            f"the model {text} cannot be read: {error.strerror}. Give a config.json (models are not known by name), "
            "a script train.py:build, or sizes such as hidden=4096,layers=32,heads=32,sequence=2048."
        ) from None
    except ValueError as error:
        raise PlanError(f"{file} is no JSON: {error}. Give the config.json of a transformer.") from None
    if not isinstance(document, dict):
        raise PlanError(f"{file} holds a {type(document).__name__}. Give the config.json of a transformer, an object.")
    return from_config(document, sizes, str(file))


def from_config(document: Mapping[str, Any], sizes: Mapping[str, int], where: str) -> Transformer:
    """Take the sizes from a configuration in the form of Hugging Face. Raises PlanError if some are missing."""
    for name in _EXPERTS:
        if int(document.get(name) or 0) > 1:
            raise PlanError(
                f"{where} has {name} {document[name]}: mixtures of experts are not planned, only dense models."
            )
    values = {size: document[name] for size, names in _NAMES.items() for name in names if document.get(name)}
    values |= sizes
    kind = str(document.get("model_type", "")).lower()
    gated = kind.startswith(_GATED)
    tied = bool(document.get("tie_word_embeddings", not gated))
    positions = kind in ("gpt2", "opt", "gpt_bigcode", "openai-gpt") or not kind
    return _build(values, where, gated=gated, tied=tied, positions=positions and not gated)


def _from_words(text: str, sizes: Mapping[str, int]) -> Transformer:
    values: dict[str, Any] = {}
    for word in text.split(","):
        name, _, value = word.partition("=")
        if name.strip() not in _NAMES or not value.strip().isdigit():
            raise PlanError(f"{word!r} is no size of a model. Write NAME=NUMBER with {', '.join(_NAMES)}.")
        values[name.strip()] = int(value)
    return _build({"sequence": 2048, **values, **sizes}, text)


def _build(values: Mapping[str, Any], where: str, **options: bool) -> Transformer:
    missing = [name for name in ("hidden", "layers", "heads", "sequence") if name not in values]
    if missing:
        raise PlanError(
            f"{where} does not say {', '.join(missing)}. Add {' '.join(f'--{name} N' for name in missing)}."
        )
    try:
        return Transformer(**{name: int(value) for name, value in values.items()}, **options)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"{where} has a size that is no number: {error}.") from None


def _from_script(path: Path, function: str, sizes: Mapping[str, int]) -> Transformer:
    """Call a function of a script, on torch's meta device, where parameters take no memory."""
    torch = optional_import("torch", "torch")
    spec = importlib.util.spec_from_file_location("hvdkit_planned_script", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise PlanError(f"there is no script {path}. Give FILE.py:FUNCTION, which returns the model.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, function):
            raise PlanError(f"{path} has no function {function}. Give {path}:FUNCTION, which returns the model.")
        with torch.device("meta"):
            built = getattr(module, function)()
    except PlanError:
        raise
    except Exception as error:  # any error of the script
        raise PlanError(f"{path}:{function} cannot build the model: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    config: Any = getattr(built, "config", None)
    if hasattr(config, "to_dict"):
        return from_config(config.to_dict(), sizes, f"{path}:{function}")
    return from_module(built, sizes, f"{path}:{function}")


def from_module(built: Any, sizes: Mapping[str, int], where: str) -> Transformer:
    """Find the sizes in a torch.nn.Module: the block that is repeated most, its matrices, the embedding, the heads.

    Raises PlanError if no block is repeated, or if a required size is missing.
    """
    torch = optional_import("torch", "torch")
    children = [list(module.children()) for module in built.modules()]
    alike = [Counter(_shapes(child) for child in group if _shapes(child)) for group in children]
    blocks = [(count, shape) for group in alike for shape, count in group.items() if count > 1 and len(shape) > 2]
    if not blocks:
        raise PlanError(
            f"{where} has no block that is repeated, as transformers have. Give its sizes as words instead."
        )
    layers, shape = max(blocks, key=lambda block: block[0] * sum(map(math.prod, block[1])))
    matrices = [size for size in shape if len(size) == 2]
    hidden = Counter(side for size in matrices for side in size).most_common(1)[0][0]
    found: dict[str, Any] = {"hidden": hidden, "layers": layers}
    wide = [max(size) for size in matrices if hidden in size and max(size) not in (hidden, 3 * hidden)]
    found |= {"feedforward": max(wide)} if wide else {}
    tables = [module for module in built.modules() if isinstance(module, torch.nn.Embedding)]
    found |= {"vocabulary": max(table.num_embeddings for table in tables)} if tables else {}
    if len(tables) > 1:
        found["sequence"] = min(table.num_embeddings for table in tables)
    for module in built.modules():
        heads = next(
            (getattr(module, name) for name in ("num_heads", "n_head", "n_heads", "heads") if hasattr(module, name)), 0
        )
        if isinstance(heads, int) and heads:
            found["heads"] = heads
            break
    gated = sum(found.get("feedforward") in size for size in matrices) == 3
    outputs = [
        m for m in built.modules() if isinstance(m, torch.nn.Linear) and m.out_features == found.get("vocabulary")
    ]
    tied = not outputs or any(outputs[0].weight is table.weight for table in tables)
    return _build({**found, **sizes}, where, gated=gated, tied=tied, positions=len(tables) > 1)


def _shapes(module: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(parameter.shape) for parameter in module.parameters())
