# SPDX-License-Identifier: Apache-2.0
"""Backends: each compiles graphs for one kind of device. `protocol.py` is what a backend author reads first."""
