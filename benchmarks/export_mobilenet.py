# SPDX-License-Identifier: Apache-2.0
"""Write MobileNetV2 (trained on ImageNet) as an ONNX file, from the weights of a package.

Usage: python benchmarks/export_mobilenet.py [OUT.onnx]      needs the `bench` extra.

Without OUT the file goes where `rlx.testing.zoo` looks for the case "mobilenet_v2".
Source: Sandler et al. 2018, table 2. Input x: f32[N,3,224,224], output logits: f32[N,1000].
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from rlx.testing import zoo

STAGES = [  # expansion, channels, repeats, first stride
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
]


class ConvBnRelu6(nn.Sequential):
    """Convolution without bias, batch norm, ReLU6; padded to keep the size at stride 1."""

    def __init__(self, cin: int, cout: int, kernel: int = 3, stride: int = 1, groups: int = 1):
        pad = (kernel - 1) // 2
        conv = nn.Conv2d(cin, cout, kernel, stride, pad, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(cout), nn.ReLU6())


class InvertedResidual(nn.Module):
    """Expand by 1x1, filter depthwise by 3x3, project by 1x1; add the input where shapes agree."""

    def __init__(self, cin: int, cout: int, stride: int, expand: int):
        super().__init__()
        hidden = cin * expand
        layers: list[nn.Module] = [] if expand == 1 else [ConvBnRelu6(cin, hidden, 1)]
        layers += [
            ConvBnRelu6(hidden, hidden, 3, stride, hidden),
            nn.Conv2d(hidden, cout, 1, bias=False),
            nn.BatchNorm2d(cout),
        ]
        self.conv = nn.Sequential(*layers)
        self.residual = stride == 1 and cin == cout

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, cin, H, W] -> [N, cout, H/stride, W/stride]."""
        y = self.conv(x)
        return x + y if self.residual else y


class MobileNetV2(nn.Module):
    """The classifier at width 1.0; parameter names are those of the published weights."""

    def __init__(self) -> None:
        super().__init__()
        blocks: list[nn.Module] = [ConvBnRelu6(3, 32, 3, 2)]
        cin = 32
        for expand, cout, repeats, stride in STAGES:
            for index in range(repeats):
                blocks.append(InvertedResidual(cin, cout, stride if index == 0 else 1, expand))
                cin = cout
        blocks.append(ConvBnRelu6(cin, 1280, 1))
        self.features = nn.Sequential(*blocks)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, 3, 224, 224] -> logits [N, 1000]."""
        return self.classifier(self.features(x).mean((2, 3)))


def export(out: Path) -> None:
    """Write the model to `out`, with a symbolic batch."""
    model = MobileNetV2().eval()
    state = torch.load(zoo.weights(zoo.case("mobilenet_v2")), weights_only=True)
    model.load_state_dict(state)
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.onnx.export(
        model,
        (torch.zeros(2, 3, 224, 224),),
        out,
        input_names=["x"],
        output_names=["logits"],
        opset_version=18,
        dynamic_shapes=({0: torch.export.Dim("N")},),
        dynamo=True,
        external_data=False,
    )


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else zoo.export_path(zoo.case("mobilenet_v2"))
    export(target)
    print(target)
