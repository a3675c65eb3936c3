# SPDX-License-Identifier: Apache-2.0
"""rlx compiles and runs machine-learning models."""
