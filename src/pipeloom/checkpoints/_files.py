"""What is on disk: directories of safetensors files, and the one small file that says which of them are the checkpoint.

path/
  checkpoint.json             what is saved, and the size and digest of every file; replacing it is what saves
  save-<32 hex digits>/
    model/                    parameters and buffers
    training/                 optimizer state and random states
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from pipeloom.checkpoints._plain import decode
from pipeloom.errors import CheckpointError

MODEL, TRAINING = "model", "training"
_MANIFEST = "checkpoint.json"
_SAVE = re.compile(r"save-[0-9a-f]{32}")
_FORMAT = 1


@contextmanager
def saving(path: Path, directory: str) -> Iterator[None]:
    """Make `directory` in `path`, for a save; it goes again if the save fails. Others cannot save there meanwhile.

    Raises:
        CheckpointError: others are saving there.
        OSError: it cannot be made.
    """
    path.mkdir(parents=True, exist_ok=True)
    with _only_saver(path):
        try:
            for folder in (MODEL, TRAINING):
                (path / directory / folder).mkdir(parents=True)
            yield
        except BaseException:
            if _current(path) != directory:
                shutil.rmtree(path / directory, ignore_errors=True)
            raise


def write(directory: Path, folder: str, tensors: Mapping[str, Tensor], number: int, count: int) -> dict[str, Any]:
    """Write `tensors`, or this rank's shards of them, to one file, if there are any.

    Args:
        directory: where the save goes.
        folder: MODEL or TRAINING, in it.
        tensors: by the names under which they are saved.
        number: the number of the file, from 1.
        count: how many files there may be.

    Returns:
        Size and digest, by the file's name in `directory`.
    """
    if not tensors:
        return {}
    packed = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    writer = HuggingFaceStorageWriter(os.fspath(directory / folder), dict.fromkeys(packed, number) | {"": count})
    planner = DefaultSavePlanner()
    planner.set_up_planner(packed, is_coordinator=True)
    writer.set_up_storage_writer(True)
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    writer.write_data(planner.finish_plan(plan), planner).wait()
    name = f"{folder}/{_file_name(number, count)}"
    return {name: _measured(directory / name)}


def write_index(directory: Path, folder: str, writer: Mapping[str, int], count: int) -> dict[str, Any]:
    """Write which file holds which tensor, for readers that want to know, where `writer` has the rank; as `write`."""
    names = {name: _file_name(rank + 1, count) for name, rank in sorted(writer.items())}
    index = f"{folder}/model.safetensors.index.json"
    _write_text(directory / index, json.dumps({"weight_map": names}, indent=1))
    return {index: _measured(directory / index)}


def read_tensors(directory: Path, into: Mapping[str, Tensor]) -> None:
    """Fill the tensors of `into` from the files in `directory`."""
    if not into:
        return
    reader = HuggingFaceStorageReader(os.fspath(directory))
    metadata = reader.read_metadata()
    planner = DefaultLoadPlanner()
    planner.set_up_planner(dict(into), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    (plan,) = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    (plan,) = reader.prepare_global_plan([plan])
    reader.read_data(planner.finish_plan(plan), planner).wait()


def commit(path: Path, directory: str, content: Mapping[str, Any]) -> None:
    """Make `directory`, which is in `path`, the checkpoint, with all of `content`; then drop all other saves.

    A kill or power failure at any moment leaves the one before or this one.

    Raises:
        CheckpointError: some of the files that ranks have written are not there.
    """
    if absent := sorted(content["files"].keys() - _files_in(path / directory)):
        reason = f"{absent[0]} is not where rank 0 looks for it, in {path / directory}; all ranks need the same path"
        raise CheckpointError(os.fspath(path), "saved", [reason])
    for folder in (path / directory / MODEL, path / directory / TRAINING, path / directory, path):
        _synchronise(folder)
    body = {"format": _FORMAT, "directory": directory, **content}
    temporary = path / directory / _MANIFEST
    _write_text(temporary, json.dumps({"checkpoint": body, "sha256": _digest(body)}))
    os.replace(temporary, path / _MANIFEST)
    _synchronise(path)
    for entry in path.iterdir():
        if _SAVE.fullmatch(entry.name) and entry.name != directory:
            shutil.rmtree(entry, ignore_errors=True)


def saved(path: Path) -> bool:
    """Whether anything was ever saved to `path`."""
    return (path / _MANIFEST).exists()


def manifest(path: Path) -> dict[str, Any]:
    """What `commit` wrote to `path`.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    file = path / _MANIFEST
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(os.fspath(path), "loaded", [f"there is no checkpoint here: no {file}"]) from None
    try:
        whole = json.loads(text)
        body: dict[str, Any] = whole["checkpoint"]
        sound = whole["sha256"] == _digest(body)
    except (ValueError, TypeError, KeyError):
        sound = False
    if not sound:
        raise CheckpointError(os.fspath(path), "loaded", [f"{file} is damaged: it is not what was saved"])
    if body["format"] != _FORMAT:
        reason = f"{file} has format {body['format']}, and this version of pipeloom reads format {_FORMAT}"
        raise CheckpointError(os.fspath(path), "loaded", [reason])
    return body


def saved_values(path: Path) -> dict[str, Any]:
    """The `values` that were saved to `path`, without loading anything.

    Raises:
        CheckpointError: there is no checkpoint, or what describes it is damaged.
    """
    values: dict[str, Any] = decode(manifest(path)["values"])
    return values


def damage(directory: Path, files: Mapping[str, Any], share: int, shares: int) -> Iterator[str]:
    """What is wrong with the files of a checkpoint; of their contents, one part of `shares` is examined."""
    there = _files_in(directory)
    yield from (f"{directory / name} is missing" for name in sorted(files.keys() - there))
    yield from (f"{directory / name} is no part of what was saved" for name in sorted(there - files.keys()))
    for name in sorted(files.keys() & there)[share::shares]:
        found, saved = _measured(directory / name), files[name]
        if found["bytes"] != saved["bytes"]:
            yield f"{directory / name} has {found['bytes']} bytes, and was saved with {saved['bytes']}"
        elif found != saved:
            yield f"{directory / name} is damaged: its bytes are not those that were saved"


@contextmanager
def _only_saver(path: Path) -> Iterator[None]:
    """Keep others from saving to `path` meanwhile, where the file system knows locks."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reason = "others are saving to it; replicas save together: group= names the ranks of all"
            raise CheckpointError(os.fspath(path), "saved", [reason]) from None
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)


def _current(path: Path) -> str | None:
    try:
        found: str = manifest(path)["directory"]
    except (CheckpointError, OSError):
        return None
    return found


def _file_name(number: int, count: int) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"


def _measured(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _files_in(directory: Path) -> set[str]:
    return {file.relative_to(directory).as_posix() for file in directory.rglob("*") if not file.is_dir()}


def _digest(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _synchronise(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
