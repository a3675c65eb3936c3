# SPDX-License-Identifier: Apache-2.0
"""Kernel families of the CPU backend: an emitter and its lowering per file.

Importing this package registers every lowering.
"""
