# SPDX-License-Identifier: Apache-2.0
"""Device-free form of a compiled program: slots, thunks, and the schedule that a planner and a backend see."""
