# SPDX-License-Identifier: Apache-2.0
"""What `import rlx` offers: load, compile, Graph, devices."""
