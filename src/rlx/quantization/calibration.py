# SPDX-License-Identifier: Apache-2.0
"""What was seen of the activations of a model, as a file."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlx.base.errors import UsageError
from rlx.quantization.ranges import Range

__all__ = ["Calibration"]

_FORMAT = "rlx-calibration-1"


@dataclass(frozen=True)
class Calibration:
    """Ranges of activations.

    Attributes:
        ranges: value -> what it may be. Values are named as in the model; those without a name by the node and the
            index of its result.
        extents: values of the symbolic extents that the sample data had.
    """

    ranges: Mapping[str, Range] = field(default_factory=dict[str, Range])
    extents: Mapping[str, int] = field(default_factory=dict[str, int])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        ranges = {name: [r.low, r.high] for name, r in self.ranges.items()}
        content = {"format": _FORMAT, "ranges": ranges, "extents": dict(self.extents)}
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read what `save` wrote.

        Raises:
            UsageError: there is no such file, or it holds something else.
        """
        try:
            content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                raise UsageError(f"{path} has format {content['format']!r}, not {_FORMAT!r}")
            ranges = {str(n): Range(float(a), float(b)) for n, (a, b) in content["ranges"].items()}
            extents = {str(n): _extent(v) for n, v in content["extents"].items()}
        except OSError as error:
            raise UsageError(f"no calibration can be read from {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} is no calibration of rlx: it is no text") from error
        except KeyError as error:
            raise UsageError(f"{path} is no calibration of rlx: it has no {error}") from error
        except (
            AttributeError,
            OverflowError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise UsageError(f"{path} is no calibration of rlx: {error!r}") from error
        return cls(ranges, extents)


def _extent(value: Any) -> int:
    extent = operator.index(value)
    if extent < 0:
        raise ValueError(f"{extent} is no extent")
    return extent
