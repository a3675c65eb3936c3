# SPDX-License-Identifier: Apache-2.0
"""Post-training quantisation: ranges of activations from sample data, and graphs that compute in 8 bits."""
