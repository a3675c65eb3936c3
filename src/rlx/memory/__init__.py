# SPDX-License-Identifier: Apache-2.0
"""Memory planning on the thunk schedule: liveness, offsets, and an independent checker."""
