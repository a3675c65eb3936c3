# SPDX-License-Identifier: Apache-2.0
"""Readers of model files; each turns a file into a graph."""
