"""Transports carry every value, in order, between real processes."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given

import processes
from pipeloom.errors import MessageError
from pipeloom.runtime.transport import Transport, Tree, connect
from pipeloom.runtime.transport._local import LocalTransport
from pipeloom.runtime.transport._rendezvous import unique
from pipeloom.runtime.transport._ring import RING
from pipeloom.runtime.transport._tree import DTYPES, flat, pack, read

TRANSPORTS: dict[str, Callable[[dist.ProcessGroup], Transport]] = {
    "local": lambda group: connect(group, "local"),
    "tcp": lambda group: LocalTransport(group, unique(group, "tcp"), torch.device("cpu"), rings=False),
    "torch": lambda group: connect(group, "torch"),
}


def run_ranks(ranks: int, body: Callable[[int, Transport], None], path: Path, kind: str) -> None:
    def with_transport(group: dist.ProcessGroup) -> None:
        transport = TRANSPORTS[kind](group)
        body(group.rank(), transport)
        transport.flush()
        dist.barrier()
        transport.close()
        transport.close()  # which does nothing

    processes.run_ranks(ranks, with_transport, path)


VALUES: list[Tree] = [
    torch.arange(6.0).reshape(2, 3),
    torch.arange(12.0).reshape(3, 4).t(),
    torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    torch.arange(24.0).reshape(2, 3, 4).transpose(1, 2)[:, 1:],
    torch.arange(12.0).reshape(3, 4)[:, ::2],
    torch.ones(3, 1).expand(3, 5),
    torch.tensor(3.5),
    torch.empty(0, 4),
    torch.empty(4, 0, 2).transpose(0, 2),
    torch.randn(3, dtype=torch.complex64).conj(),
    torch.randn(3, dtype=torch.complex64).conj().imag,
    torch.ones(2, 2, requires_grad=True),
    torch.ones(2, 2, requires_grad=True) * 2,
    torch.nn.Parameter(torch.ones(2)),
    *[torch.arange(5).to(dtype) for dtype in DTYPES if dtype is not torch.complex32],
    None,
    [],
    (),
    {},
    "",
    "text \N{SNOWMAN}",
    b"\0\1",
    True,
    False,
    0,
    -1,
    2**80,
    -(2**63),
    1.5,
    float("inf"),
    2 + 3j,
    [1, (2.0, [None, {"a": torch.ones(1), 3: (torch.zeros(()), "x")}])],
    {"hidden": torch.ones(2, 2, requires_grad=True), "mask": torch.ones(2, dtype=torch.bool), "step": 4},
    "long" * 2000,
    [torch.full((2,), float(i)) for i in range(3000)],
]


def assert_same(found: object, sent: object) -> None:
    assert type(found) is (torch.Tensor if isinstance(sent, torch.Tensor) else type(sent))
    if isinstance(sent, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert (found.dtype, found.shape, found.requires_grad) == (sent.dtype, sent.shape, sent.requires_grad)
        assert found.is_leaf
        assert torch.equal(_bits(found), _bits(sent))
    elif isinstance(sent, dict):
        assert isinstance(found, dict)
        assert list(found) == list(sent)
        for key in sent:
            assert_same(found[key], sent[key])
    elif isinstance(sent, list | tuple):
        assert isinstance(found, list | tuple)
        assert len(found) == len(sent)
        for one, other in zip(found, sent, strict=True):
            assert_same(one, other)
    else:
        assert found == sent


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return flat(tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format))


def through_bytes(value: Tree) -> Tree:
    header, tensors = pack(value)
    layout = read(header)
    assert layout.nbytes == sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    copies = [spec.allocate(torch.device("cpu")).requires_grad_(spec.requires_grad) for spec in layout.specs]
    for copy, tensor in zip(copies, tensors, strict=True):
        flat(copy.detach()).copy_(flat(tensor))
    return layout.build(copies)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(type(value).__name__))
def test_a_header_and_dense_tensors_make_the_value_again(value: Tree) -> None:
    assert_same(through_bytes(value), value)


def test_dense_tensors_keep_their_strides_and_are_not_copied() -> None:
    value = torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)
    header, (tensor,) = pack(value)
    assert tensor.data_ptr() == value.data_ptr()
    assert read(header).specs[0].strides == value.stride()


def test_equal_layouts_have_equal_headers() -> None:
    assert pack({"a": torch.ones(2, 3), "b": 1})[0] == pack({"a": torch.zeros(2, 3), "b": 1})[0]
    assert pack(torch.ones(2, 3))[0] != pack(torch.ones(3, 2))[0]


class _Odd:
    pass


class _Tensor(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (_Odd(), r"a test_transport\._Odd cannot cross to another rank, at value; lists, tuples"),
        ([1, {"a": {2}}], r"a set cannot cross .* at value\[1\]\['a'\]"),
        ({1.5: 2}, r"a dict with a key of type float .* at value; keys are str or int"),
        ({True: 2}, r"a dict with a key of type bool"),
        ([torch.Size([2])], r"a torch\.Size cannot cross .* at value\[0\]; make it a plain tuple"),
        (torch.ones(2).to_sparse(), r"a tensor of layout torch\.sparse_coo"),
        (torch.ones(2, device="meta"), r"a tensor on the meta device"),
        (torch.ones(2).as_subclass(_Tensor), r"a test_transport\._Tensor cannot cross .* send a plain tensor"),
        (b"x" * (1 << 25), r"33554437 bytes of plain values"),
    ],
)
def test_what_cannot_cross_is_refused_with_its_place(value: Tree, message: str) -> None:
    with pytest.raises(MessageError, match=message):
        pack(value)


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[Tree] = []
    value.append(value)
    with pytest.raises(MessageError, match="nested deeper than 64"):
        pack(value)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "1 bytes expected, 0 left"),
        (b"Q", "unknown mark b'Q'"),
        (b"NN", "1 bytes follow the value"),
        (b"l\xff\xff\xff\xffN", "4294967295 items are announced"),
        (b"s\x04\0\0\0abc", "4 bytes expected, 3 left"),
        (b"s\x01\0\0\0\xff", "not UTF-8"),
        (b"d\x01\0\0\0NN", "a key is marked b'N'"),
        (b"d\x02\0\0\0" + b"s\x01\0\0\0aN" * 2, "a key comes twice"),
        (b"l\x01\0\0\0" * 65 + b"N", "nested deeper than 64"),
        (b"X\xff\0\0", "unknown dtype 255"),
        (b"X\0\x04\0", "flags 4"),
        (b"X\x08\x01\0", "cannot require a gradient"),
        (b"X\0\0\x01" + b"\xff" * 8, "too large"),
        (b"X\0\0\x02" + b"\0\0\0\0\0\1\0\0" * 2, "too large"),
        (b"X\0\2\1" + b"\2\0\0\0\0\0\0\0" * 2, "not dense"),
    ],
)
def test_the_reader_refuses_what_it_does_not_know(header: bytes, message: str) -> None:
    with pytest.raises(MessageError, match=message):
        read(header)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(header: bytes) -> None:
    with contextlib.suppress(MessageError):
        layout = read(header)
        assert len(layout.specs) <= len(header)


@given(st.integers(0, len(VALUES) - 1), st.data())
def test_damaged_headers_are_read_or_refused(index: int, data: st.DataObject) -> None:
    header = bytearray(pack(VALUES[index])[0])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(header) - 1))
        match data.draw(st.integers(0, 2)):
            case 0:
                header[at] = data.draw(st.integers(0, 255))
            case 1:
                del header[at]
            case 2:
                header.insert(at, data.draw(st.integers(0, 255)))
        if not header:
            break
    with contextlib.suppress(MessageError):
        read(bytes(header))


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
)  # fmt: skip


@given(TREES)
def test_plain_values_of_any_shape_cross(value: Tree) -> None:
    assert_same(through_bytes(value), value)


KINDS = ["local", "tcp", "torch"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_crosses_both_ways_with_receives_posted_ahead(kind: str, tmp_path: Path) -> None:
    def body(rank: int, transport: Transport) -> None:
        pendings = [transport.receive(1 - rank) for _ in VALUES]
        for value in VALUES:
            transport.send(1 - rank, value)
        for pending, value in zip(pendings, VALUES, strict=True):
            assert_same(pending.wait(), value)
        transport.flush()

    run_ranks(2, body, tmp_path, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_waits_may_come_in_any_order(kind: str, tmp_path: Path) -> None:
    def body(rank: int, transport: Transport) -> None:
        order = list(range(30))
        pendings = [transport.receive(1 - rank) for _ in order]
        for number in order:
            transport.send(1 - rank, torch.full((number % 7, 3), float(number)))
        random.Random(rank).shuffle(order)
        for number in order:
            assert_same(pendings[number].wait(), torch.full((number % 7, 3), float(number)))

    run_ranks(2, body, tmp_path, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_senders_may_overwrite_what_they_sent(kind: str, tmp_path: Path) -> None:
    def body(rank: int, transport: Transport) -> None:
        data = torch.empty(100_000)
        for number in range(20):
            transport.send(1 - rank, data.fill_(number))
        data.fill_(-1)
        received = [transport.receive(1 - rank).wait() for _ in range(20)]
        for number, value in enumerate(received):
            assert_same(value, torch.full((100_000,), float(number)))

    run_ranks(2, body, tmp_path, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_both_may_send_much_before_either_receives(kind: str, tmp_path: Path) -> None:
    def body(rank: int, transport: Transport) -> None:
        for number in range(6):
            transport.send(1 - rank, [torch.full((2_000_000,), float(number)), number])
        for number in range(6):
            assert_same(transport.receive(1 - rank).wait(), [torch.full((2_000_000,), float(number)), number])
        transport.flush()

    run_ranks(2, body, tmp_path, kind)


def test_messages_may_be_larger_than_a_ring(tmp_path: Path) -> None:
    def body(rank: int, transport: Transport) -> None:
        numbers = torch.arange(RING // 4 + 1_000_000, dtype=torch.int32)
        for number in range(2):
            transport.send(1 - rank, [numbers + number, number])
        for number in range(2):
            value = transport.receive(1 - rank).wait()
            assert isinstance(value, list)
            assert value[1] == number
            assert torch.equal(value[0], numbers + number)

    run_ranks(2, body, tmp_path, "local")


@pytest.mark.parametrize("kind", ["local", "tcp"])
def test_messages_of_all_sizes_keep_their_order_however_ranks_dawdle(kind: str, tmp_path: Path) -> None:
    def body(rank: int, transport: Transport) -> None:
        chance = random.Random(5)  # the same on both ranks
        dawdle = random.Random(rank)
        for _ in range(40):
            sizes = [chance.choice([0, 1, 60, 5_000, 40_000, 300_000]) for _ in range(chance.randint(1, 12))]
            for number, size in enumerate(sizes):
                transport.send(1 - rank, torch.full((size,), number, dtype=torch.int32))
                if dawdle.random() < 0.05:
                    time.sleep(0.002)
            for number, size in enumerate(sizes):
                assert_same(transport.receive(1 - rank).wait(), torch.full((size,), number, dtype=torch.int32))

    run_ranks(2, body, tmp_path, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_every_pair_of_ranks_keeps_its_own_order(kind: str, tmp_path: Path) -> None:
    def body(rank: int, transport: Transport) -> None:
        others = [other for other in range(4) if other != rank]
        for number in range(25):
            for other in others:
                transport.send(other, (rank, number, torch.full((number,), float(rank))))
        for other in others:
            for number in range(25):
                value = transport.receive(other).wait()
                assert_same(value, (other, number, torch.full((number,), float(other))))

    run_ranks(4, body, tmp_path, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_value_leaves_the_order_intact(kind: str, tmp_path: Path) -> None:
    def body(rank: int, transport: Transport) -> None:
        with pytest.raises(MessageError):
            transport.send(1 - rank, [torch.ones(2), {1}])  # type: ignore[list-item]
        transport.send(1 - rank, 7)
        assert transport.receive(1 - rank).wait() == 7

    run_ranks(2, body, tmp_path, kind)


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ValueError, match="transport is 'tcp'; it is 'auto', 'local' or 'torch'"):
        connect(None, "tcp")  # type: ignore[arg-type]
