"""A value as a header and dense tensors, and back.

The header is a small typed text in bytes: a mark for each node of the value, then what the mark asks for. It is read by
a reader that refuses whatever it does not know, and nothing is unpickled. Equal layouts have equal headers, so what was
read once is remembered.

N T F              None, True, False
i  s  b            an int (signed, as many bytes as it needs), a str in UTF-8, bytes: a length, then so many bytes
f  c               a float, a complex
l  t  d            a list, a tuple, a dict: a count, then the nodes; a dict's keys are s or i nodes before each value
X                  a tensor: dtype, flags, dimensions, each size, and each stride unless the tensor is contiguous
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch

from pipeloom.errors import MessageError
from pipeloom.runtime.transport._interface import Tree

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.complex32, torch.complex64, torch.complex128,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip
"""The types that cross; a header names one by its place here."""

LARGEST_HEADER = 1 << 24
"""More bytes of plain values than this are refused on both ends."""
DEEPEST = 64
"""Lists, tuples and dicts nested deeper than this are refused on both ends."""
LARGEST_TENSOR = 1 << 46

_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_REQUIRES_GRAD, _STRIDED = 1, 2
_TENSOR = struct.Struct("<cBBB")
_COUNT = struct.Struct("<cI")
_FLOAT = struct.Struct("<cd")
_COMPLEX = struct.Struct("<cdd")


class Spec(NamedTuple):
    """What a receive must allocate. `strides` are in elements, of a dense tensor; `nbytes` is its size."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    nbytes: int

    def allocate(self, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


class Layout(NamedTuple):
    """A header that was read. `build` makes the value of the tensors of `specs`, in their order."""

    specs: tuple[Spec, ...]
    nbytes: int
    build: Callable[[Sequence[torch.Tensor]], Tree]


def pack(value: Tree) -> tuple[bytes, list[torch.Tensor]]:
    """The header of `value` and its tensors, dense; one that was dense is itself, still part of its graph.

    Raises:
        MessageError: `value` holds something that cannot cross.
    """
    if type(value) is torch.Tensor and _is_plain(value):
        return _tensor_header(value.dtype, value.shape, (), value.requires_grad), [value]
    if type(value) is list and len(value) == 1 and type(value[0]) is torch.Tensor and _is_plain(value[0]):
        header, tensors = pack(value[0])  # the gradient of a stage's one input
        return _COUNT.pack(b"l", 1) + header, tensors
    parts: list[bytes] = []
    tensors = []
    _write(value, parts, tensors, [])
    header = b"".join(parts)
    if len(header) > LARGEST_HEADER:
        raise MessageError(
            f"a message holds {len(header)} bytes of plain values and layout, at most {LARGEST_HEADER} cross; "
            "put large data into tensors"
        )
    return header, tensors


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor as bytes."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _write(value: Any, parts: list[bytes], tensors: list[torch.Tensor], place: list[object]) -> None:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        tensor = _dense(value, place)
        strides = () if tensor.is_contiguous() else tensor.stride()
        parts.append(_tensor_header(tensor.dtype, tensor.shape, strides, value.requires_grad))
        tensors.append(tensor)
    elif value is None:
        parts.append(b"N")
    elif kind is bool:
        parts.append(b"T" if value else b"F")
    elif kind is int:
        parts.append(_run(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)))
    elif kind is float:
        parts.append(_FLOAT.pack(b"f", value))
    elif kind is complex:
        parts.append(_COMPLEX.pack(b"c", value.real, value.imag))
    elif kind is str:
        parts.append(_run(b"s", value.encode("utf-8", "surrogatepass")))
    elif kind is bytes:
        parts.append(_run(b"b", value))
    elif kind is list or kind is tuple or kind is dict:
        if len(place) == DEEPEST:
            raise MessageError(f"a message is nested deeper than {DEEPEST} at {_at(place)}; flatten it")
        parts.append(_COUNT.pack(kind.__name__[0].encode(), len(value)))
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            if kind is dict:
                if type(key) is not str and type(key) is not int:
                    _refuse(f"a dict with a key of type {_name(type(key))}", "keys are str or int", place)
                _write(key, parts, tensors, place)
            place.append(key)
            _write(item, parts, tensors, place)
            place.pop()
    else:
        hint = "lists, tuples, dicts, tensors, None, bool, int, float, complex, str and bytes cross"
        for plain in (dict, tuple, list, bool, int, float, str, bytes):
            if isinstance(value, plain):
                hint = f"make it a plain {plain.__name__}"
                break
        _refuse(f"a {_name(kind)}", hint, place)


