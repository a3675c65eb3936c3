# SPDX-License-Identifier: Apache-2.0
"""Random numbers: Philox's rounds on a vector of element numbers, then what the draw makes of the words.

    y[i] = body(key, i)

The body is the operator's own (`rlx.expr.philox`). What follows from the key alone, such as the keys of the rounds, is
computed once per call. Words are 64-bit lanes, so a product of two words is one `vpmuludq`.
"""

from __future__ import annotations

from functools import cache

from rlx.backends.cpu.abi import Emitted, finish
from rlx.backends.cpu.builder import Module, Value
from rlx.backends.cpu.emit import BodyEmitter, emit_body, memory_type, store_storage
from rlx.backends.cpu.isa import Isa
from rlx.backends.cpu.kernels.elementwise import body_lanes
from rlx.backends.cpu.lltypes import I32, I64, vec
from rlx.backends.cpu.lowering import lowering
from rlx.base.dims import ceildiv, product
from rlx.expr.body import Body
from rlx.ir.graph import Node
from rlx.kernel.program import Arg, DimArg, SlotArg
from rlx.kernel.schedule import LoweringContext
from rlx.ops.random import Draw, RandomBits, RandomNormal, RandomUniform, RngFold

__all__ = ["lower_draw", "lower_rng_fold"]

_CHUNK = 4 << 10
"""Elements per chunk."""
_KEY_WORDS = 4


@cache
def _draw_kernel(isa: Isa, body: Body) -> Emitted:
    """Arguments: key, y, number of elements."""
    module = Module(isa)
    (result,) = body.result_types
    lanes = body_lanes(isa, body)
    with module.kernel("random", 3) as k:
        words = [k.splat(k.load(I32, k.slot(0), i), lanes) for i in range(_KEY_WORDS)]
        same = BodyEmitter(k, body, lanes, known=dict(enumerate(words)))
        uniform = body.uniform([True] * _KEY_WORDS + [False])
        for index in range(len(body.inputs), len(uniform)):
            if uniform[index]:
                same.value(index)
        last = k.smin(k.end * _CHUNK, k.dim(2))
        with k.loop(k.begin * _CHUNK, last, lanes) as loop:
            mask = k.tail_mask(last - loop.index, vec(memory_type(result), lanes))
            point = same.child(_no_operand, mask)
            point.set(_KEY_WORDS, k.iota(vec(I64, lanes)) + k.splat(loop.index, lanes))
            store_storage(k, point.raw(body.results[0]), k.slot(1), loop.index, mask)
    return finish(module)


def _no_operand(index: int) -> Value:
    raise AssertionError(f"input {index} of a draw is computed, not read")


@lowering(RandomBits, RandomUniform, RandomNormal)
def lower_draw(node: Node, ctx: LoweringContext, isa: Isa) -> None:
    """Emit one kernel over all elements."""
    op, (key,) = node.op, node.operands
    assert isinstance(op, Draw)
    assert key is not None
    count = product(op.shape)
    args = [SlotArg(ctx.slot(key)), SlotArg(ctx.slot(node.result), writes=True), DimArg(count)]
    ctx.launch(_draw_kernel(isa, op.body()), args, ceildiv(count, _CHUNK))


@cache
def _fold_kernel(isa: Isa, seeded: bool) -> Emitted:
    """Arguments: key, number, new key; with a seed its low and high word."""
    module = Module(isa)
    with module.kernel("rng_fold", 5 if seeded else 3) as k:
        words = [k.load(I32, k.slot(0), i) for i in range(_KEY_WORDS)]
        if seeded:
            words[:2] = [k.trunc(k.dim(3), I32), k.trunc(k.dim(4), I32)]
        found = emit_body(k, RngFold.body(), [*words, k.load(I64, k.slot(1), 0)], 0)
        for index, word in enumerate(found):
            k.store(word, k.slot(2), index)
    return finish(module)


@lowering(RngFold)
def lower_rng_fold(node: Node, ctx: LoweringContext, isa: Isa) -> None:
    """Emit a kernel of one element: four words."""
    op, (key, number) = node.op, node.operands
    assert isinstance(op, RngFold)
    assert key is not None
    assert number is not None
    args: list[Arg] = [SlotArg(ctx.slot(key)), SlotArg(ctx.slot(number))]
    args.append(SlotArg(ctx.slot(node.result), writes=True))
    if op.seed is not None:
        args += [DimArg(op.seed & 0xFFFFFFFF), DimArg(op.seed >> 32)]
    ctx.launch(_fold_kernel(isa, op.seed is not None), args)
