# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rlx.base.dlpack import dlpack, from_dlpack
from rlx.base.errors import UsageError
from rlx.base.numeric import Array

_NARROW = (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)


class _Before1:
    """A producer that knows no versions, as all were once."""

    def __init__(self, array: Any) -> None:
        self._array = dlpack(array)

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self._array.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


class _OnDevice(_Before1):
    def __dlpack_device__(self) -> Any:
        return (2, 0)


@pytest.mark.parametrize("dtype", _NARROW)
@pytest.mark.parametrize("producer", [dlpack, _Before1])
def test_narrow_floats_pass_both_ways_without_a_copy(dtype: Any, producer: Any) -> None:
    x = np.array([[1, -2, 0.5], [np.nan, 0.25, -0.0]]).astype(dtype)
    y = from_dlpack(producer(x))
    assert y.dtype == dtype
    assert y.tobytes() == x.tobytes()
    assert np.shares_memory(x.view(np.uint8), y.view(np.uint8))


def test_the_memory_lives_as_long_as_the_array_that_came_in() -> None:
    x = np.ones(1000, ml_dtypes.bfloat16)
    owner = weakref.ref(x)
    y = from_dlpack(dlpack(x))
    del x
    gc.collect()
    assert owner() is not None
    assert (y == 1).all()
    del y
    gc.collect()
    assert owner() is None


def test_a_capsule_nobody_takes_gives_the_memory_back() -> None:
    x = np.ones(1000, ml_dtypes.bfloat16)
    owner = weakref.ref(x)
    exported = dlpack(x).__dlpack__(max_version=(1, 0))
    del x
    gc.collect()
    assert owner() is not None
    del exported
    gc.collect()
    assert owner() is None


def test_strides_and_read_only_memory_pass() -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4).astype(ml_dtypes.bfloat16)
    y = from_dlpack(dlpack(x[:, ::2]))
    assert y.strides == (8, 4)
    np.testing.assert_array_equal(y.astype(np.float32), x[:, ::2].astype(np.float32))
    x.flags.writeable = False
    assert not from_dlpack(dlpack(x)).flags.writeable


def test_what_numpy_exchanges_itself_is_left_alone() -> None:
    x: Array = np.ones(3, np.float32)
    assert dlpack(x) is x
    assert np.shares_memory(from_dlpack(x), x)


def test_packed_integers_and_other_devices_are_refused() -> None:
    with pytest.raises(UsageError, match="hand it over as int8"):
        dlpack(np.ones(4, ml_dtypes.int4))
    with pytest.raises(UsageError, match="device type 2 is not in host memory"):
        from_dlpack(_OnDevice(np.ones(3, np.float32)))


def test_an_unknown_dtype_is_named_by_its_code() -> None:
    capsule = dlpack(np.ones(3, ml_dtypes.bfloat16)).__dlpack__(max_version=(1, 0))
    import rlx.base.dlpack as module

    module._dtype_field(capsule)[0] = 14  # pyright: ignore[reportPrivateUsage]

    class Given:
        def __dlpack__(self, **_: Any) -> Any:
            return capsule

        def __dlpack_device__(self) -> Any:
            return (1, 0)

    with pytest.raises(UsageError, match="code 14 with 16 bits"):
        from_dlpack(Given())