def _dense(value: torch.Tensor, place: list[object]) -> torch.Tensor:
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        _refuse(
            f"a {_name(type(value))}", "a subclass of Tensor may hold more than its numbers; send a plain tensor", place
        )
    if value.layout is not torch.strided or value.dtype not in _CODES or value.is_meta:
        what = "on the meta device" if value.is_meta else f"of layout {value.layout} and dtype {value.dtype}"
        _refuse(f"a tensor {what}", "dense tensors with data cross", place)
    if _is_plain(value):
        return value
    tensor = value.detach().resolve_conj().resolve_neg()
    if not tensor.is_contiguous() and not _is_dense(tensor.shape, tensor.stride()):
        tensor = tensor.clone(memory_format=torch.preserve_format)
        if not _is_dense(tensor.shape, tensor.stride()):
            tensor = tensor.contiguous()
    return tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory of `tensor` is its elements in order."""
    return (
        tensor.dtype in _CODES
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_meta
    )


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill a run of memory, each once, whatever the order of the dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


@lru_cache(maxsize=1024)
def _tensor_header(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], requires_grad: bool) -> bytes:
    flags = _REQUIRES_GRAD * requires_grad | _STRIDED * bool(strides)
    sizes = (*shape, *strides)
    return _TENSOR.pack(b"X", _CODES[dtype], flags, len(shape)) + struct.pack(f"<{len(sizes)}Q", *sizes)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def _run(mark: bytes, run: bytes) -> bytes:
    return _COUNT.pack(mark, min(len(run), 0xFFFFFFFF)) + run


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _at(place: list[object]) -> str:
    return "value" + "".join(f"[{key!r}]" for key in place)


def _refuse(what: str, hint: str, place: list[object]) -> NoReturn:
    raise MessageError(f"{what} cannot cross to another rank, at {_at(place)}; {hint}")


def read(header: bytes) -> Layout:
    """What `header` describes.

    Raises:
        MessageError: `header` is not one whole header that `pack` writes.
    """
    return _remembered(header) if len(header) <= 4096 else _read(header)


def _read(header: bytes) -> Layout:
    reader = _Reader(header)
    build = reader.node(0)
    if reader.at != len(header):
        reader.fail(f"{len(header) - reader.at} bytes follow the value")
    specs = tuple(reader.specs)
    return Layout(specs, sum(spec.nbytes for spec in specs), build)


_remembered = lru_cache(maxsize=1024)(_read)


_Build = Callable[[Sequence[torch.Tensor]], Tree]


class _Reader:
    def __init__(self, header: bytes) -> None:
        self.header = header
        self.at = 0
        self.specs: list[Spec] = []

    def fail(self, message: str) -> NoReturn:
        raise MessageError(f"a message's header is not readable: {message} (byte {self.at} of {len(self.header)})")

    def take(self, count: int) -> bytes:
        taken = self.header[self.at : self.at + count]
        if len(taken) < count:
            self.fail(f"{count} bytes expected, {len(taken)} left")
        self.at += count
        return taken

    def number(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def node(self, depth: int) -> _Build:
        mark = self.take(1)
        if mark == b"X":
            index = len(self.specs)
            self.specs.append(self.tensor())
            return lambda tensors: tensors[index]
        if mark in (b"l", b"t", b"d"):
            return self.container(mark, depth)
        value = self.plain(mark)
        return lambda _: value

    def container(self, mark: bytes, depth: int) -> _Build:
        if depth == DEEPEST:
            self.fail(f"nested deeper than {DEEPEST}")
        count = self.number()
        if count > len(self.header) - self.at:
            self.fail(f"{count} items are announced")
        keys, items = [], []
        for _ in range(count):
            if mark == b"d":
                keys.append(self.key())
            items.append(self.node(depth + 1))
        if mark == b"l":
            return lambda tensors: [item(tensors) for item in items]
        if mark == b"t":
            return lambda tensors: tuple([item(tensors) for item in items])
        if len(set(keys)) < count:
            self.fail("a key comes twice")
        return lambda tensors: {key: item(tensors) for key, item in zip(keys, items, strict=True)}

    def key(self) -> str | int:
        mark = self.take(1)
        if mark not in (b"s", b"i"):
            self.fail(f"a key is marked {mark!r}")
        key = self.plain(mark)
        assert isinstance(key, str | int)
        return key

    def plain(self, mark: bytes) -> bool | int | float | complex | str | bytes | None:
        match mark:
            case b"N":
                return None
            case b"T" | b"F":
                return mark == b"T"
            case b"i":
                return int.from_bytes(self.take(self.number()), "little", signed=True)
            case b"f":
                return float(struct.unpack("<d", self.take(8))[0])
            case b"c":
                return complex(*struct.unpack("<dd", self.take(16)))
            case b"b":
                return self.take(self.number())
            case b"s":
                try:
                    return self.take(self.number()).decode("utf-8", "surrogatepass")
                except UnicodeDecodeError:
                    self.fail("a text is not UTF-8")
        return self.fail(f"unknown mark {mark!r}")

    def tensor(self) -> Spec:
        code, flags, dimensions = self.take(3)
        if code >= len(DTYPES) or flags > _REQUIRES_GRAD | _STRIDED:
            self.fail(f"a tensor of unknown dtype {code} or flags {flags}")
        shape: tuple[int, ...] = struct.unpack(f"<{dimensions}Q", self.take(8 * dimensions))
        strides = _contiguous(shape)
        if flags & _STRIDED:
            strides = struct.unpack(f"<{dimensions}Q", self.take(8 * dimensions))
            if not _is_dense(shape, strides):
                self.fail(f"a tensor of shape {shape} is not dense with strides {strides}")
        dtype, elements = DTYPES[code], 1
        for size in shape:
            elements *= size
        if max(elements, *shape, *strides, 0) > LARGEST_TENSOR:
            self.fail(f"a tensor of shape {shape} is too large")
        requires_grad = bool(flags & _REQUIRES_GRAD)
        if requires_grad and not (dtype.is_floating_point or dtype.is_complex):
            self.fail(f"a tensor of {dtype} cannot require a gradient")
        return Spec(dtype, shape, strides, requires_grad, elements * dtype.itemsize)
