# SPDX-License-Identifier: Apache-2.0
"""Random numbers as pure functions of a key.

A key is u32[4]. `RngFold` derives keys from keys; a draw turns a key into a tensor, element i of which follows from
the key and i alone. So results do not depend on threads, chunks or the rest of the graph, the first rows of a batch
are what a smaller batch would be, and equal keys give equal draws: a key is for one draw.

The first key is an input of the graph, `RNG_INPUT`, that the executable fills with its seed and the number of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from rlx.base.dims import Dim
from rlx.base.dtypes import DType
from rlx.base.errors import TypeRuleError
from rlx.base.numeric import Array
from rlx.base.precision import OpClass
from rlx.base.rng import RNG_INPUT
from rlx.base.types import Shape, TensorType
from rlx.expr.body import Body, BodyBuilder, Scalar
from rlx.expr.evaluate import evaluate_body
from rlx.expr.philox import Words, normal, raw_bits, uniform, words_at
from rlx.ir.graph import Graph, Value
from rlx.ir.op import Op
from rlx.ops.elementwise import add, cast, div, exp, less, less_equal, minimum, mul, sub, where
from rlx.ops.leaf import constant
from rlx.ops.movement import reshape
from rlx.ops.reduce import cum_sum, reduce_max, reduce_sum
from rlx.ops.spec import Operand, Sample, emit_one, op

__all__ = [
    "Draw",
    "RandomBits",
    "RandomNormal",
    "RandomUniform",
    "RngFold",
    "bernoulli",
    "dropout",
    "multinomial",
    "random_bits",
    "random_normal",
    "random_uniform",
    "rng_fold",
    "rng_input",
]

KEY = TensorType(DType.U32, (4,))
_KEY_OPERAND = Operand((4,), DType.U32, "bits")


def _check_key(key: TensorType) -> None:
    if key != KEY:
        raise TypeRuleError(f"a key is {KEY}, not {key}")


def _body(results: Callable[[Words], Iterable[Scalar]]) -> Body:
    """Return a body over four words of a key and a number."""
    builder = BodyBuilder((*[DType.U32] * 4, DType.U64))
    k0, k1, k2, k3 = (builder.input(i).cast(DType.U64) for i in range(4))
    return builder.finish(*results(words_at((k0, k1, k2, k3), builder.input(4))))


@op("rng_fold")
@dataclass(frozen=True)
class RngFold(Op):
    """The key that belongs to a number under a key: Philox4x32-10 of both.

    Attributes:
        seed: replaces the key's first two words, which hold the executable's seed; the number of the run stays.
    """

    operands = ("key", "number")
    seed: int | None = None
    samples: ClassVar[tuple[Sample, ...]] = (
        Sample((_KEY_OPERAND, Operand((), DType.U64, "bits"))),
        Sample((_KEY_OPERAND, Operand((), DType.I64, "index", 1000)), {"seed": 7}),
    )

    def infer(self, key: TensorType, number: TensorType) -> TensorType:  # noqa: D102
        _check_key(key)
        if number.rank or number.dtype not in (DType.I64, DType.U64):
            raise TypeRuleError(f"the number is an i64 or u64 of rank 0, not {number}")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise TypeRuleError(f"the seed is in [0, 2**63), not {self.seed}")
        return key

    @staticmethod
    @cache
    def body() -> Body:
        """Return what is computed: four words and a number to four words."""
        return _body(lambda words: [w.cast(DType.U32) for w in words])

    def reference(self, key: Array, number: Array) -> Array:  # noqa: D102
        words = [*key]
        if self.seed is not None:
            words[:2] = np.array([self.seed & 0xFFFFFFFF, self.seed >> 32], np.uint32)
        found = evaluate_body(self.body(), [*map(np.asarray, words), number.astype(np.uint64)])
        return np.stack(found)


@dataclass(frozen=True)
class Draw(Op):
    """Base of the draws: a tensor whose element i follows from a key and i.

    Attributes:
        shape: of the result.
        dtype: of the result.
    """

    operands = ("key",)
    # Folding and merging would be right, and never wanted.
    foldable = False
    precision_class = OpClass.FIXED
    domain: ClassVar[tuple[DType, ...]] = (DType.F32, DType.F64, DType.F16, DType.BF16)
    shape: Shape
    dtype: DType

    def infer(self, key: TensorType) -> TensorType:  # noqa: D102
        _check_key(key)
        if self.dtype not in self.domain:
            names = ", ".join(map(str, self.domain))
            raise TypeRuleError(f"draws {names}, not {self.dtype}")
        return TensorType(self.dtype, self.shape)

    def element(self, words: Words) -> Scalar:
        """Return an element from its four random words."""
        raise NotImplementedError

    def meaning(self, words: Words) -> Scalar:
        """Return an element as the reference computes it."""
        return self.element(words)

    def body(self) -> Body:
        """Return what is computed: four words of the key and the element's number to the element."""
        return _body(lambda words: [self.element(words).cast(self.dtype)])

    def reference(self, key: Array) -> Array:  # noqa: D102
        shape = tuple(int(d) for d in self.shape)
        numbers = np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.uint64)
        (found,) = evaluate_body(
            _body(lambda words: [self.meaning(words)]), [*map(np.asarray, key), numbers]
        )
        return found.reshape(shape)


