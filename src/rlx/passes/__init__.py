# SPDX-License-Identifier: Apache-2.0
"""Transformations of a graph. `pipelines` says which run in which order and why."""
