# SPDX-License-Identifier: Apache-2.0
"""The collector may run anywhere, also while this thread holds the lock that guards LLVM."""

from __future__ import annotations

import gc
import threading

from rlx.backends.cpu import jit
from rlx.backends.cpu.isa import host_isa


def test_collecting_a_library_takes_no_lock() -> None:
    isa = host_isa()
    text = "define void @regress_nothing() {\n  ret void\n}\n"
    kept = [jit.Library([jit.compile_text(text, isa)], ["regress_nothing"], isa)]

    def collect() -> None:
        with jit._LOCK:  # pyright: ignore[reportPrivateUsage]
            kept.clear()
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    jit.Library([jit.compile_text(text, isa)], ["regress_nothing"], isa).close()
