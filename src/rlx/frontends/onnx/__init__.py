# SPDX-License-Identifier: Apache-2.0
"""The ONNX importer: files to checked records (`model`), records to a graph (`importer`)."""
