# SPDX-License-Identifier: Apache-2.0
"""The builder's text and its refusals; constructs are run against Python's own meaning of them."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from rlx.backends.cpu.abi import Emitted, Kernel, finish
from rlx.backends.cpu.builder import Module
from rlx.backends.cpu.isa import generic_isa, host_isa
from rlx.backends.cpu.jit import Library, compile_all, compile_text, undefined_symbols
from rlx.backends.cpu.lltypes import F16, F32, F64, I1, I16, I32, I64, PTR, literal, vec
from rlx.base.errors import BuildError, UsageError


def _call(module: Module, name: str, *args: int) -> int:
    """Compile a module and call its exported i64 function."""
    isa = host_isa()
    library = Library([compile_text(module.body(), isa)], [name], isa)
    entry = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * len(args))(library.address(name))
    result = entry(*args)
    library.close()
    return result


def _scratch() -> Kernel:
    module = Module(generic_isa("v3"))
    with module.kernel("form", 1) as k:
        pass
    return k


def test_nested_loops_carry_values() -> None:
    module = Module(host_isa())
    with module.function("sum_of_products", [("n", I64)], I64, exported=True) as f:
        (n,) = f.args
        with f.loop(0, n, carry=[f.i64(0)]) as outer:
            with f.loop(outer.index, n, 2, carry=[outer.carry[0]]) as inner:
                inner.next(inner.carry[0] + outer.index * inner.index)
            outer.next(inner.out[0])
        f.ret(outer.out[0])
    n = 13
    want = sum(i * j for i in range(n) for j in range(i, n, 2))
    assert _call(module, "sum_of_products", n) == want


def test_while_and_branches() -> None:
    module = Module(host_isa())
    with module.function("collatz", [("n", I64)], I64, exported=True) as f:
        with f.while_(carry=[f.args[0], f.i64(0)]) as loop:
            value, steps = loop.carry
            loop.test(value.ne(1))
            with f.if_else((value & 1).eq(0)) as branch:
                with branch.then():
                    branch.yields(value.lshr(1))
                with branch.otherwise():
                    branch.yields(value * 3 + 1)
            loop.next(branch.results[0], steps + 1)
        f.ret(loop.out[1])
    assert _call(module, "collatz", 27) == 111


def test_functions_of_one_module_call_each_other_internally() -> None:
    module = Module(host_isa())
    with module.function("twice", [("x", I64)], I64) as twice:
        twice.ret(twice.args[0] * 2)
    with module.function("entry", [("x", I64)], I64, exported=True) as f:
        f.ret(f.call(twice, f.args[0] + 1))
    assert "define internal i64 @twice" in module.body()
    assert _call(module, "entry", 20) == 42


def test_horizontal_sum_follows_the_documented_tree() -> None:
    module = Module(host_isa())
    with module.function("tree", [("p", PTR)], I64, exported=True) as f:
        total = f.reduce_add(f.load(vec(F32, 8), f.args[0]))
        f.ret(f.zext(f.bitcast(total, I32), I64))
    x = np.array([1e8, 1, -1e8, 3, 7, 1e-3, 5, 1e7], np.float32)
    level = x
    while level.size > 1:
        level = level[: level.size // 2] + level[level.size // 2 :]
    assert _call(module, "tree", x.ctypes.data) == int(level.view(np.uint32)[0])


def test_atomics_and_memory_functions() -> None:
    module = Module(host_isa())
    with module.function("atomics", [("p", PTR), ("q", PTR)], I64, exported=True) as f:
        p, q = f.args
        f.atomic_rmw("add", p, f.i64(5))
        old, replaced = f.compare_exchange(p, f.i64(12), f.i64(40))
        f.memcpy(q, p, 8)
        f.ret(old * 100 + f.zext(replaced, I64) * 10 + f.atomic_load(I64, q) - 40)
    x, y = np.array([7], np.int64), np.zeros(1, np.int64)
    assert _call(module, "atomics", x.ctypes.data, y.ctypes.data) == 1210
    assert x[0] == y[0] == 40


def test_high_half_of_a_product_needs_no_library() -> None:
    module = Module(host_isa())
    with module.function("high", [("a", I64), ("b", I64)], I64, exported=True) as f:
        f.ret(f.umulh(*f.args))
    a, b = 0x7FFF_1234_5678_9ABC, 0x7EDC_BA98_7654_3210
    assert _call(module, "high", a, b) == (a * b) >> 64


def test_literals_are_exact() -> None:
    assert literal(float("nan"), F32) == "0x7FF8000000000000"
    assert literal(float("-inf"), F64) == "0xFFF0000000000000"
    assert literal(-0.0, F32) == "0x8000000000000000"
    assert literal(1e39, F32) == literal(float("inf"), F32)
    assert literal(0.1, F32) == f"0x{np.float64(np.float32(0.1)).view(np.uint64):016X}"
    assert literal(-3, vec(I16, 4)) == "splat (i16 -3)"
    with pytest.raises(BuildError, match="does not fit"):
        literal(1 << 16, I16)
    with pytest.raises(BuildError, match="not a constant"):
        literal(0.5, I32)


def test_kernel_symbol_depends_on_the_code_only() -> None:
    def emitted(number: int) -> str:
        module = Module(generic_isa("v3"))
        with module.kernel("copy", 2) as k, k.loop(k.begin, k.end) as loop:
            k.store(k.load(I64, k.slot(0), loop.index) + number, k.slot(1), loop.index)
        return finish(module).symbol

    assert emitted(1) == emitted(1) != emitted(2)
    assert emitted(1).startswith("rlx_copy_")


def test_an_intrinsic_the_target_lacks_is_an_error_not_an_abort() -> None:
    f = _scratch()
    with pytest.raises(BuildError, match="avx512vnni"):
        f.intrinsic("x86.avx512.vpdpbusd.512", 0, 0, 0)
    with pytest.raises(BuildError, match="not in the table"):
        f.intrinsic("x86.nonsense")


def test_refusals_name_the_problem() -> None:
    f = _scratch()
    x = f.f32(1.0)
    with pytest.raises(BuildError, match="no value while code is emitted"):
        bool(x > 0)
    with pytest.raises(BuildError, match="convert it explicitly"):
        _ = x + f.i64(1)
    with pytest.raises(BuildError, match="not defined"):
        _ = f.const(1.0, F16) + 1.0
    with pytest.raises(BuildError, match="not defined"):
        _ = f.i64(6) / 2
    with pytest.raises(BuildError, match=r"must be in \[0, 64\)"):
        f.i64(1).shl(64)
    with pytest.raises(BuildError, match="needs an i1"):
        f.branch_if(f.const(1, vec(I1, 8)), "a", "b")
    with pytest.raises(BuildError, match="bytes of stack"):
        f.alloca(F64, 2000)


def test_rejected_text_shows_its_line() -> None:
    with pytest.raises(BuildError, match="line 2: ret i64 true"):
        compile_text("define i64 @f() {\n  ret i64 true\n}\n", host_isa())


def test_foreign_symbols_are_refused() -> None:
    module = Module(host_isa())
    with module.function("f", [], exported=True) as f:
        f.call("getenv", f.const(0, PTR), result=PTR)
    with pytest.raises(BuildError, match="getenv"):
        compile_text(module.body(), host_isa())


def test_objects_are_cached_by_content() -> None:
    class Memory:
        def __init__(self) -> None:
            self.stored: dict[str, bytes] = {}

        def get(self, key: str) -> bytes | None:
            return self.stored.get(key)

        def put(self, key: str, data: bytes) -> None:
            self.stored[key] = data

    module = Module(host_isa())
    with module.function("f", [("p", PTR)], exported=True) as f:
        f.memset(f.args[0], 0, 8)
    cache = Memory()
    first = compile_text(module.body(), host_isa(), cache)
    assert list(cache.stored.values()) == [first]
    assert undefined_symbols(first) == {"memset"}
    cache.stored = dict.fromkeys(cache.stored, b"stored")
    assert compile_text(module.body(), host_isa(), cache) == b"stored"


def test_a_closed_library_gives_no_address() -> None:
    module = Module(host_isa())
    with module.function("f", [], exported=True):
        pass
    library = Library([compile_text(module.body(), host_isa())], ["f"], host_isa())
    with pytest.raises(UsageError, match="not exported"):
        library.address("g")
    library.close()
    with pytest.raises(UsageError, match="closed"):
        library.address("f")


def _doubling_unit() -> Emitted:
    module = Module(host_isa())
    with module.shared("double", [("cell", PTR)]) as f:
        f.store(f.load(I64, f.args[0]) * 2, f.args[0])
    return finish(module)


def test_a_unit_is_linked_with_those_that_need_it() -> None:
    unit = _doubling_unit()
    module = Module(host_isa())
    module.need(unit)
    with module.function("f", [("cell", PTR), ("which", I64)], exported=True) as f:
        with module.function("keep", [("cell", PTR)]) as keep:
            keep.store(keep.load(I64, keep.args[0]) + 1, keep.args[0])
        f.call_pointer(f.choose(f.args[1], {3: unit.symbol, 4: keep}, [PTR]), f.args[0])
    emitted = finish(module)
    assert list(emitted.units()) == [emitted, unit]
    isa = host_isa()
    objects = compile_all((u.text for u in emitted.units()), isa)
    library = Library(objects, ["f"], isa)
    entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(library.address("f"))
    cell = np.array([5])
    for which, want in ((3, 10), (4, 11), (3, 22)):
        entry(cell.ctypes.data, which)
        assert cell[0] == want
    library.close()
    with pytest.raises(BuildError, match=unit.symbol):
        Library(objects[:1], ["f"], isa)


def test_choose_takes_functions_of_one_type() -> None:
    k = _scratch()
    with k.module.function("other", [("x", I64)]) as other:
        pass
    with pytest.raises(BuildError, match="takes"):
        k.choose(k.begin, {0: other}, [PTR])
    with pytest.raises(BuildError, match="at least one"):
        k.choose(k.begin, {}, [PTR])