def _samples(*dtypes: DType) -> tuple[Sample, ...]:
    shapes: tuple[tuple[int, ...], ...] = ((3, 17), (70,), (2, 0))
    return tuple(
        Sample((_KEY_OPERAND,), {"shape": shape, "dtype": dtype})
        for dtype in dtypes
        for shape in shapes
    )


@op("random_bits")
@dataclass(frozen=True)
class RandomBits(Draw):
    """Integers of which every bit is random.

    Attributes:
        shape: of the result.
        dtype: u32 or u64.
    """

    domain = (DType.U32, DType.U64)
    samples: ClassVar[tuple[Sample, ...]] = _samples(*domain)

    def element(self, words: Words) -> Scalar:  # noqa: D102
        return raw_bits(words, self.dtype)


@op("random_uniform")
@dataclass(frozen=True)
class RandomUniform(Draw):
    """Multiples of 2^-n in [0, 1), all equally likely, for the n bits of the dtype's significand.

    Attributes:
        shape: of the result.
        dtype: of the result, a float.
    """

    samples: ClassVar[tuple[Sample, ...]] = _samples(*Draw.domain)

    def element(self, words: Words) -> Scalar:  # noqa: D102
        return uniform(words, self.dtype)


@op("random_normal")
@dataclass(frozen=True)
class RandomNormal(Draw):
    """Draws of the standard normal distribution, by Box and Muller's transform of two uniform ones.

    Attributes:
        shape: of the result.
        dtype: of the result, a float.
    """

    samples: ClassVar[tuple[Sample, ...]] = _samples(*Draw.domain)

    def element(self, words: Words) -> Scalar:  # noqa: D102
        return normal(words, self.dtype, self.dtype.compute)

    def meaning(self, words: Words) -> Scalar:  # noqa: D102
        return normal(words, self.dtype, DType.F64)


# -- keys ----------------------------------------------------------------------------------------------------------


def rng_input(graph: Graph) -> Value:
    """Return the graph's input that the executable fills: seed and number of the run."""
    for value in graph.inputs:
        if value.name == RNG_INPUT:
            return value
    return graph.add_input(RNG_INPUT, KEY)


def rng_fold(key: Value, number: int | Value, seed: int | None = None) -> Value:
    """Return the key of a number under a key: streams of a seed, iterations of a loop, heads of a layer."""
    if isinstance(number, int):
        number = constant(number, DType.U64)
    return emit_one(RngFold(seed), key, number)


# -- draws ---------------------------------------------------------------------------------------------------------


def random_bits(key: Value, shape: tuple[Dim, ...], dtype: DType = DType.U32) -> Value:
    """Return random u32 or u64."""
    return emit_one(RandomBits(tuple(shape), DType.of(dtype)), key)


