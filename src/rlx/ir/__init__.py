# SPDX-License-Identifier: Apache-2.0
"""The graph: values, nodes, blocks, text form, verifier, rewriting. Knows no operator by name."""
