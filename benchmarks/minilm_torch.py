# SPDX-License-Identifier: Apache-2.0
"""all-MiniLM-L6-v2 as a PyTorch module: a BERT encoder of 6 layers, 384 wide, 12 heads.

Source: Devlin et al. 2018 (architecture), Wang et al. 2020 (the distilled weights).
Shapes: B batch, S sequence, W = 384, H = 12 heads of 32.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, HIDDEN = 384, 12, 6, 1536
VOCABULARY, POSITIONS, TYPES, EPSILON = 30522, 512, 2, 1e-12


class Layer(nn.Module):
    """Self-attention and a two-layer perceptron, each followed by a residual and a layer norm."""

    def __init__(self, fused_attention: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.project = nn.Linear(WIDTH, WIDTH)
        self.attention_norm = nn.LayerNorm(WIDTH, EPSILON)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, EPSILON)
        self.fused_attention = fused_attention

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x: [B, S, W], bias: [B, 1, 1, S] added to the scores -> [B, S, W]."""
        x = self.attention_norm(x + self.project(self.attention(x, bias)))
        return self.norm(x + self.down(nn.functional.gelu(self.up(x))))

    def attention(self, x: Tensor, bias: Tensor) -> Tensor:
        """Multi-head attention of x over itself -> [B, S, W]."""
        batch, length, _ = x.shape
        q, k, v = (
            linear(x).view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        if self.fused_attention:
            y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            scores = q @ k.transpose(2, 3) / math.sqrt(WIDTH // HEADS) + bias
            y = torch.softmax(scores, -1) @ v
        return y.transpose(1, 2).reshape(batch, length, WIDTH)


class MiniLM(nn.Module):
    """The encoder without its pooler.

    Args:
        fused_attention: use torch's attention kernel (fastest in torch) instead of the matmuls and
            softmax that exporters write.
    """

    def __init__(self, fused_attention: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(POSITIONS, WIDTH)
        self.types = nn.Embedding(TYPES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, EPSILON)
        self.layers = nn.ModuleList(Layer(fused_attention) for _ in range(LAYERS))

    def forward(self, ids: Tensor, mask: Tensor, types: Tensor) -> Tensor:
        """ids, mask, types: i64[B, S] -> last_hidden_state f32[B, S, W]."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.words(ids) + self.types(types) + self.positions(positions))
        bias = (1.0 - mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, bias)
        return x


def load(weights: Path, fused_attention: bool = True) -> MiniLM:
    """Return the trained encoder, in evaluation mode, from a safetensors file."""
    model = MiniLM(fused_attention)
    model.load_state_dict(
        {
            _renamed(name): tensor
            for name, tensor in load_file(weights).items()
            if not name.startswith("pooler.") and not name.endswith("position_ids")
        }
    )
    return model.eval()


def _renamed(name: str) -> str:
    for old, new in (
        ("embeddings.word_embeddings", "words"),
        ("embeddings.position_embeddings", "positions"),
        ("embeddings.token_type_embeddings", "types"),
        ("embeddings.LayerNorm", "norm"),
        ("encoder.layer.", "layers."),
        ("attention.self.", ""),
        ("attention.output.dense", "project"),
        ("attention.output.LayerNorm", "attention_norm"),
        ("intermediate.dense", "up"),
        ("output.dense", "down"),
        ("output.LayerNorm", "norm"),
    ):
        name = name.replace(old, new)
    return name