def random_uniform(
    key: Value,
    shape: tuple[Dim, ...],
    low: float = 0.0,
    high: float = 1.0,
    dtype: DType = DType.F32,
) -> Value:
    """Return draws from [low, high); only `low` where both are equal.

    Raises:
        TypeRuleError: the bounds are not finite in the dtype, or not in order.
    """
    dtype = DType.of(dtype)
    drawn = emit_one(RandomUniform(tuple(shape), dtype), key)
    if (low, high) == (0.0, 1.0):
        return drawn
    ends = np.array([low, high]).astype(dtype.numpy)
    with np.errstate(over="ignore"):
        width = np.asarray(ends[1] - ends[0])
    if not np.isfinite(width.astype(np.float64)) or ends[0] > ends[1]:
        raise TypeRuleError(f"low {low} and high {high} bound no interval of {dtype}")
    # Rounding may reach the upper end, which is not in the interval.
    last = ends[1] if ends[0] == ends[1] else np.nextafter(ends[1], ends[0])
    scaled = add(mul(drawn, constant(width, dtype)), constant(ends[0], dtype))
    return minimum(scaled, constant(last, dtype))


def random_normal(
    key: Value,
    shape: tuple[Dim, ...],
    mean: float = 0.0,
    scale: float = 1.0,
    dtype: DType = DType.F32,
) -> Value:
    """Return draws of the normal distribution with this mean and standard deviation."""
    dtype = DType.of(dtype)
    drawn = emit_one(RandomNormal(tuple(shape), dtype), key)
    if scale != 1.0:
        drawn = mul(drawn, constant(scale, dtype))
    return add(drawn, constant(mean, dtype)) if mean else drawn


def bernoulli(key: Value, p: Value, dtype: DType | None = None) -> Value:
    """Return 1 with probability p, else 0, element by element; never 1 for p = 0 or NaN, always for p = 1."""
    wide = DType.F64 if p.type.dtype is DType.F64 else DType.F32
    drawn = emit_one(RandomUniform(p.type.shape, wide), key)
    hit = less(drawn, cast(p, wide))
    return cast(hit, p.type.dtype if dtype is None else dtype)


def multinomial(key: Value, logits: Value, samples: int, dtype: DType = DType.I32) -> Value:
    """Return class numbers [batch, samples], drawn with probabilities softmax(logits [batch, classes]).

    The cumulative sums are f64, so a class is drawn as often as f64 can say. A class of logit -inf is never drawn from
    a row that has another; a row whose logits are all -inf, or hold NaN, gives class 0.

    Raises:
        TypeRuleError: the logits are no matrix.
    """
    if logits.type.rank != 2:
        raise TypeRuleError(f"the logits are [batch, classes], not {logits.type}")
    batch = logits.type.shape[0]
    wide = cast(logits, DType.F64)
    below = cum_sum(exp(sub(wide, reduce_max(wide, (1,)))), 1)
    total = reduce_max(below, (1,))
    point = mul(emit_one(RandomUniform((batch, samples), DType.F64), key), total)
    # u < 1, so the point is below the total in f64 as well: the last class with a probability is the last one drawn.
    passed = less_equal(
        reshape(below, (batch, 1, logits.type.shape[1])), reshape(point, (batch, samples, 1))
    )
    return cast(reduce_sum(cast(passed, DType.I64), (2,), keepdims=False), DType.of(dtype))


def dropout(key: Value, x: Value, ratio: float | Value) -> tuple[Value, Value]:
    """Return (x with elements zeroed at random and the others scaled by 1 / (1 - ratio), the mask of those kept).

    Raises:
        TypeRuleError: the ratio is a number outside [0, 1].
    """
    if not isinstance(ratio, Value) and not 0 <= ratio <= 1:
        raise TypeRuleError(f"a dropout ratio lies in [0, 1], found {ratio}")
    wide = DType.F64 if x.type.dtype is DType.F64 else DType.F32
    ratio = constant(ratio, wide) if not isinstance(ratio, Value) else cast(ratio, wide)
    drawn = emit_one(RandomUniform(x.type.shape, wide), key)
    kept = less_equal(ratio, drawn)
    one = constant(1.0, wide)
    scale = cast(div(one, sub(one, ratio)), x.type.dtype)
    return where(kept, mul(x, scale), constant(0.0, x.type.dtype)), kept
