# SPDX-License-Identifier: Apache-2.0
"""Memory of backends whose programs run on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlx.base.dtypes import DType
from rlx.base.numeric import Array

__all__ = ["HostMemory"]


class HostMemory:
    """The bytes of a state in this process; implements `rlx.backends.protocol.StateMemory`.

    Attributes:
        data: the bytes.
    """

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self.data = data

    def read(self, target: Array) -> None:
        """Copy the bytes into an array of as many."""
        np.copyto(_bytes(target), self.data)

    def write(self, source: Array) -> None:
        """Replace the bytes by those of an array of as many."""
        np.copyto(self.data, _bytes(source))

    def view(self, dtype: DType, shape: tuple[int, ...]) -> Array:
        """Return the bytes as an array, without a copy."""
        return self.data.view(dtype.numpy).reshape(shape)


def _bytes(array: Array) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)
