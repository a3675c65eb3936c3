# SPDX-License-Identifier: Apache-2.0
"""Write 8-bit forms of two models, made by ONNX Runtime's quantiser, which is what most published ones come from.

Usage: python benchmarks/export_int8.py      needs the `bench` extra, and the two other exporters' models.

Dynamic: MatMulInteger on activations that the model quantises itself, with i8 or u8 weights. QDQ: QuantizeLinear and
DequantizeLinear around convolutions, ranges from random images.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from rlx.base import config
from rlx.testing import zoo

SOURCES = {
    "minilm_l6_dynamic_i8": "minilm_l6_fp32",
    "minilm_l6_dynamic_u8": "minilm_l6_fp32",
    "mobilenet_v2_qdq": "mobilenet_v2",
}
"""Name -> the case of the zoo that it is made from."""
_SAMPLES = 8


def path(name: str) -> Path:
    """Return where the file of a name lies, or is to lie."""
    return config.cache_dir() / "zoo" / "int8" / f"{name}.onnx"


def inputs(name: str) -> dict[str, np.ndarray]:
    """Return what the model is measured on."""
    return zoo.golden(zoo.case("mobilenet_v2"))[0] if "mobilenet" in name else _tokens()


def _tokens() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(1000, 30000, (1, 128))
    return {"ids": ids, "mask": np.ones_like(ids), "type": np.zeros_like(ids)}


def main() -> None:
    """Write all of them."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantType,
        quantize_dynamic,
        quantize_static,
    )

    class Images(CalibrationDataReader):
        """Random images."""

        def __init__(self) -> None:
            random = np.random.default_rng(0)
            shape = (_SAMPLES, 1, 3, 224, 224)
            self._images = iter(random.standard_normal(shape).astype(np.float32))

        def get_next(self) -> dict[str, np.ndarray] | None:
            image = next(self._images, None)
            return None if image is None else {"x": image}

    for name, case in SOURCES.items():
        source, target = zoo.path(zoo.case(case)), path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if "dynamic" in name:
            kind = QuantType.QInt8 if name.endswith("i8") else QuantType.QUInt8
            quantize_dynamic(source, target, weight_type=kind)
        else:
            quantize_static(source, target, Images(), per_channel=True)
        print(f"wrote {target}", file=sys.stderr)


if __name__ == "__main__":
    main()
