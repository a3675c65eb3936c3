# SPDX-License-Identifier: Apache-2.0
"""Compiling graphs into executables, and running them."""
