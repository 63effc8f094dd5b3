"""Damaged copies of a checkpoint: its headers, index, configuration and sizes, not its numbers."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

VALUES = [None, -1, 0, 1, 3, 4, 8, 16, 1.5, 10**9, True, False, "", "x", "re:(", [], [1], {}, "int"]
DTYPES = ["F32", "F64", "I32", "I64", "U8", "I8", "BOOL", "F8_E4M3", "x"]
Entry = dict[str, Any]


def damaged(directory: Path, target: Path, seed: int) -> str:
    """Copy a checkpoint with one fault; return what it is."""
    shutil.copytree(directory, target)
    dice = random.Random(seed)
    kind = dice.choice(KINDS)
    return f"{kind.__name__}: {kind(target, dice)}"


def _bytes(directory: Path, dice: random.Random) -> str:
    """Replace some bytes of a header."""
    file = dice.choice(sorted(directory.glob("*.safetensors")))
    data = bytearray(file.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    places = [dice.randrange(end) for _ in range(dice.choice([1, 1, 3]))]
    for place in places:
        data[place] = dice.choice([data[place] ^ 1 << dice.randrange(8), dice.choice(b'0123"}],F')])
    file.write_bytes(data)
    return f"{places} of {file.name}"


def _size(directory: Path, dice: random.Random) -> str:
    """Truncate a file, or make it longer."""
    file = dice.choice([path for path in sorted(directory.iterdir()) if path.suffix != ".md"])
    data = file.read_bytes()
    size = dice.choice([0, 7, dice.randrange(len(data)), len(data) - 1, len(data) + 8])
    file.write_bytes(data[:size].ljust(size, b"\0"))
    return f"{size} of {len(data)} bytes of {file.name}"


def _header(directory: Path, dice: random.Random) -> str:
    """Change an entry of a header."""
    file = dice.choice(sorted(directory.glob("*.safetensors")))
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    name = dice.choice([name for name in header if name != "__metadata__"])
    change = dice.choice(ENTRIES)
    change(header, name, dice)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    return f"{change.__name__} of {name}: {header.get(name)}"


def _other_dtype(header: Entry, name: str, dice: random.Random) -> None:
    header[name]["dtype"] = dice.choice(DTYPES)


def _other_shape(header: Entry, name: str, dice: random.Random) -> None:
    shape = header[name]["shape"]
    shapes = [shape[::-1], [*shape, 1], [1, *shape], shape[:-1], [extent + 1 for extent in shape]]
    header[name]["shape"] = dice.choice([other for other in shapes if other != shape])


def _other_place(header: Entry, name: str, dice: random.Random) -> None:
    offsets = header[name]["data_offsets"]
    offsets[dice.randrange(2)] += dice.choice([-4, 4, 1, 1 << 40])


def _no_entry(header: Entry, name: str, dice: random.Random) -> None:
    del header[name]


def _other_name(header: Entry, name: str, dice: random.Random) -> None:
    ends = ["", "_scale", "_packed", "_zero_point", "_shape", "_g_idx"]
    new_name = name.rpartition(".")[0] + ".weight" + dice.choice(ends)
    entry = header.pop(name)
    if new_name not in header:
        header[new_name] = entry


def _more_names(header: Entry, name: str, dice: random.Random) -> None:
    header[name + dice.choice(["_zero_point", "_g_idx", "x"])] = header[name]


ENTRIES: list[Callable[[Entry, str, random.Random], None]]
ENTRIES = [_other_dtype, _other_shape, _other_place, _no_entry, _other_name, _more_names]


_REPEATED = ("weight_shape", "g_idx")
"""The ends of the names of tensors that repeat what the configuration says."""


def _repeated(directory: Path, dice: random.Random) -> str:
    """Change a number of a tensor that repeats the configuration; a header if there are none."""
    files = sorted(directory.glob("*.safetensors"))
    for file in dice.sample(files, len(files)):
        data = bytearray(file.read_bytes())
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        names = [name for name in header if name.endswith(_REPEATED)]
        if names:
            name = dice.choice(names)
            place = end + dice.randrange(*header[name]["data_offsets"])
            data[place] ^= 1 << dice.randrange(8)
            file.write_bytes(data)
            return f"byte {place} of {name}"
    return _bytes(directory, dice)


def _scheme(directory: Path, dice: random.Random) -> str:
    """Change a value of the scheme, at any depth, or leave it out."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    parent: Any = config
    key: Any = "quantization_config"
    path = [key]
    while isinstance(parent[key], dict | list) and parent[key] and dice.random() < 0.85:
        parent = parent[key]
        key = dice.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        path.append(key)
    if dice.random() < 0.2:
        del parent[key]
    else:
        parent[key] = dice.choice(VALUES)
    file.write_text(json.dumps(config))
    return f"{path} = {parent.get(key, 'left out') if isinstance(parent, dict) else parent}"


def _sizes(directory: Path, dice: random.Random) -> str:
    """Change a size of the model."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    names = ["hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "head_dim"]
    if "num_experts" in config:
        names = ["num_experts", "moe_intermediate_size", names[0], *names[2:]]
    name = dice.choice([*names, "num_attention_heads", "num_key_value_heads"])
    config[name] = dice.choice([1, 2, 3, config[name] + 1, config[name] + 16, config[name] * 2])
    if name == "num_hidden_layers":
        config.pop("layer_types", None)
    file.write_text(json.dumps(config))
    return f"{name} = {config[name]}"


def _index(directory: Path, dice: random.Random) -> str:
    """Change an entry of the index."""
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    name = dice.choice(list(index["weight_map"]))
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    index["weight_map"][name] = dice.choice([*files, "other.safetensors", "../x", "", 1, None])
    if dice.random() < 0.3:
        index["weight_map"][name + "_g_idx"] = index["weight_map"].pop(name)
    file.write_text(json.dumps(index))
    return f"{name}: {index['weight_map'].get(name)}"


KINDS: list[Callable[[Path, random.Random], str]]
KINDS = [_bytes, _size, _header, _header, _repeated, _scheme, _scheme, _sizes, _index]
