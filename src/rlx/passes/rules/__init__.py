# SPDX-License-Identifier: Apache-2.0
"""Exact rewrites, one file per rule set."""
