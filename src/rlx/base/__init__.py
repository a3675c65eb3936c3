# SPDX-License-Identifier: Apache-2.0
"""The lowest layer: errors, knobs, dtypes, dims, types, numeric rules. Imports nothing of ours."""
